"""The multiple-choice rule: which letter a response chooses."""

from typing import Any

import pytest

from pipeline.reward.rules import rule_of
from pipeline.reward.rules.multiple_choice import compute_score, extract_letter

LONG = "Let us think. " * 7200  # 100 kB

CASES = [
    ("B", "B"), (" b \n", "B"), ("(B)", "B"), ("B.", "B"), ("B)", "B"), ("**B**", "B"), ("B. He jumps.", "B"),
    ("B: he jumps", "B"), ("[B]", "B"), ("The answer is B.", "B"), ("The answer is (b).", "B"),
    ("The answer is **B**", "B"), ("Answer: B", "B"), ("**Answer:** B", "B"), ("answer is: C", "C"),
    ("The answer is $\\boxed{B}$", "B"), ("\\boxed{B}", "B"), ("\\boxed{\\text{B}}", "B"), ("\\boxed{(B)}", "B"),
    ("<answer>B</answer>", "B"), ("<answer> B. He jumps </answer>", "B"), ("the best ending is option C", "C"),
    ("Not A.\nD", "D"), ("A dog runs.\n\nD\n", "D"), ("The answer is A. No, the answer is B.", "B"),
    ("<answer>A</answer> <answer>B</answer>", "B"), ("\\boxed{A} \\boxed{B}", "B"),
    ("The answer is B" + " so" * 300, "B"), ("A dog runs.", ""), ("The answer is a dog.", ""),
    ("I think B is right", ""), ("<answer></answer>\nB", ""), ("<answer>all of them</answer>\nB", ""),
    ("\\boxed{2}", ""), ("1", ""), ("-B-", ""), ("", ""), ("\u0412", ""), ("\uff22", ""), ("{{{B}}}", ""),
    ("Bee", ""), ("I'd say: maybe", ""), ("The answer is A's", ""), ("\\frac{1}{2}", ""), ("$5", ""),
    ("The answer is B, I think", "B"), ("The answer is B because A is wrong.", "B"), ("The answer is B, not A.", "B"),
    ("<answer>B. A dog runs</answer>", "B"), ("\\boxed{\\textbf{(B)}}", "B"), ("B. He jumps.\nA. is wrong", "B"),
    # several
    ("The answer is A or B", ""), ("The answer is (A) or (B)", ""), ("Answer: A and B", ""), ("Answer: A, B", ""),
    ("A or B", ""), ("The answer is A/B", ""), ("The answer is A, B or C", ""), ("The answer is A-B", ""),
    ("Answer: A B C D", ""), ("(A) (B)", ""), ("The answer is A (or B)", ""), ("<answer>A or B</answer>", ""),
    ("<answer>A. B. C. D.</answer>", ""), ("A. He. B. She", ""), ("<answer>A) He\nB) She</answer>", ""),
    ("<answer>(A)(B)</answer>", ""), ("\\boxed{A, B}", ""), ("\\boxed{(A),(B)}", ""), ("\\boxed{A.B.C}", ""),
    ("\\boxed{A:B}", ""), ("\\boxed{\\text{A}\\text{B}}", ""), ("\\boxed{A\\text{ or }B}", ""), ("A) or B)", ""),
    ("\\boxed{A'}", ""), ("\\boxed{A!}", ""), ("\uff21", ""), ("Answer: ABCD", ""), (LONG + "\nB", "B"),
    ("B\n" + LONG, ""), ("B. " + LONG, "B"), ("answer is " * 10_000, ""), ("(" * 100_000, ""),
    ("<answer>" * 12_000, ""), ("\\boxed{" * 14_000, ""), ("\n" * 100_000, ""), ("A\n" * 50_000, "A"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "letter"), CASES)
def test_cases(response: str, letter: str) -> None:
    assert extract_letter(response) == letter
    for place, truth in enumerate("ABCD"):
        expected = {"score": float(letter == truth), "acc": int(letter == truth), "format": int(letter != "")}
        assert compute_score(response, place) == expected | {"pred": letter}


@pytest.mark.parametrize("truth", [1, "1", "B", "b", " B "])
def test_ground_truth_is_a_place_or_a_letter(truth: Any) -> None:
    for source in ("Rowan/hellaswag", "hellaswag"):
        assert rule_of(source)("B", truth)["score"] == 1.0
        assert rule_of(source)("C", truth)["score"] == 0.0


@pytest.mark.parametrize("truth", [None, "", True, -1, 26, "99", "BB", 1.0, [1], "\u0661", "he jumps"])
def test_unusable_ground_truth_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground_truth of a multiple-choice row must be the index"):
        compute_score("B", truth)
