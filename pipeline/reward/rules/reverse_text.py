"""Reward for reversed text: how similar the answer is to the prompt's text written backwards, from 0 to 1.

The environment `reverse-text` of verifiers, on which prime-rl trains, has the same score: `ratio()` of Python's
`SequenceMatcher` for the right text and the text in the last closed `<reversed_text>`. `acc` is 1 for the right text.

A `SequenceMatcher` takes time that grows faster than the square of the lengths, and the model may write anything. So an
answer that is longer than both `MAX_TIMES` times the right text and `MAX_SHORT` characters scores 0, and the right text
may have at most `MAX_LENGTH` characters.
"""

from difflib import SequenceMatcher
from typing import Any

from pipeline.reward.rules.countdown import extract_answer

OPEN, CLOSE = "<reversed_text>", "</reversed_text>"
MAX_LENGTH = 500  # characters of the right text
MAX_TIMES, MAX_SHORT = 2, 100  # longer answers score 0


def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """Score a response to a prompt that wants a reversed text.

    Args:
        solution_str: the response, any text.
        ground_truth: the right answer: the text, reversed.

    Raises:
        ValueError: `ground_truth` is not a text of 1 to `MAX_LENGTH` characters.
    """
    if not isinstance(ground_truth, str) or not 0 < len(ground_truth) <= MAX_LENGTH:
        raise ValueError(
            f"reward_model.ground_truth of a reverse_text row must be a text of 1 to {MAX_LENGTH} characters, the "
            f"right answer, not {repr(ground_truth)[:100]}"
        )
    answer = extract_answer(solution_str, OPEN, CLOSE)
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    answer = answer.strip()
    most = max(MAX_TIMES * len(ground_truth), MAX_SHORT)
    score = 0.0 if len(answer) > most else SequenceMatcher(None, answer, ground_truth).ratio()
    return {"score": score, "acc": int(answer == ground_truth), "format": 1, "pred": answer[:most]}
