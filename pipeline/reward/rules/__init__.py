"""Built-in reward rules by `data_source`.

A rule is `compute_score(solution_str, ground_truth)`, a pure function of the response text and the row's ground truth.
It returns a dict with `score`, `acc` (1 if the answer is right, else 0), `format` (1 if the answer is in the requested
form, else 0), and `pred`, the answer in a canonical form for majority votes, cut to a maximum length ("" without an
answer). It raises `ValueError` for ground truth that it cannot use, which is an error of the data and not a score of 0;
no response makes it raise. A new rule needs one module in this folder and one line in `RULES`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from pipeline.reward.rules import (
    blocks,
    countdown,
    geo3k,
    gsm8k,
    math_boxed,
    math_dapo,
    multiple_choice,
    reverse_text,
    search_r1,
    sums,
)
from pipeline.reward.sandbox.rule import DATA_SOURCES

Rule = Callable[..., dict[str, Any]]

RULES: dict[str, Rule] = {
    "blocks": blocks.compute_score,
    "countdown": countdown.compute_score,
    "gsm8k": gsm8k.compute_score,
    "openai/gsm8k": gsm8k.compute_score,  # the name in verl's files
    "DigitalLearningGmbH/MATH-lighteval": math_boxed.compute_score,
    "HuggingFaceH4/MATH-500": math_boxed.compute_score,
    "lighteval/MATH": math_boxed.compute_score,
    "numina_*": partial(math_boxed.compute_score, phrase=True),
    "aime*": math_dapo.compute_score,
    "math": math_dapo.compute_score,
    "math_dapo": math_dapo.compute_score,
    "math_dapo_reasoning": math_dapo.compute_score,
    "hiyouga/geometry3k": geo3k.compute_score,
    "Rowan/hellaswag": multiple_choice.compute_score,
    "hellaswag": multiple_choice.compute_score,
    "reverse_text": reverse_text.compute_score,
    "searchR1_*": search_r1.compute_score,
    "sums": sums.compute_score,
}
"""Rules by `data_source`. A key that ends with `*` stands for all data sources that begin with the text before it."""


def rule_of(data_source: str) -> Rule:
    """Return the rule that scores rows of `data_source`.

    Raises:
        ValueError: no rule scores this data source; the text lists the known ones.
    """
    if data_source in RULES:
        return RULES[data_source]
    for name, rule in RULES.items():
        if name.endswith("*") and data_source.startswith(name[:-1]):
            return rule
    known = ", ".join(sorted([*RULES, *DATA_SOURCES]))
    raise ValueError(
        f"data_source {data_source!r} has no reward rule (known: {known}); name one of these in the data, or set "
        "reward.custom_reward_function.path to a Python file with a function of your own"
    )
