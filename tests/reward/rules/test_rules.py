"""The list of rules."""

import pytest

from pipeline.reward.rules import RULES, rule_of


def test_a_star_stands_for_any_ending() -> None:
    assert rule_of("aime24") is rule_of("aime") is RULES["aime*"] and rule_of("searchR1_nq") is RULES["searchR1_*"]


@pytest.mark.parametrize("source", ["", "MATH", "gsm8K", "maths", "an_aime", "searchr1_nq"])
def test_an_unknown_data_source_is_an_error_that_names_the_known_ones(source: str) -> None:
    with pytest.raises(ValueError, match="has no reward rule") as error:
        rule_of(source)
    assert repr(source) in str(error.value) and all(name in str(error.value) for name in (*RULES, "taco"))
