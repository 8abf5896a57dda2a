"""The reward of the form `<think>...</think> <answer>...</answer>`."""

import pytest

from pipeline.reward.rules.answer_format import format_reward

GOOD = "<think>hm</think><answer>5</answer>"

CASES = [
    (GOOD, 1), (f" \n{GOOD}\n", 1), ("<think>\na\nb</think>\n\n<answer>\n5\n</answer>", 1),
    ("<think>5 < 6 > 4</think> <answer>{5}</answer>", 1), ("<think>\u00e9</think><answer>\u53f3</answer>", 1),
    ("<think>" + "long " * 20_000 + "</think><answer>5</answer>", 1), (f"So: {GOOD}", 0), (f"{GOOD} Done.", 0),
    ("<think>hm</think> so <answer>5</answer>", 0), (GOOD + GOOD, 0),
    ("<think>hm</think><think>hm</think><answer>5</answer>", 0),
    ("<think>hm</think><answer>5</answer><answer>5</answer>", 0), ("<answer>5</answer><think>hm</think>", 0),
    ("<think><answer>5</answer></think>", 0), ("<think>hm<answer></think>5</answer>", 0),
    ("<think></think><answer>5</answer>", 0), ("<think>hm</think><answer> </answer>", 0),
    ("<think>hm</think><answer>5", 0), ("hm</think><answer>5</answer>", 0), ("<Think>hm</Think><Answer>5</Answer>", 0),
    ("<answer>5</answer>", 0), ("5", 0), ("", 0), ("<think>" * 14_000, 0), ("<" * 100_000, 0),
    ("<think>" + "</think><answer>" * 6_000, 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "score"), CASES)
def test_cases(response: str, score: int) -> None:
    assert format_reward(data_source="any", solution_str=response, ground_truth=None, extra_info={}) == score


def test_a_prompt_that_opens_think() -> None:
    opened = GOOD.removeprefix("<think>")
    assert format_reward("any", opened, think_opened=True) == 1.0
    assert format_reward("any", GOOD, think_opened=True) == 0.0
