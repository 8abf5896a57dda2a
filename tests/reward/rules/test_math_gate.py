"""What may be parsed: the forms that answers have, and nothing that explodes."""

import pytest

from pipeline.reward.rules.math_gate import MAX_DEPTH, MAX_DIGITS, MAX_LENGTH, MAX_SYMBOLIC_POWER, admitted


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{-1+\sqrt{5}}{2}",
        r"\sqrt{\frac{1+\sqrt{5}}{2}}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        "2^{100}",
        "x^{10}+y^2",
        "8!",
        r"\binom{10}{3}",
        r"\sin x+\cos x",
        "x^2+y^2+z^2=1",
        "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH,
        "9" * MAX_DIGITS,
        f"x^{{{MAX_SYMBOLIC_POWER}}}",
    ],
)
def test_admitted(text: str) -> None:
    assert admitted(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
        "9" * (MAX_DIGITS + 1),
        f"x^{{{MAX_SYMBOLIC_POWER + 1}}}",
        "1+" * (MAX_LENGTH // 2) + "1",
        "9^{9^9}",
        "9^9^9",
        "9^{1001}",
        "(9^{99})^{99}",
        r"9^{99\cdot99}",
        "9^(9999)",
        "a_a^a",
        "9!!",
        "(9+9)!",
        "9999!",
        "(9)_{3}",
        r"\binom{9999}{3}",
        r"\sum i",
        r"\begin{tikzpicture}\end{tikzpicture}",
        "5\u0661",
        "5\0",
        "x" * 21,
        "|" * 5,
        r"\sin\sin\sin x",
    ],
)
def test_refused(text: str) -> None:
    assert not admitted(text)
