"""What assertions do with values that mean harm: an error or an answer, soon."""

import ast
import gc
import json
import time

import pytest

from pipeline.reward.sandbox import grammar, operations
from pipeline.reward.sandbox.answers import Answers
from pipeline.reward.sandbox.outcome import ProgramRun
from pipeline.reward.sandbox.truth import MAX_CALCULATED

MOST = MAX_CALCULATED // 9  # of an answer: three of them are a third of what is read for a row
P = 2**61 - 1  # numbers that differ by it have one hash
ALIKE = ", ".join(f'["i", "{n * P:#x}"]' for n in range(1, MOST // 30))
TUPLES = ", ".join(f'["t", ["i", "{n * P:#x}"], 1]' for n in range(1, MOST // 40))
HOSTILE = {
    "a set of one hash": f'["s", {ALIKE}]',
    "tuples of one hash": f'["f", {TUPLES}]',
    "a dict of one hash": '["d", ' + ", ".join(f'[["i", "{n * P:#x}"], 1]' for n in range(1, MOST // 40)) + "]",
    "a list of one hash": f'["l", {ALIKE}]',
    "a list of tuples of one hash": f'["l", {TUPLES}]',
    "digits": f'["i", "0x{"f" * (MOST // 2)}"]',
    "digits that JSON reads": "1" * (MOST // 2),
    "a list of digits": '["l", ' + ", ".join([f'["i", "0x{"f" * (MOST // 100)}"]'] * 90) + "]",
    "one of many digits and many of few": f'["l", ["i", "0x{"f" * (MOST // 2)}"]' + ", 1" * (MOST // 8) + "]",
    "text": '"' + "a" * (MOST - 100) + '"',
    "a text that is a number": '"' + "1" * (MOST - 100) + '"',
    "a text that is a format": '"%999999999d"',
    "bytes": f'["b", "{"00" * (MOST // 3)}"]',
    "many lists": '["l"' + ', ["l"]' * (MOST // 8) + "]",
    "a long list and many short ones": '["l", ["l"' + ", 1" * (MOST // 6) + "]" + ', ["l"]' * (MOST // 16) + "]",
    "long texts that begin alike": '["l"' + f', "{"a" * 1000}"' * (MOST // 1100) + "]",
    "numbers": '["l"' + ", 1" * (MOST // 4) + "]",
    "floats that are none": '["l"' + ', ["n", "nan"]' * (MOST // 16) + "]",
    "deep": '["l", ' * 5000 + "1" + "]" * 5000,
    "very deep": "[" * (MOST // 2),
    "a large whole number": "10000000000000",
    "a negative one": "-10000000000000",
    "infinite": '["n", "inf"]',
    "complex": '["c", ["n", "nan"], ["n", "inf"]]',
    "pairs": '["l"' + ', ["t", 1, 2]' * (MOST // 20) + "]",
}
QUICK = {"numbers", "a set of one hash", "digits", "many lists", "deep", "pairs"}
"""Hostile values that `make test` tries, one of each kind."""
SOURCES = [
    "assert f(1) == 41",
    "assert f(1) == f(2)",
    "assert set(f(1)) == set(f(2))",
    "assert sorted(f(1)) == sorted(f(2), reverse=True)",
    "assert sum(f(1)) == 41",
    "assert max(f(1)) == min(f(2))",
    "assert f(1) in f(2)",
    "assert f(1) in [f(2)] and f(1) in (f(2), 3)",
    "assert f(1) * f(2) == 41",
    "assert [0] * f(1) == 'a' * f(2)",
    "assert f(1) ** f(2) == 41",
    "assert f(1) ** 41 // 3 % f(2) == 41",
    "assert 2 ** f(1) == 41 or 2.5 ** f(2) == 41",
    "assert f(1) % f(2) == 41 or f(1) % 3 == 1",
    "assert f(1) + f(2) == 41 - f(1)",
    "assert round(f(1), f(2)) == 41",
    "assert round(f(1), -5) == 41",
    "assert abs(f(1) - 3.5) < 1e-6",
    "assert isclose(f(1), f(2))",
    "assert str(f(1)) == '41'",
    "assert int(f(1)) == 41",
    "assert float(f(1)) == 41",
    "assert dict(f(1)) == {41: 41} or list(f(2)) == tuple(f(1))",
    "assert f(1)[f(2)] == 41",
    "assert f(1)[::2] < f(2)[:41]",
    "assert f(1) - f(2) == {41}",
    "assert f(1) <= f(2) and not f(1)",
]


def judged(source: str, value: str) -> float:
    """Seconds of CPU time that an assertion takes whose calls all gave `value`."""
    line = f'{{"value": {value}}}\n'.encode()
    assertions = grammar.read(source)
    answers = Answers(ProgramRun("exit", result=line * len(assertions.calls)), 3 * len(line))
    start = time.process_time()
    assertions.failure(answers)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in HOSTILE]
)
def test_no_value_holds_the_judge_up(name: str) -> None:
    # What this process has loaded must not be searched for garbage again and again.
    gc.collect()
    gc.freeze()
    try:
        honest = min(judged("assert f(1) == f(2)", HOSTILE["numbers"]) for _ in range(3))
        for source in SOURCES:
            # A busy machine disturbs one try.
            assert any(judged(source, HOSTILE[name]) < 10 * honest for _ in range(3)), source
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("(10 ** 10) ** 10000", None),
        ("'ab' * 10 ** 7", None),
        ("[['a' * 100]] * 2", None),
        ("sum([[1], [2]], [])", None),
        ("'%d' % 1", None),
        ("{1} + {2}", None),
        ("(1,) + [1]", None),
        ("2 ** -2", 0.25),
        ("2 ** 0.5 * 2 ** 0.5 // 1", 2.0),
        ("True + True", 2),
        ("-7 // 2 % 3", 2),
        ("b'a' * 2 + b'b'", b"aab"),
        ("[1] * -1", []),
    ],
)
def test_arithmetic_is_that_of_numbers(source: str, value: object) -> None:
    node = ast.parse(source, mode="eval").body
    read = grammar._Reader(ast.Module([]))
    try:
        found = read.value(node).of(grammar._NO_ANSWERS)
    except grammar.Refused:
        found = None
    assert found == value and type(found) is type(value)


def test_keywords_of_functions_are_those_that_python_takes() -> None:
    for name, (function, keywords) in operations.FUNCTIONS.items():
        for keyword in keywords:
            given = {"sorted": ([1],), "min": ([],), "max": ([],), "sum": ([1],), "isclose": (1, 1)}.get(name, (1.5,))
            function(*given, **{keyword: 1})


def test_answers_are_read_up_to_their_limit() -> None:
    line = json.dumps({"value": "a" * 1000}).encode() + b"\n"
    answers = Answers(ProgramRun("exit", result=3 * line), 2 * len(line))
    assert answers[0] == answers[1] == "a" * 1000
    with pytest.raises(Exception, match="longer than any right one"):
        answers[2]
