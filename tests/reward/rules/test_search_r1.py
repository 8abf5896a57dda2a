"""The Search-R1 rule: exact match after normalisation."""

from typing import Any

import pytest

from pipeline.reward.rules import rule_of
from pipeline.reward.rules.search_r1 import MAX_LENGTH, MAX_PRED, MAX_TAGS, compute_score

TRUTH = {"target": ["Eiffel Tower", "Tour Eiffel"]}
LONG = "Let us search. " * 6700  # 100 kB


def tagged(text: str) -> str:
    return f"<think>hm</think> <answer>{text}</answer>"


CASES = [
    (tagged("Eiffel Tower"), 1), (tagged("the eiffel tower."), 1), (tagged(" The  Eiffel\nTower! "), 1),
    (tagged("tour eiffel"), 1), (tagged("'Eiffel' Tower"), 1), (tagged("(an) Eiffel-Tower"), 0),
    (tagged("\u2019Eiffel\u2019 \u201cTower\u201d"), 1),
    (tagged("Eiffel Tower, Paris"), 0), (tagged("Tower"), 0), (tagged("Eiffel"), 0), (tagged(""), 0),
    (tagged("."), 0),
    (tagged("the"), 0), (tagged("{Eiffel Tower}"), 1), (tagged("$Eiffel Tower%"), 1),
    (tagged("Eiffel Tower or Big Ben"), 0),
    (tagged("42"), 0), (tagged("-1"), 0), (tagged("1/2"), 0), (tagged("\u202eEiffel Tower"), 0),
    (tagged("E\u0301iffel Tower"), 0),
    (tagged("Big Ben") + tagged("Eiffel Tower"), 1), (tagged("Eiffel Tower") + tagged("Big Ben"), 0),
    (tagged("Eiffel Tower") + "<answer>", 1), ("Eiffel Tower", 0), ("<answer>Eiffel Tower", 0), ("", 0),
    ("</answer>Eiffel Tower<answer>", 0), (LONG + tagged("Eiffel Tower"), 1), (tagged("Eiffel Tower") + LONG, 1),
    (tagged(LONG), 0), ("<answer>" * 12_000, 0), ("</answer>" * 11_000, 0), (tagged("a " * 50_000), 0),
    (tagged("." * 100_000), 0), (tagged("{" * 1900), 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "acc"), CASES)
def test_cases(response: str, acc: int) -> None:
    result = compute_score(response, TRUTH)
    assert (result["score"], result["acc"]) == (float(acc), acc)


def test_guesses_count_a_quarter() -> None:
    right = tagged("Eiffel Tower")
    assert compute_score(tagged("x") * (MAX_TAGS - 1) + right, TRUTH)["score"] == 1.0
    assert compute_score(tagged("x") * MAX_TAGS + right, TRUTH)["score"] == 0.25
    assert compute_score("<answer>" * MAX_TAGS + right, TRUTH)["score"] == 0.25
    assert compute_score(right * MAX_TAGS + tagged("x"), TRUTH)["score"] == 0.0


def test_parts() -> None:
    assert compute_score(tagged("The Big Ben"), TRUTH) == {"score": 0.0, "acc": 0, "format": 1, "pred": "big ben"}
    assert compute_score("no", TRUTH) == {"score": 0.0, "acc": 0, "format": 0, "pred": ""}
    assert len(compute_score(tagged("x" * MAX_LENGTH), TRUTH)["pred"]) == MAX_PRED


@pytest.mark.parametrize("truth", [{"target": "Paris"}, {"target": ["Paris"]}, ["Lyon", "Paris"], "Paris"])
def test_forms_of_truth(truth: Any) -> None:
    assert rule_of("searchR1_nq")(tagged("paris"), truth)["score"] == 1.0
    assert rule_of("searchR1_nq")(tagged("rome"), truth)["score"] == 0.0


@pytest.mark.parametrize("truth", [None, {}, {"target": None}, {"target": []}, {"target": ["the"]}, [1], 5, "..."])
def test_unusable_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground_truth of a searchR1 row must hold `target`"):
        compute_score(tagged(""), truth)


NUMBERS = [
    (".5", "5", 0), (".5", "0.5", 1), ("-.5", "-0.5", 1), ("\u22125", "-5", 1), ("\u22125", "5", 0),
    ("-42", "42", 0), ("- 42", "42", 0), ("42", "-42", 0), ("4.2", "42", 0), ("42", "4.2", 0), ("1/2", "12", 0),
    ("5-7", "57", 0), ("3.14", "314", 0), ("1,00", "100", 0), ("0,005", "5", 0), ("12:30", "1230", 0),
    ("-42", "-42", 1), ("4.2", "4.2", 1), ("1,000", "1000", 1), ("$42", "42", 1), ("42.", "42", 1), ("42%", "42", 1),
    ("1914-1918", "1914-1918", 1), ("Catch-22", "catch 22", 0), ("Catch-22", "Catch-22", 1), ("U.S.", "US", 1),
    ("P-51", "P51", 1),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "target", "acc"), NUMBERS)
def test_a_sign_and_a_mark_within_a_number_count(answer: str, target: str, acc: int) -> None:
    assert compute_score(f"<answer>{answer}</answer>", {"target": [target]})["acc"] == acc
