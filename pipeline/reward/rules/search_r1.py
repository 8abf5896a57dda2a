"""Reward for Search-R1: 1.0 for an exact match with one of the right answers, 0.0 for another answer or none.

The answer is the text in the last closed `<answer>`. Answers are compared in lower case, without punctuation, articles
and extra spaces, as in SQuAD. But signs of numbers and marks between digits count: `4.2` and `-42` are not `42`. A
response with more than `MAX_TAGS` answer tags lists guesses, and gets a quarter of the score.
"""

import re
import string
from typing import Any

from pipeline.reward.rules.countdown import CLOSE, OPEN, extract_answer

MAX_TAGS = 10
MAX_LENGTH = 2000  # characters of an answer; longer ones are wrong
MAX_PRED = 300  # characters of `pred`

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_TYPED = str.maketrans({"\u2212": "-", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
_POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # of a number without a whole part
_SIGNED = re.compile(r"(?<!\w)-\s?(?=\d)")
_WITHIN = re.compile(rf"(?<=\d)[{re.escape(string.punctuation)}]+(?=\d)")


def normalize(text: str) -> str:
    """Convert text to lower case, without ASCII punctuation, English articles and extra spaces.

    `1,000` is `1000`, `.5` is `0.5`; other punctuation between digits separates them, and a minus before a number
    becomes a word.
    """
    text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text.translate(_TYPED))
    text = _POINT.sub("0.", text)
    text = _WITHIN.sub(" ", _SIGNED.sub("minus ", text))
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def compute_score(solution_str: str, ground_truth: dict[str, Any] | list[str] | str) -> dict[str, Any]:
    """Score a response to a question.

    Args:
        solution_str: the response, any text.
        ground_truth: `{"target": answer or list of answers}`, or only the answer or the list.

    Raises:
        ValueError: `ground_truth` holds no answer.
    """
    targets = _read(ground_truth)
    answer = extract_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    pred = normalize(answer) if len(answer) <= MAX_LENGTH else ""
    correct = pred != "" and pred in targets
    tags = max(solution_str.count(OPEN), solution_str.count(CLOSE))
    score = float(correct) / (4 if tags > MAX_TAGS else 1)
    return {"score": score, "acc": int(correct), "format": 1, "pred": pred[:MAX_PRED]}


def _read(ground_truth: Any) -> set[str]:
    answers = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    answers = [answers] if isinstance(answers, str) else answers
    targets: set[str] = set()
    if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
        targets = {normalize(answer) for answer in answers} - {""}
    if not targets:
        raise ValueError(
            "reward_model.ground_truth of a searchR1 row must hold `target`, an answer or a list of answers with "
            f"letters or digits in them, not {str(ground_truth)[:100]!r}"
        )
    return targets
