r"""Which mathematical answers are equal, in a table and for random numbers."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import Float, Symbol

from pipeline.reward.rules import math_equal
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
    ("50", "50 percent"), ("60", r"60^\circ"), (r"60^{\circ}", "60"), ("60", "60\u00b0"), ("10080", r"10,\!080"),
    (r"10,\!080", "10080"), (r"1,\!234,\!567", "1234567"), (r"(1,\!234,5)", "(1234,5)"), ("5", "5 dollars"),
    ("5", "5 points"), ("5", "5 weeks."), ("5 euros", "5"), ("2.5", "2 1/2 cups of tea"),
    (r"\frac{1}{2}", r"\frac12 books"), ("x=5", "x=5 apples"), ("5", "5 degrees"), ("2012_7", "2012_{7}"),
    ("2012_7", "2012"), ("1A_{16}", "1a_{16}"),
    # fractions and mixed numbers
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{1}{2}"), (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"-\frac{3}{4}", r"\frac{3}{-4}"), (r"\frac{1}{2}", "\u00bd"),
    (r"2\frac{3}{4}", "2 3/4"), (r"2\frac{3}{4}", "11/4"), (r"-2\frac{3}{4}", "-2.75"), (r"1\frac12", "1.5"),
    (r"\frac{1}{3}", "0.333333"), ("0.333333", r"\frac13"), (r"\frac{1{,}000}{3}", r"\frac{1000}{3}"),
    # roots, powers, constants
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"), (r"\sqrt{2}", "1.414214"),
    (r"\pi", "3.141593"), (r"\frac{\pi}{2}", r"\pi/2"), (r"2\pi r", r"2r\pi"), ("1024", "2^{10}"),
    ("2^{1005}", "2^{1005}"), ("3628800", "10!"), ("10", r"\binom{5}{2}"), ("3", r"\log_2 8"), ("-1", r"\cos(\pi)"),
    ("5", "2+3"), ("5", "2+3=5"),
    # expressions and equations
    ("x+1", "1+x"), ("(x+1)^2", "x^2+2x+1"), ("3(x-1)", "3x-3"), (r"\frac{x}{2}", "0.5x"), ("x^2", "x^{2}"),
    ("2x", r"2\cdot x"), ("x=5", "5"), ("5", "x = 5"), ("y=2x+3", "y-3=2x"), ("y=2x+3", "2y=4x+6"),
    ("y=2x+3", "2x+3"), ("f(x)=2x", "f(x) = 2x"), ("2x", "f(x)=2x"), ("3+4i", "4i+3"), ("x<y", "y>x"),
    (r"x\le 3", r"3 \ge x"),
    # several
    ("1,2", "2, 1"), ("1,2,3", "3, 2 and 1"), ("1,2", r"1\text{ or }2"), (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "2,1"), ("(1,2)", "(1, 2)"), ("(1,234)", "(1, 234)"), (r"\left(\frac12,3\right)", "(0.5,3)"),
    ("x=5,y=3", "y=3, x=5"), ("5,3", "x=5, y=3"), (r"1\pm\sqrt{2}", r"1+\sqrt{2},1-\sqrt{2}"), ("[1,2)", r"[1, 2)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 2)"), (r"x\in[1,2]", "[1,2]"),
    (r"x\le 3", r"(-\infty,3]"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2.0 \end{pmatrix}"),
    # words
    (r"\text{Evelyn}", "Evelyn"), (r"\text{even}", "Even"), ("even", r"\text{even}"), (r"\text{(B)}", "B"),
    ("B", "(B)"), ("true", "True"), ("True", "TRUE"), ("Evelyn", "evelyn"), (r"\text{No}", "no"),
    (r"\text{no solution}", r"\text{No solution.}"), ("\u53f3", "\u53f3"),
    # decimals and points
    ("0.3", "0.1+0.2"), ("1.5x+2.25", r"\frac{3x}{2}+\frac94"), ("x^{0.5}", r"\sqrt{x}"), ("-\\sqrt2", "-1.414214"),
    (r"(\sqrt2,1)", "(1.414214,1)"), (r"\frac{1+\sqrt5}{2}", "1.618034"), ("x=\\sqrt2", "1.414214"),
    ("5", r"5+\sin(0)"), ("0", r"\sqrt2\cdot\sqrt3-\sqrt6"), (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"y=\sqrt{x}", r"\sqrt{x}=y"), (r"y=\log x", r"2\log x=2y"), ("a^2-b^2", "(a-b)(a+b)"), ("|x-2|", "|2-x|"),
    (r"\lfloor x\rfloor+1", r"1+\lfloor x\rfloor"),
    # derivatives
    ("f'(x)=2x", "2x"), ("2x", "f'(x)=2x"), ("f'(x)=2x", r"f'(x) = 2\cdot x"), ("f'(2)=3", "3"), ("y'=2x", "y' = 2x"),
    ("f'(x)=2x", r"f^{\prime}(x)=2x"), ("f'(x)=2x", "f\u2019(x)=2x"), (r"y^\prime=2x", "y'=2x"),
    # units in text
    (r"5\text{ million}", "5 million"), (r"5\text{ m/s}", "5"), ("12", r"12\text{ cm}^3"), ("3", r"3\text{ p.m.}"),
    ("12", r"12\text{ square feet}"), (r"12\text{ ft}^2", r"12\mbox{ square feet}"),
    # text around the whole answer
    ("5", r"\text{5}"), ("5", r"\mathbf{5}"), ("5", r"\text{5 cm}"), (r"\text{June 20}", "June 20"),
    (r"\text{A, C, D}", "A, C, and D"), ("1,234", r"\text{1,234}"),
    # other ways to write what models write
    ("3+4i", "3+4 i"), ("3+4i", r"3+4\cdot i"), (r"\pm 6", r"x=\pm 6"), (r"\emptyset", r"\varnothing"),
    (r"\dbinom{4}{2}", "6"), ("2Rr", "2rR"), (r"\pi(R^2-r^2)", r"\pi R^2-\pi r^2"), ("Pt", "tP"),
]  # fmt: skip

DIFFERENT = [
    ("42", "-42"), ("42", "43"), ("42", "42.1"), ("42", "4,2"), ("42", "4 2"), ("42", ""), ("42", " "),
    ("42", "none"), ("42", "forty-two"), ("42", "$"), ("42", "."), ("42", "{}"), ("42", r"\text{}"), ("42", "42, 43"),
    ("42", "x"), ("42", "4\uff12"), ("7", "\uff17"), ("7", "\u0667"), ("42", "42\u200b1"), ("42", r"\frac{42}{0}"),
    ("42", "x=43"), ("9" * 60, "9" * 59 + "8"), ("1000", "1,00"), ("50", r"0.5\%"), ("0.5", r"50\%"), ("3", "3 pi"),
    ("11", "1 1"), ("x", r"\cot(5\cdot\pi)"), (r"\lfloor x\rfloor", r"\cot(\pi)"), ("x+1", r"\tan(\frac{\pi}{2})"),
    ("x", r"\infty"), ("3+4i", "3+4"), ("3+4i", "4+3i"), ("5", "5i"), ("234, 1", r"1,\!234"), ("1, 234", r"1,\!234"),
    ("5", "5 million"), ("5", "5 dozen eggs"), ("2", "2 thirds"), ("5", "5 squared"), ("5", "5 more than x"),
    ("5", "5 is wrong"), ("5", "6 dollars"), ("3", "3 sin x"), ("2012_7", "2012_5"), ("2012_7", "2013_7"),
    ("true", "false"), ("True", "Untrue"), ("T", "t+"), (r"\frac{\sqrt{3}}{2}", r"|\infty|\pm\arctan(5)"),
    (r"1\pm\sqrt{2}", r"\log_5(\infty^{2})"), ("(1,2)", r"\{1,2\}"), (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\frac{1}{3}", "0.33"), (r"\frac{1}{3}", "0.333334"), (r"2\frac{3}{4}", "23/4"), (r"-2\frac{3}{4}", "-1.25"),
    (r"\sqrt{2}", "1.414"), (r"\pi", "3.14"), (r"\pi", r"\frac{22}{7}"), ("x+1", "x-1"), ("(x+1)^2", "x^2+1"),
    ("x=5", "y=5"), ("x=5", "x=4"), ("y=2x+3", "y=2x"), ("3+4i", "3-4i"), ("x<3", "x>3"), ("1,2", "1,2,3"),
    ("1,2", "1,1"), ("1,1", "1,2"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "1.2"), ("(1,2)", "1,2"),
    ("x=5,y=3", "x=3,y=5"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)"), (r"x\le 3", r"(-\infty,3)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), (r"\text{even}", "odd"), ("B", "C"),
    ("B", "b+"), ("3", r"\text{three}"), ("0", r"\frac{0}{0}"), ("0.0000001", "0.0"),
    (r"\frac{1}{10000000}", "0.000000"), ("5", "5=5=6"), ("5", "2+2=5"), ("5", "x^2=5"), ("", "5"), ("", ""),
    # what stands behind a number
    ("42", "42 thousand"), ("42", r"42\text{ thousand}"), ("42", r"42\text{ million}"), ("42", r"42\text{k}"),
    ("42", "42k"), ("42", r"42\mathrm{k}"), ("42", r"42\text{ dozen}"), ("42", r"42\text{!}"),
    ("42", r"42 \text{ is wrong}"), ("42", "42!"), ("42", "42 three"), ("42", "42 forty"), ("42", "42 point two"),
    ("5", "5 point three"), ("42", "42 vs 43"), ("42", r"42\text{ or }43"), ("42", r"\text{42}\text{43}"),
    ("42", "42\u00b2"), ("42", "42\u00bd"), ("42", "4 2"), ("42", "42 43"), ("42", "42e3"), ("42", "1_042"),
    ("1000", "1_000"), ("42", "0x2a"), ("42", "42..0"), ("42", "42 hundred"), ("42", "42i"), ("42", "42'"),
    ("42", "42;43"), ("42", "42:43"), ("42", r"42\approx 43"), ("42", r"42\quad 43"), ("42", "42 and a half"),
    # thousands
    ("5", "0,005"), ("5", r"0,\!005"), ("5", "0{,}005"), ("5", "00,005"), ("0.005", "0,005"), ("1000", "01,000"),
    ("1000", "1'000"), ("1000000", "1 000,000"), ("1000000", "1,000 000"), ("1000", "1.000"), ("1000", "1,0000"),
    ("1000", "10,00"),
    # words
    ("A", r"\text{A}\text{B}"), ("A", r"\text{A} \text{B}"), ("A", r"\text{A or B}"), ("A", "A or B"), ("A", "AB"),
    ("A", "A'"),
    # derivatives
    ("f(x)", "f'(x)"), ("f(x)", "f(x)'"), ("x", "x'"), ("x^2+1", "x'^2+1"), ("f(x)=2x", "f'(x)=2x"),
    ("f'(x)=2x", "f''(x)=2x"), ("f'(x)=2x", "3x"), ("f(x)", r"f^{\prime}(x)"), ("x", "x\u2032"), ("f'(2)=3", "f'(3)=3"),
    # near, but not equal
    ("5", "4.9999996+0"), ("5", "4.9999999999+0"), ("5", f"4.{'9' * 26}+0"), ("5", "5+10^{-30}"),
    ("5", "5+10^{-900}"), ("5", r"5\cdot 1.0000000001"), ("5", r"\sqrt{25.0000000000000000001}"),
    ("5", r"\sqrt{25}+10^{-40}"), ("5", "5.0000001"), (r"\frac13", "0.333333+0"), (r"\frac13", r"\frac13+0.0000001"),
    (r"\sqrt2", r"\sqrt{2.0000001}"), (r"\sqrt2", "1.414214+0"), (r"\pi", "3+0.141593"),
    ("x^2+1", "x^2+1.0000000000001"), ("x", "x+10^{-30}"), ("y=2x", "y=2x+10^{-40}"),
    # equal in some places
    ("x", "|x|"), ("x", "|x+1000|-1000"), ("x", r"x+\lfloor\frac{x}{1000}\rfloor"),
    ("x", r"x+\lfloor\frac{x^2}{1000}\rfloor"), ("x", r"\sqrt{(x+1000)^2}-1000"), ("y=x", "y=|x|"), ("xy", "|xy|"),
    ("x", r"x+\lfloor\sin x\rfloor"),
    # a capital is another letter
    ("p-q", "P-Q"), ("p-q", "p-Q"), ("R-r", "0"), ("R-r", "r-R"), (r"\pi(R^2-r^2)", "0"), ("2Rr", "2r^2"),
    ("x+X", "2x"), (r"\pm 6", r"x=\pm 5"), (r"\text{5 or 6}", "5"), ("3+4i", r"3+4\cdot x"),
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


POINTS_OF = """
import hashlib
from sympy import Symbol
from pipeline.reward.rules.math_equal import _Comparison
for seed in (b"a", b"b"):
    points = list(_Comparison(seed, 0)._points({Symbol("x"), Symbol("y")}))
    print([str(value) for point in points for value in point.values()])
"""


def test_points_are_those_of_the_texts_in_every_process() -> None:
    """No answer can be written for them beforehand, and every worker draws the same."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", POINTS_OF],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=60,
        ).stdout.split(b"\n")[:2]
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    assert len(set(runs[0][0].split(b", "))) == 2 * math_equal.TRIES


def test_an_answer_that_agrees_at_the_points_of_another_is_not_equal() -> None:
    """Also at all of them: those of the longer text are others."""
    seed = hashlib.sha256(b"x+1\n1+x").digest()
    points = [next(iter(point.values())) for point in math_equal._Comparison(seed, Fraction(0))._points({Symbol("x")})]
    factors = "".join(f"(x-({str(point)[:9]}))" for point in points[:3])
    assert equal("x+1", "1+x") and not equal("x+1", f"1+x+{factors}") and not equal("x+1", f"1+x+0.000001{factors}")


def test_too_few_points_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equal, "_evaluated", lambda expression, values: None)
    assert not equal("x+1", "1+x+x-x")
    seen: list[object] = []

    def one(expression: object, values: object) -> tuple[Float, Float]:
        seen.append(values)
        return Float(1), Float(1)

    monkeypatch.setattr(math_equal, "_evaluated", one)
    assert equal("x+1", "1+x+x-x") and len(seen) == 2 * math_equal.POINTS


def test_the_rules_load_without_algebra() -> None:
    code = (
        "import sys; from pipeline.reward.rules import rule_of; "
        "assert rule_of('lighteval/MATH')(r'\\boxed{1/2}', '0.5')['acc'] == 1; "
        "sys.exit('sympy' in sys.modules or 'math_verify' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
