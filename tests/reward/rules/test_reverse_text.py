"""The rule of reversed text: the protocol's similarity, and a bound on the length of answers."""

from difflib import SequenceMatcher

import pytest

from pipeline.reward.rules import RULES
from pipeline.reward.rules.reverse_text import MAX_LENGTH, compute_score


def tagged(text: str) -> str:
    return f"<reversed_text>{text}</reversed_text>"


@pytest.mark.parametrize("answer", ["god eht", "god the", "dog eht", "", "xyz"])
def test_the_score_is_the_similarity_of_the_answer(answer: str) -> None:
    found = compute_score(f"Here it is: {tagged(f' {answer} ')} bye", "god eht")
    assert found["score"] == SequenceMatcher(None, answer, "god eht").ratio()
    assert found["acc"] == (answer == "god eht") and found["format"] == 1 and found["pred"] == answer
    assert compute_score(tagged("god eht"), "god eht")["score"] == 1.0
    assert RULES["reverse_text"] is compute_score


def test_the_last_closed_tag_counts_and_no_tag_is_no_answer() -> None:
    assert compute_score(tagged("wrong") + tagged("god") + "<reversed_text>open", "god")["acc"] == 1
    for response in ("god", "<reversed_text>god", "god</reversed_text>", ""):
        assert compute_score(response, "god") == {"score": 0.0, "acc": 0, "format": 0, "pred": ""}


def test_a_long_answer_scores_nothing_although_it_holds_the_right_one() -> None:
    assert compute_score(tagged("god" + "." * 98), "god")["score"] == 0.0
    assert compute_score(tagged("god" + "." * 97), "god")["score"] > 0


@pytest.mark.parametrize("truth", ["", 7, None, ["god"], "a" * (MAX_LENGTH + 1)])
def test_a_truth_of_another_form_is_an_error_of_the_data(truth: object) -> None:
    with pytest.raises(ValueError, match=r"reverse_text row must be a text of 1 to 500 characters"):
        compute_score(tagged("god"), truth)  # type: ignore[arg-type]
