"""What the text behind a number does to it."""

import pytest

from pipeline.reward.rules.quantity import changes, goes_on, goes_on_in_line, is_numeric, without_exponents

OTHER = [
    "k", "K", "M", "x", "abc", " million", " Thousand", "-hundred", " and a half", " one third", " point five",
    " squared", "^2", "^x", "\u00b2", "\u207b\u00b9", "\u00bd", "_1", "\u4e07", " k", "** million",
    "\u03c0", "\u2030", " quadrillion", " Mio", "\u2011million", " tens", " thirds", " and a third",
]  # fmt: skip
SAME = [
    "", " ", ".", ". Million", ", half", " apples", "km", "%", "% of all", "nd", " and so on", " points", " seconds",
    "**", "}$", "-year-old", "\u5143", " T-shirts", " M&Ms", " is the answer", "_", "\n million", " (a half)",
    " third graders", " fifth-grade pupils",
]  # fmt: skip
ALONE = [
    " or more",
    " vs",
    " plus tax",
    " = x",
    " + x",
    "\\times x",
    "!",
    " of forty",
    ", or 43",
    " \u00b1",
    " over x",
    " in 3 days",
    " forty-three",
]


@pytest.mark.parametrize("behind", OTHER)
def test_what_makes_another_number(behind: str) -> None:
    assert goes_on(behind) and goes_on_in_line(behind)


@pytest.mark.parametrize("behind", SAME)
def test_what_leaves_a_number_as_it_is(behind: str) -> None:
    assert not goes_on(behind)


@pytest.mark.parametrize("behind", ALONE)
def test_what_may_not_follow_in_the_line_of_a_number(behind: str) -> None:
    assert not goes_on(behind) and goes_on_in_line(behind)


def test_exponents_of_units_are_none_of_numbers() -> None:
    for unit in ("cm^2", "cm\u00b2", "m^{3}", "square feet", "ft2"):
        assert not goes_on_in_line(without_exponents(f" {unit}").replace("ft2", "ft"))
    assert without_exponents("5 x^2 + 3^2, 2^{10}") == "5 x^2 + 3^2, 2^{10}"
    assert without_exponents("60^\\circ, 60^{\\circ}") == "60, 60"


def test_words_and_characters_that_stand_for_numbers() -> None:
    assert all(map(changes, ("million", "Dozen", "halves", "ninety", "vs", "k"))) and not any(
        map(changes, ("apples", "K9", "m"))
    )
    assert all(map(is_numeric, "5\u0665\u00bd\u00b2\u2167\u4e07")) and not any(map(is_numeric, "a.-%\u00b0"))
