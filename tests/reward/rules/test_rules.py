"""The list of rules: which data source has which, and what is said of one that has none."""

import pytest

from pipeline.reward.rules import RULES, countdown, gsm8k, math_boxed, math_dapo, multiple_choice, rule_of, search_r1


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("countdown", countdown.compute_score),
        ("openai/gsm8k", gsm8k.compute_score),
        ("lighteval/MATH", math_boxed.compute_score),
        ("DigitalLearningGmbH/MATH-lighteval", math_boxed.compute_score),
        ("HuggingFaceH4/MATH-500", math_boxed.compute_score),
        ("math", math_dapo.compute_score),
        ("math_dapo", math_dapo.compute_score),
        ("aime", math_dapo.compute_score),
        ("aime24", math_dapo.compute_score),
        ("Rowan/hellaswag", multiple_choice.compute_score),
        ("searchR1_2wikimultihopqa", search_r1.compute_score),
    ],
)
def test_each_data_source_has_its_rule(source: str, rule: object) -> None:
    assert rule_of(source) is rule


@pytest.mark.parametrize("source", ["", "MATH", "gsm8K", "maths", "an_aime", "searchr1_nq"])
def test_an_unknown_data_source_is_an_error_that_names_the_known_ones(source: str) -> None:
    with pytest.raises(ValueError, match="has no reward rule") as error:
        rule_of(source)
    assert repr(source) in str(error.value) and all(name in str(error.value) for name in (*RULES, "taco"))
