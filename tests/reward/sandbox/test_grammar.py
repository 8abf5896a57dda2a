"""Assertions: which can be judged, the calls they need, and what comes of the answers. Nothing is isolated here."""

import json
import types
from typing import Any

import pytest

from pipeline.reward.sandbox import grammar
from pipeline.reward.sandbox.answers import Answers
from pipeline.reward.sandbox.forms import Refused
from pipeline.reward.sandbox.inside import driver, values
from pipeline.reward.sandbox.outcome import ProgramRun
from tests.bounds import bounded

PROGRAM = """
import collections, enum, math
Point = collections.namedtuple("Point", "x y")
class Colour(enum.IntEnum):
    RED = 1
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
    def total(self): return self.a + self.b
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return len(self.items)
class Solution:
    def __init__(self): self.made = 0
    def twoSum(self, nums, target): return [nums.index(2), target]
    def reverse(self, x): return int(str(x)[::-1])
    def counted(self): self.made += 1; return self.made
def add(a, b=1): return a + b
def same(x): return x
def nothing(): return None
def count(text): return collections.Counter(text)
def point(): return Point(1, 2)
def red(): return Colour.RED
def numbers(n): yield from range(n)
def longest(pairs, n): return max(pair.b for pair in pairs)
def fail(): raise ValueError("too small")
def sum(a, b): return a - b
def root(x): return math.sqrt(x)
def leave(): raise SystemExit
"""


def answered(calls: tuple[str, ...], program: str = PROGRAM) -> bytes:
    """What a program answers to the calls."""
    module = types.ModuleType("solution")
    exec(program, module.__dict__)
    results: dict[int, Any] = {}
    lines = []
    for number, call in enumerate(calls):
        target, given, named = json.loads(call)
        try:
            arguments = values.unpack(given, results), values.unpack(named, results)
            results[number] = driver._function(module, results, target)(*arguments[0], **arguments[1])
            reply = driver._packed(results[number])
        except BaseException as error:  # noqa: BLE001
            reply = {"error": driver._described(error)}
        lines.append(json.dumps(reply).encode() + b"\n")
    return b"".join(lines)


def failure(source: str, program: str = PROGRAM) -> str:
    assertions = grammar.read(source)
    return assertions.failure(Answers(ProgramRun("exit", result=answered(assertions.calls, program)), 16 << 20))


HOLDS = [
    # MBPP
    "assert add(1, 2) == 3",
    "assert add(2)==3",
    "assert (add(1, 1)) == 2 ",
    "assert same([(6, 9), (15, 34)]) == [(6, 9), (15, 34)]",
    'assert same("011001") == ("011001")',
    "assert same({'a': [1, 2], 'b': {}}) == {'b': {}, 'a': [1, 2]}",
    "assert same(((1, 2), (3,))) == ((1, 2), (3,))",
    "assert same(-3) == -3 and same(2j) == 2j and same(b'x') == b'x'",
    "assert set(same([1, 2, 2])) == set([2, 1])",
    "assert sorted(same([3, 1])) == [1, 3]",
    "assert root(4.0) == 2.0\nassert same(1) == True",
    "assert same(True)",
    "assert not same('')",
    "assert nothing() == None",
    "assert longest([Pair(5, 24), Pair(15, 25),Pair(27, 40)], 4) == 40",
    "assert sum(10,15) == -5",
    "import math\nassert math.isclose(root(2.0), 1.414214, rel_tol=1e-5)",
    "from math import isclose, pi\nassert isclose(same(3.14159265), pi, abs_tol=1e-6)",
    "import re\nfrom typing import List\nassert add(1) == 2",
    # HumanEval
    "assert abs(root(2.0) - 2.0/1.4142) < 1e-3",
    "METADATA = {'author': 'jt'}\ndef check(candidate):\n  assert candidate(1, 2) == 3, 'first'\n"
    "  assert True, 'This prints'\n\ncheck(add)",
    "def check(candidate):\n  'doc'\n  import math\n  assert tuple(candidate([1])) == tuple(same([1]))\ncheck(same)",
    "assert same([]) == [] and same('a') != 'b', 'Error: ' + str(same('a'))",
    "assert nothing() is None and same(True) is True and same(1) is not None",
    "from solution import add, same\nassert add(1) == same(2)",
    # LeetCode
    "assert Solution().twoSum([1, 2], 9) == [1, 9]",
    "assert Solution().twoSum(nums = [2], target=3) == [0, 3]\nassert Solution().reverse(12) == 21",
    "def check(candidate):\n  assert candidate(nums=[2], target=3) == [0, 3]\ncheck(Solution().twoSum)",
    "def check(candidate):\n  assert candidate() == 1\n  assert candidate() == 2\ncheck(Solution().counted)",
    "assert twoSum([2], 3) == [0, 3]",
    "assert Stack([1]).push(2) == 2 and Pair(1, 2).total()",
    "assert Solution().reverse(12)",
    # and what goes with them
    "assert 1 < add(1) <= 2 < 3 != add(3)",
    "assert 41 in same([40, 41]) and 'b' in same('abc') and add(1) not in (3, 4)",
    "assert add(1) == 3 or add(1) == 2",
    "assert len(same('abc')) == 3 and max(same([1, 3])) == 3 and min(add(1), 5) == 2 and max([], default=add(1)) == 2",
    "assert round(root(2), 2) == 1.41 and abs(same(-1)) == 1",
    "assert sorted(same([1, 2]), reverse=True) == [2, 1] and list(same((1,))) == [1] and dict(count('aab'))['a'] == 2",
    "assert str(add(1)) == '2' and float(same('1.5')) == 1.5 and int(same('3')) == 3 and same(2.0) < float('inf')",
    "assert frozenset(same([1])) == {1} and bool(same([])) == False",
    "assert same([1, 2, 3])[-1] == 3 and same('abc')[1:] == 'bc' and same([1, 2, 3])[::2] == [1, 3]",
    "assert add(2) ** 2 // 2 % 3 == 1 and -add(1) == -2 and add(1) * 'ab' == 'abab' and same('a') + 'b' == 'ab'",
    "assert same({1, 2}) - {1} == {2}",
    "assert add(add(1), same(add(2))) == 5 and add(*[1, 2]) == 3",
    "assert count('aab') == {'a': 2, 'b': 1} and point() == (1, 2) and red() == 1",
    "assert same(1) == 1.0 == True and same(-0.0) == 0.0 and same(float('nan')) != same(float('nan'))",
    f"assert same({'[' * 190 + ']' * 190}) == {'[' * 190 + ']' * 190}",
    "assert same([0] * 3) == [0, 0, 0] and same(10 ** 50) == 10 ** 50",
    # what Python does not reach
    "assert add(1) == 2 or fail()",
    "assert not (add(1) == 3 and fail())",
    "assert not 5 < add(1) < fail()",
]


@pytest.mark.parametrize("source", HOLDS)
def test_what_holds(source: str) -> None:
    assert failure(source) == ""


FAILS = [
    ("assert add(1, 2) == 4", "assertion failed"),
    ("assert add(1, 2) == 4, 'not four'", "assertion failed not four"),
    ("assert add(1) == 2\nassert add(1) == 3", "assertion failed"),
    ("assert missing(1) == 1", "no attribute 'missing'"),
    ("assert add(1, 2, 3) == 1", "TypeError"),
    ("assert fail() == 1", "ValueError: too small"),
    ("assert leave() == 1", "SystemExit"),
    ("assert fail() or True", "ValueError: too small"),
    ("assert add(fail()) == 1", "KeyError"),
    ("assert Pair(1, 2) == (1, 2)", "a value of the type Pair, which is not plain data"),
    ("assert list(numbers(3)) == [0, 1, 2]", "a value of the type generator"),
    ("assert add(1) < 'a'", "TypeError"),
    ("assert same([1])[3] == 1", "IndexError"),
    ("assert same({})['a'] == 1", "KeyError"),
    ("assert 1 / same(0) == 1", "ZeroDivisionError"),
    ("assert abs(same('a') - 1.5) < 1", "TypeError: a number is needed, not a str"),
    ("assert same('%999999999d') % 1 == '1'", "TypeError: a number is needed, not a str"),
    ("assert [0] * same(10 ** 9) == []", "OverflowError"),
    ("assert [1] + ['a' * 100] * same(3) == []", "TypeError|OverflowError"),
    ("assert 10 ** same(10 ** 10) > 1", "OverflowError"),
    ("assert round(same(5), same(-10 ** 9)) > 1", "OverflowError"),
    ("assert same(10 ** 400) - 3.5 < 1", "OverflowError"),
    ("assert same(float('nan')) == same(float('nan'))", "assertion failed"),
    ("assert same([(1, 2)]) == [[1, 2]]", "assertion failed"),
]


def test_a_function_that_is_not_there() -> None:
    assert failure("assert missing(1) == 1", "def f(): pass") == "NameError: name 'missing' is not defined"


@pytest.mark.parametrize(("source", "reason"), FAILS)
def test_what_does_not_hold_and_why(source: str, reason: str) -> None:
    found = failure(source)
    assert found and any(part in found for part in reason.split("|")), found


REFUSED = [
    ("assert isinstance(add(1), int)", "`isinstance`"),
    ("assert type(add(1)) == int", "`type`"),
    ("assert all(add(i) == i + 1 for i in range(3))", "`all`"),
    ("assert list(map(lambda x: add(x), [1])) == [2]", "`map`"),
    ("assert add(lambda: 1) == 2", "a lambda"),
    ("assert [add(i) for i in (1, 2)] == [2, 3]", "a comprehension"),
    ("assert sorted(add(1), key=lambda x: x) == [2]", "`key` of sorted()"),
    ("assert add(1) == (2 if True else 3)", "`if` in an expression"),
    ("assert add(1) == f'{1}'", "an f-string"),
    ("assert (x := add(1)) == 2", "`:=`"),
    ("assert add(*x) == 2", "`*`"),
    ("assert add(**{'a': 1}) == 2", "`**`"),
    ("assert add(1) is 2", "`is` with something other than None, True and False"),
    ("assert ~add(1) == -3", "`~`"),
    ("assert add(1) | 4 == 6", "`|`"),
    ("assert add(... ) == 2", "`Constant`"),
    ("assert add([...]) == 2", "an argument with a value of the type ellipsis"),
    # methods of results would be asked of the program
    ('assert same("41").endswith("41")', "a method of a result (`.endswith`)"),
    ("assert same([41]).count(41) == 1", "a method of a result (`.count`)"),
    ("assert Stack([41]).count(41) == 1", "a method of a result (`.count`)"),
    ("assert Stack().__eq__(41)", "a method of a result (`.__eq__`)"),
    ("assert make()(1) == 2", "a call of something other than a name"),
    ("assert Pair(1, 2).a == 1", "the name `Pair(1, 2).a`"),
    ("assert same(add(40), 41)", "a function of the program that decides on results of the program"),
    ("assert not same(add(40), 41) and True", "a function of the program that decides"),
    ("assert same(x=[add(40), 41]) == True", "a function of the program that decides"),
    ("assert Stack([40]).holds(41)", "a function of the program that decides"),
    ("assert (add(1) == 2, 'a message')", "a list or tuple as a condition, which is always true"),
    ("assert not [add(1)]", "a list or tuple as a condition, which is always true"),
    ("assert add(len(same('a'))) == 2", "an argument that is calculated from a result"),
    # names
    ("assert LIMIT == add(1)", "the name `LIMIT`"),
    ("import numpy as np\nassert np.allclose(add(1), 2)", "`np.allclose`"),
    ("assert np.allclose(add(1), 2)", "`np.allclose`"),
    ("from solution import add as plus\nassert plus(1) == 2", "`plus`"),
    ("from adders import add\nassert add(1) == 2", "`add`"),
    ("assert math.floor(add(1)) == 2", "`math.floor`"),
    # statements
    ("x = [3, 1]\nassert same(x) == [3, 1]", "an assignment"),
    ("x = add(1)\nassert add(1) == 2", "an assignment"),
    ("root = Node(1)\nroot.left = Node(2)\nassert height(root) == 2", "an assignment"),
    ("for i in range(3):\n  assert add(i) == i + 1", "a `for` loop"),
    ("def check(candidate):\n  for i in range(3):\n    assert candidate(i) == i + 1\ncheck(add)", "a `for` loop"),
    ("def check(candidate):\n  assert candidate(1) == 2", "the function `check` that is not called; write check(NAME)"),
    ("def check(candidate):\n  assert candidate(1) == 2\ncheck(len(add))", "`check` of something other than a func"),
    ("def check(candidate, n=1):\n  assert candidate(1) == 2\ncheck(add)", "the function `check`"),
    ("def test_add():\n  assert add(1) == 2", "the function `test_add`"),
    ("try:\n  assert add(1) == 2\nexcept ValueError: pass", "`try`"),
    ("if True:\n  assert add(1) == 2", "`if` in `if True: assert add(1) == 2`"),
    ("with raises(ValueError):\n  add(1)\nassert add(1) == 2", "`with`"),
    ("sort([1])\nassert add(1) == 2", "the statement `sort(...)`"),
    ("class A: pass\nassert add(1) == 2", "a class"),
    # nothing to judge
    ("assert True", "an assert that calls nothing of the program"),
    ("assert abs(-1) == len([1])", "an assert that calls nothing of the program"),
    ("add(1) == 2", "a statement that asserts nothing"),
    ("", "text without an assert"),
    ("assert add(", "text that is not Python"),
    ("assert add('\0')", "text that is not Python"),
    ("assert add(1) == " + "-" * 100_000 + "1", "text that is not Python|nested too deep"),
    ("assert add(1) == " + "[" * 250 + "]" * 250, "text that is not Python|nested too deep"),
    # faults of the row
    ("assert add(1) == 1 / 0", "`1 / 0`, which raises ZeroDivisionError"),
    ("assert add(1) == 10 ** 10 ** 10", "which raises OverflowError"),
    ("assert add('a' * 10 ** 10) == 1", "which raises OverflowError"),
    ("assert add(1) == '%10d' % 1", "which raises TypeError"),
    ("assert add({[1]: 2}) == 1", "which raises TypeError"),
]


@pytest.mark.parametrize(("source", "form"), REFUSED)
def test_what_cannot_be_judged_is_refused_by_name(source: str, form: str) -> None:
    with bounded(), pytest.raises(Refused) as error:
        grammar.read(source)
    assert any(part in str(error.value) for part in form.split("|")), error.value
    assert len(str(error.value)) < 400


def test_calls_hold_arguments_alone() -> None:
    read = grammar.read("assert add(40) == 41 and 42 in [same('a'), 43], str(44)\nassert Solution().f(x=Pair(1)) < 45")
    assert [json.loads(call) for call in read.calls] == [
        ["add", ["l", 40], ["d"]],
        ["same", ["l", "a"], ["d"]],
        ["Solution", ["l"], ["d"]],
        ["Pair", ["l", 1], ["d"]],
        [[2, "f"], ["l"], ["d", ["x", ["r", 3]]]],
    ]


def test_all_calls_are_made_whatever_the_first_returned() -> None:
    """So that the next call does not tell whether the answer before was right."""
    assert len(grammar.read("assert add(1) == 2 or add(2) == 4 or (add(3) == 4 and add(4) == 5)").calls) == 4


def test_a_large_row_is_read_in_time() -> None:
    large = str([[i, str(i), float(i)] for i in range(20_000)])
    with bounded(60):
        assert failure(f"assert same({large}) == {large}") == ""
