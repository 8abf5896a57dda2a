"""The Countdown rule: exact arithmetic against random trees, and answers meant to hurt."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rules import countdown
from pipeline.reward.rules.countdown import AnswerError, compute_score, evaluate, tokenize
from tests.bounds import bounded

TRUTH = {"target": 54, "numbers": [3, 7, 25]}


@dataclass(frozen=True)
class Tree:
    """An expression whose text, value and numbers come from the tree itself, not from the parser under test."""

    text: str
    value: Fraction | None  # None: divides by zero
    numbers: tuple[int, ...]


def _combined(operator: str, left: Tree, right: Tree, blank: str) -> Tree:
    value = None
    if left.value is not None and right.value is not None and not (operator == "/" and right.value == 0):
        a, b = left.value, right.value
        value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operator]()
    text = f"({left.text}){blank}{operator}{blank}({right.text})"
    return Tree(text, value, left.numbers + right.numbers)


def _negated(tree: Tree) -> Tree:
    return Tree(f"-({tree.text})", None if tree.value is None else -tree.value, tree.numbers)


leaves = st.integers(0, 10**18 - 1).map(lambda n: Tree(str(n), Fraction(n), (n,)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_combined, st.sampled_from("+-*/"), inner, inner, st.sampled_from(["", " ", "\n\t"])),
        inner.map(_negated),
    ),
    max_leaves=8,
)


@given(trees)
def test_value_is_that_of_the_tree(tree: Tree) -> None:
    if tree.value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(tokenize(tree.text))
    else:
        assert evaluate(tokenize(tree.text)) == tree.value


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99)), max_size=12), st.integers(1, 99))
def test_precedence_and_left_association(tail: list[tuple[str, int]], first: int) -> None:
    # Sum of products, folded by hand: no brackets, so only the grammar decides what binds first.
    products = [Fraction(first)]
    for operator, number in tail:
        if operator in "+-":
            products.append(Fraction(number if operator == "+" else -number))
        else:
            products[-1] = products[-1] * number if operator == "*" else products[-1] / number
    text = str(first) + "".join(f"{operator}{number}" for operator, number in tail)
    assert evaluate(tokenize(text)) == sum(products)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think> 25 - 7 = 18 </think>\n<answer> (25 - 7) * 3 </answer>", 1.0),
        ("<answer>3*(25-7)</answer><|im_end|>", 1.0), ("<answer>-(7-25)*3</answer>", 1.0),
        ("<answer>1</answer> no, <answer>(25-7)*3</answer>", 1.0),
        ("<answer>(25-7)*3</answer> and <answer>unfinished", 1.0), ("<answer><answer>(25-7)*3</answer></answer>", 1.0),
        ("<answer>(25-7)*3</answer> no, <answer>1</answer>", 0.1), ("<answer></answer>", 0.1),
        ("<answer>54</answer>", 0.1), ("<answer>(25-7)*3+3-3</answer>", 0.1), ("<answer>(25-7)*3 = 54</answer>", 0.1),
        ("<answer>(25-7)×3</answer>", 0.1), ("<answer>(25-7)*3.0</answer>", 0.1), ("<answer>(25-7)*03</answer>", 0.1),
        ("<answer>(25-7)(3)</answer>", 0.1), ("<answer>+(25-7)*3</answer>", 0.1), ("<answer>(25-7)*3</answer", 0.0),
        ("(25-7)*3</answer>", 0.0), ("</answer>(25-7)*3<answer>", 0.0), ("<Answer>(25-7)*3</Answer>", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_cases(response: str, score: float) -> None:
    result = compute_score(response, TRUTH)
    assert result["score"] == score
    assert (result["acc"], result["format"]) == (int(score == 1.0), int(score > 0))


def test_division_is_exact_and_each_number_counts() -> None:
    assert compute_score("<answer>1/3*9</answer>", {"target": 3, "numbers": [1, 3, 9]})["score"] == 1.0
    twice = {"target": 9, "numbers": [3, 3]}
    assert compute_score("<answer> 3 *\n3</answer>", twice) == {"score": 1.0, "acc": 1, "format": 1, "pred": "3*3"}
    assert compute_score("<answer>3*3</answer>", {"target": 9, "numbers": [3]})["score"] == 0.1
    assert compute_score("<answer>3+3+3</answer>", twice)["score"] == 0.1


def test_depth_is_bounded_before_the_stack_is() -> None:
    for opening, closing in (("(", ")"), ("-", "")):
        inside = opening * countdown.MAX_DEPTH + "7" + closing * countdown.MAX_DEPTH
        assert evaluate(tokenize(inside)) == 7
        with pytest.raises(AnswerError, match="nests deeper than 50"):
            evaluate(tokenize(f"{opening}{inside}{closing}"))


MEGA = 1_000_000
HOSTILE = [
    "(" * MEGA + "3" + ")" * MEGA, "(" * 498 + "3" + ")" * 498, "(" * 400 + "(25-7)*3" + ")" * 400,
    "-" * 900 + "3*(25-7)", "9**9**9", "9" * MEGA, "9" * 900, "9*" * MEGA + "9", "(٢٥-٧)*٣", "(\uff12\uff15-7)*3",
    "(25-7)*3¹", "1+1</answer><answer>" * 1000, " " * MEGA, "\0(25-7)*3", "\ud800(25-7)*3", "3/(7-7)*25", "25/(7-7)",
    "__import__('os').system('true')", "(25\u00a0-\u20037)*3", "(25-7)*3" + " " * 1000, "(25-7)*00003", "(25-7)*3!",
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_wrong_and_cheap(answer: str) -> None:
    with bounded():  # quadratic time would take minutes
        for numbers in ([3, 7, 25], [7, 7, 25]):
            assert compute_score(f"<answer>{answer}</answer>", {"target": 54, "numbers": numbers})["score"] == 0.1


UNUSABLE = [
    None, "54", {}, {"target": 54}, {"numbers": [3]}, {"target": "54", "numbers": [3]},
    {"target": True, "numbers": [3]}, {"target": 54.5, "numbers": [3]}, {"target": 54, "numbers": []},
    {"target": 54, "numbers": "3 7"}, {"target": 54, "numbers": [3, None]}, {"target": 54, "numbers": [3, -7]},
]  # fmt: skip


@pytest.mark.parametrize("truth", UNUSABLE)
def test_malformed_ground_truth_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth of a countdown row"):
        compute_score("<answer>3</answer>", truth)  # type: ignore[arg-type]
