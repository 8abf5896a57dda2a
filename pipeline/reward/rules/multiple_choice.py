r"""Reward for multiple-choice questions: 1.0 for the right letter, 0.0 for another letter or none.

The letter is read from the first of these that the response has: the last closed `<answer>`, the last `\boxed{...}`,
the text after the last "answer is" or "answer:", the last line with only a letter, the beginning of the response
(`B. He jumps`). So a letter elsewhere ("A dog ...") is not an answer. The letter may be in brackets or between
asterisks, and `\text{B}` is B. If a second letter is named there (`A or B`, `A/B`, `(A), (B)`, `A. He B. She`), the
response has no answer.
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
_CHOICE = r"[*_(\[{$]{0,4}(?!I\b)[A-Z](?![\w'\u2019])"
_SECOND = re.compile(
    r"[*_)\]}$]{0,6}\s{0,3}(?:[,/;&|+-]|or\b|and\b|vs\b|\((?=or\b)|(?<=\s))\s{0,3}(?:or\s|and\s)?"
    rf"{_CHOICE}|[*_)\]}}$.:]{{1,6}}{_CHOICE}"
)
_MARKED = re.compile(r"(?<!\w)[A-Z][).:\]](?!\w)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")


def extract_letter(solution_str: str) -> str:
    """Return the letter that a response chooses, as a capital; "" if it chooses none."""
    for marked in (extract_answer(solution_str), last_boxed(solution_str)):
        if marked is not None:
            text = _TEXT.sub(r"\1", marked[:WINDOW])
            return _opening(text, len(text))
    end = solution_str[-WINDOW:]
    phrases = list(_PHRASE.finditer(end))
    if phrases:
        letter = phrases[-1][1] or phrases[-1][2]
        return "" if _SECOND.match(end, phrases[-1].end()) else letter.upper()
    for line in reversed(end.splitlines()):
        if match := _LINE.fullmatch(line):
            return match[1].upper()
    opening = solution_str[:WINDOW].lstrip()
    return _opening(solution_str, solution_str.find(opening) + len(opening.partition("\n")[0]))


def _opening(text: str, end: int) -> str:
    """Return the letter at the beginning of `text`; "" without a letter, or if a second one is named before `end`."""
    match = _OPENING.match(text)
    if match is None or _SECOND.match(text, match.end(1), end) or _MARKED.search(text, match.end(), end):
        return ""
    return match[1].upper()


def compute_score(solution_str: str, ground_truth: int | str) -> dict[str, Any]:
    """Score a response to a question with lettered choices.

    Args:
        solution_str: the response, any text.
        ground_truth: index of the right choice, from 0, as a number or as text; or its letter.

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
