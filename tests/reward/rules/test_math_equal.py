r"""Which mathematical answers are equal, in a table and for random numbers."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rules.math_equal import equal

EQUAL = [
    # numbers
    ("42", "42"), ("42", " 42. "), ("42", "042"), ("42", "42.0"), ("-5", "\u22125"), ("-5", "- 5"), ("5", "+5"),
    ("1000", "1,000"), ("1000", "1{,}000"), ("1000", r"1\,000"), ("1000", "1 000"), ("1234567", "1,234,567"),
    ("1234.5", "1,234.50"), ("0", "-0"), (".5", "0.5"), ("0.5", ".50"), ("1500", r"1.5 \times 10^{3}"),
    ("1500", r"1.5\cdot10^3"), ("9" * 60, "9" * 60), ("9" * 60, "9" * 60 + ".0"), ("4", "(4)"), ("4", "{4}"),
    # currency, units, percent
    ("5", r"\$5"), ("5", "$5.00"), ("5", "\u20ac5"), ("5", "5 cm"), ("5", r"5\text{ cm}"), ("5", r"5 \mbox{ cm}^2"),
    (r"5\text{ hours}", "5"), ("5", r"5\ \mathrm{kg}"), ("12", "12 square feet"), ("50", r"50\%"), (r"50\%", "50"),
    ("50", "50 percent"), ("60", r"60^\circ"), (r"60^{\circ}", "60"), ("60", "60\u00b0"),
    ("10080", r"10,\!080"), (r"10,\!080", "10080"), (r"1,\!234,\!567", "1234567"), (r"(1,\!234,5)", "(1234,5)"),
    ("5", "5 dollars"), ("5", "5 points"), ("5", "5 weeks."), ("5 euros", "5"), ("2.5", "2 1/2 cups of tea"),
    (r"\frac{1}{2}", r"\frac12 books"), ("x=5", "x=5 apples"), ("5", "5 degrees"),
    ("2012_7", "2012_{7}"), ("2012_7", "2012"), ("1A_{16}", "1a_{16}"),
    # fractions and mixed numbers
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{1}{2}"), (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"-\frac{3}{4}", r"\frac{3}{-4}"), (r"\frac{1}{2}", "\u00bd"),
    (r"2\frac{3}{4}", "2 3/4"), (r"2\frac{3}{4}", "11/4"), (r"-2\frac{3}{4}", "-2.75"), (r"1\frac12", "1.5"),
    (r"\frac{1}{3}", "0.333333"), ("0.333333", r"\frac13"), (r"\frac{1{,}000}{3}", r"\frac{1000}{3}"),
    # roots, powers, constants
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"), (r"\sqrt{2}", "1.414214"),
    (r"\pi", "3.141593"), (r"\frac{\pi}{2}", r"\pi/2"), (r"2\pi r", r"2r\pi"), ("1024", "2^{10}"),
    ("2^{1005}", "2^{1005}"),
    ("3628800", "10!"), ("10", r"\binom{5}{2}"), ("3", r"\log_2 8"), ("-1", r"\cos(\pi)"), ("5", "2+3"), ("5", "2+3=5"),
    # expressions and equations
    ("x+1", "1+x"), ("(x+1)^2", "x^2+2x+1"), ("3(x-1)", "3x-3"), (r"\frac{x}{2}", "0.5x"), ("x^2", "x^{2}"),
    ("2x", r"2\cdot x"), ("x=5", "5"), ("5", "x = 5"), ("y=2x+3", "y-3=2x"), ("y=2x+3", "2y=4x+6"),
    ("y=2x+3", "2x+3"),
    ("f(x)=2x", "f(x) = 2x"), ("2x", "f(x)=2x"), ("3+4i", "4i+3"), ("x<y", "y>x"), (r"x\le 3", r"3 \ge x"),
    # several
    ("1,2", "2, 1"), ("1,2,3", "3, 2 and 1"), ("1,2", r"1\text{ or }2"), (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "2,1"),
    ("(1,2)", "(1, 2)"), ("(1,234)", "(1, 234)"), (r"\left(\frac12,3\right)", "(0.5,3)"), ("x=5,y=3", "y=3, x=5"),
    ("5,3", "x=5, y=3"), (r"1\pm\sqrt{2}", r"1+\sqrt{2},1-\sqrt{2}"), ("[1,2)", r"[1, 2)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 2)"), (r"x\in[1,2]", "[1,2]"),
    (r"x\le 3", r"(-\infty,3]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2.0 \end{pmatrix}"),
    # words
    (r"\text{Evelyn}", "Evelyn"), (r"\text{even}", "Even"), ("even", r"\text{even}"), (r"\text{(B)}", "B"),
    ("B", "(B)"), ("true", "True"), ("True", "TRUE"), ("Evelyn", "evelyn"), (r"\text{No}", "no"),
    (r"\text{no solution}", r"\text{No solution.}"), ("\u53f3", "\u53f3"),
]  # fmt: skip

DIFFERENT = [
    ("42", "-42"), ("42", "43"), ("42", "42.1"), ("42", "4,2"), ("42", "4 2"), ("42", ""), ("42", " "),
    ("42", "none"),
    ("42", "forty-two"), ("42", "$"), ("42", "."), ("42", "{}"), ("42", r"\text{}"), ("42", "42, 43"), ("42", "x"),
    ("42", "4\uff12"), ("7", "\uff17"), ("7", "\u0667"), ("42", "42\u200b1"), ("42", r"\frac{42}{0}"), ("42", "x=43"),
    ("9" * 60, "9" * 59 + "8"), ("1000", "1,00"), ("50", r"0.5\%"), ("0.5", r"50\%"), ("3", "3 pi"), ("11", "1 1"),
    ("x", r"\cot(5\cdot\pi)"), (r"\lfloor x\rfloor", r"\cot(\pi)"), ("x+1", r"\tan(\frac{\pi}{2})"), ("x", r"\infty"),
    ("3+4i", "3+4"), ("3+4i", "4+3i"), ("5", "5i"),
    ("234, 1", r"1,\!234"), ("1, 234", r"1,\!234"), ("5", "5 million"), ("5", "5 dozen eggs"), ("2", "2 thirds"),
    ("5", "5 squared"), ("5", "5 more than x"), ("5", "5 is wrong"), ("5", "6 dollars"), ("3", "3 sin x"),
    ("2012_7", "2012_5"), ("2012_7", "2013_7"), ("true", "false"), ("True", "Untrue"), ("T", "t+"),
    (r"\frac{\sqrt{3}}{2}", r"|\infty|\pm\arctan(5)"), (r"1\pm\sqrt{2}", r"\log_5(\infty^{2})"), ("(1,2)", r"\{1,2\}"),
    (r"\frac{1}{2}", r"\frac{2}{1}"), (r"\frac{1}{3}", "0.33"), (r"\frac{1}{3}", "0.333334"),
    (r"2\frac{3}{4}", "23/4"),
    (r"-2\frac{3}{4}", "-1.25"), (r"\sqrt{2}", "1.414"), (r"\pi", "3.14"), (r"\pi", r"\frac{22}{7}"), ("x+1", "x-1"),
    ("(x+1)^2", "x^2+1"), ("x=5", "y=5"), ("x=5", "x=4"), ("y=2x+3", "y=2x"), ("3+4i", "3-4i"), ("x<3", "x>3"),
    ("1,2", "1,2,3"), ("1,2", "1,1"), ("1,1", "1,2"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "1.2"),
    ("(1,2)", "1,2"),
    ("x=5,y=3", "x=3,y=5"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)"), (r"x\le 3", r"(-\infty,3)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\text{even}", "odd"), ("B", "C"), ("B", "b+"), ("3", r"\text{three}"), ("0", r"\frac{0}{0}"),
    ("0.0000001", "0.0"),
    (r"\frac{1}{10000000}", "0.000000"), ("5", "5=5=6"), ("5", "2+2=5"), ("5", "x^2=5"), ("", "5"), ("", ""),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_equal(truth: str, answer: str) -> None:
    assert equal(truth, answer)


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_different(truth: str, answer: str) -> None:
    assert not equal(truth, answer)


def test_a_truth_that_is_not_parsed_is_equal_to_itself_alone() -> None:
    for truth in ("2^{100000}", r"\sum_{i=1}^n i", "9" * 1500):
        assert equal(truth, f" {truth} ") and not equal(truth, f"{truth}1")


@given(st.integers(-(10**12), 10**12), st.integers(-3, 3), st.sampled_from(["{}", "{:,}", "${}$", "{}.00", r"\${}"]))
def test_integers_are_equal_exactly_if_they_are(truth: int, error: int, shape: str) -> None:
    assert equal(str(truth), shape.format(truth + error)) == (error == 0)


@given(st.integers(-99, 99), st.integers(1, 99), st.integers(1, 9), st.integers(-1, 1))
def test_fractions_are_equal_exactly_if_they_are(above: int, below: int, factor: int, error: int) -> None:
    answer = rf"\frac{{{(above + error) * factor}}}{{{below * factor}}}"
    assert equal(f"{above}/{below}", answer) == (error == 0)


def test_the_rules_load_without_algebra() -> None:
    code = (
        "import sys; from pipeline.reward.rules import rule_of; "
        "assert rule_of('lighteval/MATH')(r'\\boxed{1/2}', '0.5')['acc'] == 1; "
        "sys.exit('sympy' in sys.modules or 'math_verify' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
