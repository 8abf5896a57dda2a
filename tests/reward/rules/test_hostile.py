r"""Hostile responses: for every rule each is a wrong answer within two seconds, and none raises."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reward.rules import RULES, math_equal, rule_of
from pipeline.reward.rules.budget import budget_of

LIMIT = 2.0  # CPU seconds
MATHS = ["lighteval/MATH", "numina_olympiads", "math_dapo", "hiyouga/geometry3k"]
TRUTHS: dict[str, Any] = {
    "countdown": {"target": 9, "numbers": [4, 5]},
    "searchR1_*": {"target": ["ninety"]},
    "reverse_text": "txet",
    "blocks": "9",
}
WRONG = {"math_dapo": -1.0, "math": -1.0, "math_dapo_reasoning": -1.0, "aime*": -1.0}

KB100 = 100_000
PIECES = {
    "words": "Let us think about it. ", "blanks": " ", "lines": "\n", "digits": "7", "numbers": "7 ",
    "grouped numbers": "777,", "decimals": "7.", "dots": ".", "hashes": "#", "marks": "#### ",
    "marked numbers": "#### 7\n", "marked signs": "####-$.,", "open braces": "{", "braces": "{}", "brackets": "(",
    "backslashes": "\\", "open boxes": "\\boxed{", "boxes": "\\boxed{7}", "bare boxes": "\\boxed 7 ",
    "boxes without braces": "\\boxed ", "fractions": "\\frac{1}{2}", "open answers": "<answer>",
    "closed answers": "</answer>", "answers": "<answer>7</answer>", "thoughts": "<think></think>",
    "reversed texts": "<reversed_text>a</reversed_text>", "open texts": "<reversed_text>",
    "answer lines": "Answer: 7\n", "answer words": "answer is ", "answer colons": "answer:",
    "answers and blanks": "answer        ", "dollars": "$", "signs": "+-*/", "minuses": "-", "powers": "9^",
    "python": "().__class__", "format": "%s{0}", "nul": "\0", "arabic digits": "\u0667", "combining marks": "a\u0301",
    "surrogates": "\ud800", "right to left": "\u202e7",
}  # fmt: skip

ANSWERS = [
    # powers and exponents
    "9^{9^{9^{9}}}", "9^9^9^9^9", "((9^{999})^{999})^{999}", "9**9**9", "9^{999999999}", r"9^{999\cdot 999\cdot 999}",
    "(x+y+z+1)^{999}", "+".join(f"x^{{{i}}}" for i in range(60)), "a" + "^a" * 30, "a" + "_a" * 30, "a" + "_a^a" * 15,
    r"\cot\sqrt[0.0000001]{999999}", r"\cot(9^{1/0.00000001})", r"\sin(a^{bcdefghijklmnop})", r"\csc x^{x}",
    r"(10^{30})^{999}", r"2^{\log(\pi)^{99}}",
    # functions
    r"\exp(\exp(999999))", r"\exp(999999)", r"\exp\exp\exp 99", r"e^{\exp(99)}", r"\exp(99)^{\exp(99)}",
    r"\sin(\cos(\tan(\sqrt{2})))", r"\tan(10^{999})", r"\cos(\frac{\pi}{65537})", r"\log_{0.99999999}(10^{99})",
    # rounding
    r"\lfloor\exp(999999)\rfloor", r"\lfloor\exp(99)\rfloor", r"\lfloor\pi^{999}\rfloor", r"\lceil\infty\rceil",
    r"\lfloor\sqrt{2}\cdot\sqrt{3}-\sqrt{6}\rfloor", r"\lfloor\lfloor\lfloor x\rfloor\rfloor\rfloor",
    r"\lfloor\tan(\frac{\pi}{2})\rfloor",
    # factorials and binomials
    "999999999!", "9!!!!!!", "(9^9)!", "(99999999)_{3}", "999!^{999}", r"\binom{99999999}{9999999}",
    r"\binom{\pi}{999}", r"\binom{0.5}{999}", r"\binom{x}{999}", r"\binom{e}{999}", r"\binom{\binom{99}{9}}{99}",
    r"1000^{2}\pm\log(y)\div 170!",
    # infinities and poles
    r"\infty-\infty", r"\frac{\infty}{\infty}", r"\sin(\infty)", r"|\infty|\pm\arctan(5)", "0^{-1}", r"\frac{0}{0}",
    "+".join(rf"\frac{{1}}{{x-{i}}}" for i in range(18)),
    # matrices, sets, relations
    r"\begin{pmatrix}1&2\\2&4\end{pmatrix}^{-1}", r"\begin{pmatrix}x&y\\z&1\end{pmatrix}^{60}",
    r"\exp\begin{pmatrix}x&y\\z&1\end{pmatrix}", r"\begin{pmatrix}" + "&".join(["x"] * 60) + r"\end{pmatrix}",
    "1," * 400 + "1", "(1,(1,(1,(1,(1,(1,2))))))", "=".join("x" * 40), "x^7+3x=5", r"x^7-3x+1<0", r"\sin x<\cos x",
    r"\{\infty\}\cup\{1\}",
    # unknown commands
    r"\sum_{i=1}^{10^{9}} i", r"\int_0^1 x^{x^{x}} dx", r"\lim_{x\to 0}\frac{\sin x}{x}", r"\def\a{\a\a}\a",
    # nesting
    "(" * 40 + "5" + ")" * 40, r"\frac{1}{" * 30 + "5" + "}" * 30, r"\sqrt{" * 30 + "5" + "}" * 30,
    "|" * 20 + "5" + "|" * 20, r"\sqrt{2+" * 4 + "2" + "}" * 4, r"\text{" * 100,
    # text
    "abcdefghijklmnopqrstuvwxyz" * 8, "the answer is not known because it is hard to say", "0." + "9" * 1100,
    "9" * 1100, r"1\times10^{-99}", "__import__('os').system('true')", "{0.__class__}%s%n", "(a+)+$", "5\0" * 100,
    "\U0001d7d8\u0301" * 100, "\u202e5", "\ud800" * 10, "\\" * 900, "apple " * 200, "5 " * 200, r"10,\!" * 200,
]  # fmt: skip


def seconds_of(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and the CPU seconds its thread took; the clock would count what else the machine does."""
    start = time.thread_time()
    return call(), time.thread_time() - start


@pytest.fixture(scope="module", autouse=True)
def loaded_algebra() -> None:
    math_equal.load_algebra()


@pytest.mark.parametrize("source", RULES)
def test_a_response_of_100_kb(source: str) -> None:
    rule, truth = RULES[source], TRUTHS.get(source, 1)
    for name, piece in PIECES.items():
        response = (piece * (KB100 // len(piece) + 1))[:KB100]
        # A hostile text is slow each time; a slow moment of the machine or a collection of garbage is not.
        tries = [seconds_of(lambda response=response: rule(response, truth)) for _ in range(2)]  # type: ignore[misc]
        assert tries[0][0]["acc"] == 0 and min(seconds for _, seconds in tries) < LIMIT / 4, name


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_nasty_mathematical_answer(answer: str) -> None:
    for source in MATHS:
        for response in (rf"\boxed{{{answer}}}", f"The answer is {answer}", f"Answer: {answer}"):
            result, seconds = seconds_of(lambda s=source, r=response: rule_of(s)(r, "5"))  # type: ignore[misc]
            assert (result["score"], result["acc"]) == (WRONG.get(source, 0.0), 0), (source, response)
            assert seconds < LIMIT, (source, response)


@pytest.mark.parametrize("truth", [r"\frac{\sqrt{3}}{2}", "x^2+1", "(1,2)", "y=2x+3", r"x\le 3", r"\{1,2\}"])
def test_nasty_answers_for_other_truths(truth: str) -> None:
    rule = rule_of("lighteval/MATH")
    for answer in ANSWERS:
        result, seconds = seconds_of(lambda answer=answer: rule(rf"\boxed{{{answer}}}", truth))  # type: ignore[misc]
        assert result["acc"] == 0 and seconds < LIMIT, answer


@pytest.mark.parametrize("source", RULES)
@settings(max_examples=25)
@given(st.text(max_size=40) | st.text("\\boxed{}12 $#.,+-*/^_()[]<>=!|xy\n", max_size=40))
def test_no_response_raises(source: str, text: str) -> None:
    rule, truth = RULES[source], TRUTHS.get(source, 1)
    for response in (text, f"\\boxed{{{text}}}", f"Answer: {text}", f"<answer>{text}</answer>"):
        assert rule(response, truth)["score"] in (-1.0, 0.0, 0.1, 0.9, 1.0)


@pytest.mark.parametrize("source", MATHS)
def test_an_answer_on_which_algebra_fails_or_is_ended_is_wrong(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        raise ZeroDivisionError(text)

    monkeypatch.setattr(math_equal, "_parse", fail)
    budget = budget_of(rule_of(source))
    assert budget is not None and budget.cpu_s <= LIMIT
    failed = rule_of(source)(r"\boxed{x+1}", "x+2")
    assert budget.wrong.keys() == failed.keys()
    for result in (failed, budget.wrong):
        assert (result["score"], result["acc"], result["undecided"]) == (WRONG.get(source, 0.0), 0, 1)
