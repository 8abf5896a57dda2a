"""Format reward: 1.0 if the response has the form `<think>...</think> <answer>...</answer>`, else 0.0.

Each tag must occur exactly once, in this order, with text inside, and only whitespace outside. No data source uses this
rule by default; it can be added to another reward:

    reward.functions.form.path=pipeline.reward.rules.answer_format
    reward.functions.form.name=format_reward
"""

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: Any = None, think_opened: bool = False
) -> float:
    """Return 1.0 if the response has the form, else 0.0.

    Args:
        data_source, ground_truth, extra_info: not used.
        solution_str: the response.
        think_opened: True if the prompt ends with `<think>`, so the response begins after this tag.
    """
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
