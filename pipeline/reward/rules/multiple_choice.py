r"""Reward of a multiple-choice answer: 1.0 for the right letter, 0.0 for any other or none.

The first of these places that a response has decides, so that a letter in passing ("A dog ...") is no answer: the last
closed `<answer>`, the last box, what follows the last "answer is" or "answer:", the last line that is only a letter,
and a letter that opens the response (`B. He jumps`). The letter may stand in brackets or between asterisks, and
`\text{B}` is B.
"""

import re
from typing import Any

from pipeline.reward.rules.boxed import last_boxed
from pipeline.reward.rules.countdown import extract_answer

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WINDOW = 2000  # characters of the response's end in which phrases and lines are looked for

_PHRASE = re.compile(
    r"(?i:\b(?:answer|choice|option|ending)(?:[ \t]is|:)[ \t*_]{0,9}(?::[ \t]?)?(?:(?:option|ending|choice)[ \t])?)"
    r"[*_$]{0,4}(?:\\text\{|\\boxed\{)?(?:([A-Z])\b(?!['\u2019])|\(([A-Za-z])\))"
)
_LINE = re.compile(r"[ \t]*[*_(\[]{0,4}([A-Za-z])[*_)\].:]{0,4}[ \t]*")
_OPENING = re.compile(r"\s{0,9}[*_(\[]{0,4}([A-Za-z])[*_]{0,3}(?:[).:\]]|\s*\Z)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")


def extract_letter(solution_str: str) -> str:
    """The letter a response chooses, a capital, or "" where it chooses none."""
    for marked in (extract_answer(solution_str), last_boxed(solution_str)):
        if marked is not None:
            match = _OPENING.match(_TEXT.sub(r"\1", marked[:WINDOW]))
            return match[1].upper() if match else ""
    end = solution_str[-WINDOW:]
    phrases = _PHRASE.findall(end)
    if phrases:
        return "".join(phrases[-1]).upper()
    for line in reversed(end.splitlines()):
        if match := _LINE.fullmatch(line):
            return match[1].upper()
    match = _OPENING.match(solution_str)
    return match[1].upper() if match else ""


def compute_score(solution_str: str, ground_truth: int | str) -> dict[str, Any]:
    """Score a response to a question with lettered choices.

    Args:
        ground_truth: index of the right choice, from 0, as a number or as text, or its letter.

    Raises:
        ValueError: `ground_truth` is neither an index nor a letter.
    """
    truth = _read(ground_truth)
    letter = extract_letter(solution_str)
    correct = letter == truth
    return {"score": float(correct), "acc": int(correct), "format": int(letter != ""), "pred": letter}


def _read(ground_truth: Any) -> str:
    text = str(ground_truth).strip() if type(ground_truth) in (int, str) else ""
    if text.isascii() and text.isdigit() and len(text) <= 2 and int(text) < len(LETTERS):
        return LETTERS[int(text)]
    if len(text) == 1 and text.upper() in LETTERS:
        return text.upper()
    raise ValueError(
        "reward_model.ground_truth of a multiple-choice row must be the index of the right choice, from 0, or its "
        f"letter, not {str(ground_truth)[:100]!r}"
    )
