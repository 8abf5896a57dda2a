"""What may be parsed: the forms that answers have, and nothing that explodes."""

import pytest

from pipeline.reward.rules.math_gate import MAX_DEPTH, MAX_DIGITS, MAX_LENGTH, MAX_SMALL_POWER, admitted


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{-1+\sqrt{5}}{2}", r"\sqrt{\frac{1+\sqrt{5}}{2}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "2^{100}",
        "x^{10}+y^2", "8!", r"\binom{10}{3}", r"\sin x+\cos x", r"\lfloor\frac{n}{2}\rfloor",
        r"\binom{n+1}{2}-\binom{8}{4}", r"e^{2\pi i/3}", r"\frac{1}{2}\begin{pmatrix}1\\3\end{pmatrix}",
        "x^2+y^2+z^2=1", "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, "9" * MAX_DIGITS, f"x^{{{MAX_SMALL_POWER}}}",
    ],
)  # fmt: skip
def test_admitted(text: str) -> None:
    assert admitted(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "9" * (MAX_DIGITS + 1), f"x^{{{MAX_SMALL_POWER + 1}}}",
        "1+" * (MAX_LENGTH // 2) + "1", "9^{9^9}", "9^9^9", "9^{1001}", "(9^{99})^{99}", r"9^{99\cdot99}", "9^(9999)",
        "a_a^a", "9!!", "(9+9)!", "9999!", "(9)_{3}", r"\binom{9999}{3}", r"\binom{\pi}{9}", r"\binom{e}{99}",
        r"\exp(9999)", r"\exp(\exp(9))", r"e^{\exp(9)}", r"\lfloor\exp(9)\rfloor", r"\lceil\infty\rceil",
        r"\lfloor 9^{99}\rfloor", r"\sqrt[0.1]{2}", r"9^{1/0.01}", "a^{bcde}", r"\begin{pmatrix}1\end{pmatrix}^{-1}",
        r"\exp\begin{pmatrix}1\end{pmatrix}", r"\sum i", r"\begin{tikzpicture}\end{tikzpicture}", "5\u0661", "5\0",
        "x" * 21, "|" * 5, r"\sin\sin\sin x",
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    assert not admitted(text)
