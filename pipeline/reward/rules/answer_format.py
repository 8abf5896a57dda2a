"""Reward of the form `<think>...</think> <answer>...</answer>`: 1.0 where a response has it, else 0.0.

Each tag stands exactly once, in this order, with text inside and nothing but blanks around. No data source has this
rule for itself; it is a part beside another reward:

    reward.functions.form.path=pipeline.reward.rules.answer_format
    reward.functions.form.name=format_reward
"""

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def has_form(solution_str: str, think_opened: bool = False) -> bool:
    """Whether the response has the form; `think_opened`: the prompt has written `<think>` already."""
    text = f"{TAGS[0]}{solution_str}" if think_opened else solution_str
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    places = [text.index(tag) for tag in TAGS]
    if places != sorted(places):
        return False
    ends = [place + len(tag) for place, tag in zip(places, TAGS, strict=True)]
    around = text[: places[0]] + text[ends[1] : places[2]] + text[ends[3] :]
    return not around.strip() and bool(text[ends[0] : places[1]].strip()) and bool(text[ends[2] : places[3]].strip())


def compute_score(solution_str: str, ground_truth: Any = None, think_opened: bool = False) -> dict[str, Any]:
    """Score of the form alone.

    Args:
        solution_str: the decoded response, any text at all.
        ground_truth: not used.
        think_opened: the prompt ends inside an opened `<think>`.

    Returns:
        `score` (1.0 or 0.0) and `format` (0 or 1).
    """
    shaped = has_form(solution_str, think_opened)
    return {"score": float(shaped), "format": int(shaped)}


def format_reward(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: Any = None, think_opened: bool = False
) -> float:
    """The same as a reward function with verl's arguments, of which it reads the response alone."""
    return float(has_form(solution_str, think_opened))
