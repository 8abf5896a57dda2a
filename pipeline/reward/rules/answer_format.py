"""Reward of the form `<think>...</think> <answer>...</answer>`: 1.0 if a response has it, else 0.0.

Each tag occurs exactly once, in this order, with text inside and only blanks around. No data source uses this rule; it
is an additional part of another reward:

    reward.functions.form.path=pipeline.reward.rules.answer_format
    reward.functions.form.name=format_reward
"""

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: Any = None, think_opened: bool = False
) -> float:
    """Return 1.0 if the response has the form, else 0.0. `think_opened`: the prompt has written `<think>` already."""
    text = f"{TAGS[0]}{solution_str}" if think_opened else solution_str
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    before, tail = text.split(TAGS[0])
    thought, closed, tail = tail.partition(TAGS[1])
    between, opened, tail = tail.partition(TAGS[2])
    answer, ended, after = tail.partition(TAGS[3])
    in_order = bool(closed and opened and ended)
    outside = f"{before}{between}{after}"
    return float(in_order and bool(thought.strip()) and bool(answer.strip()) and not outside.strip())
