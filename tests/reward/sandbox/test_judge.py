"""Asserts and calls whose program lives in another process."""

from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig
from tests.reward.sandbox.programs import score

PROGRAM = """
import math, itertools
from collections import Counter, namedtuple
LIMIT = 7
Point = namedtuple("Point", "x y")
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
    def __eq__(self, other): return (self.a, self.b) == (other.a, other.b)
    def __add__(self, other): return Pair(self.a + other.a, self.b + other.b)
    def __len__(self): return 2
    def __getitem__(self, index): return (self.a, self.b)[index]
    def total(self): return self.a + self.b
class Solution:
    def twoSum(self, a, b): return [a, b]
def add(a, b=1): return a + b
def same(x): return x
def count(text): return Counter(text)
def point(): return Point(1, 2)
def numbers(n): yield from range(n)
def longest(pairs): return max(pair.b for pair in pairs)
def sort(values): values.sort()
def extend(values, more): values.update(more)
def fail(): raise ValueError("too small")
def sum(a, b): return a - b
def stop(): raise StopIteration
def root(x): return math.sqrt(x)
def make(): return lambda x: x + 1
"""


def failure(source: str, config: SandboxConfig, program: str = PROGRAM) -> str:
    return str(score(program, [source], config)["reason"]).removeprefix("test 1: ")


def test_what_holds(config: SandboxConfig) -> None:
    source = """
import re
assert add(1, 2) == 3 and add(1) == 2 and add(a=1, b=5) == 6
assert same((1, [2, {"a": {3}}], None, 1.5, b"x", 10 ** 50)) == (1, [2, {"a": {3}}], None, 1.5, b"x", 10 ** 50)
assert type(same((1,))) is tuple and isinstance(same(True), bool)
assert count("aab") == {"a": 2, "b": 1} and point() == (1, 2)
assert LIMIT == 7
assert list(numbers(3)) == [0, 1, 2] and [x for x in numbers(2)] == [0, 1]
assert longest([Pair(1, 5), Pair(2, 4)]) == 5
pair = Pair(1, 2)
assert pair == Pair(1, 2) and pair != Pair(1, 3) and (pair + pair).total() == 6
assert pair.a == 1 and len(pair) == 2 and pair[1] == 2 and pair != (1, 2)
assert Solution().twoSum(1, 2) == [1, 2]
assert make()(1) == 2
assert math.isclose(root(2.0) ** 2, 2.0)
assert re.match("a", same("abc"))
assert all(add(i) == i + 1 for i in range(3)) and list(map(add, [1, 2])) == [2, 3]
def check(candidate):
    assert candidate(2) == 3
check(add)
try:
    fail()
    assert False
except ValueError as error:
    assert str(error) == "too small"
"""
    assert failure(source, config) == ""


def test_arguments_changed_in_place_are_changed(config: SandboxConfig) -> None:
    source = "x = [3, 1]\nsort(x)\nassert x == [1, 3]\ny = {1}\nextend(y, [2])\nassert y == {1, 2}"
    assert failure(source + "\nz = {}\nextend(z, {'a': 1})\nassert z == {'a': 1}", config) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert add(1, 2) == 4", "assertion failed"),
        ("assert add(1, 2) == 4, 'not four'", "assertion failed not four"),
        ("assert missing(1) == 1", "NameError"),
        ("assert add(1, 2, 3) == 1", "TypeError"),
        ("assert fail()", "ValueError: too small"),
        ("assert Pair(1, 2) == (1, 2)", "assertion failed"),
        ("assert all(map(lambda x: stop(), [1]))", "ProgramError: StopIteration"),
        ("assert add(lambda: 1, 2)", "a test cannot hand a function to the program"),
        ("assert add(1, 2) == 3\nassert sum([1, 2]) == -1", "assertion failed"),
    ],
)
def test_what_does_not_hold_and_why(source: str, reason: str, config: SandboxConfig) -> None:
    assert reason in failure(source, config)


def test_a_function_may_be_named_like_a_builtin(config: SandboxConfig) -> None:
    assert failure("assert sum(5, 3) == 2", config) == ""


@pytest.mark.parametrize("program", ["def f(", "raise ValueError", "import os; os._exit(0)", "import sys; sys.exit(0)"])
def test_a_program_that_does_not_load_fails(program: str, config: SandboxConfig) -> None:
    assert failure("assert True", config, program)


def test_a_standard_module_before_a_dot_is_that_module(config: SandboxConfig) -> None:
    program = "class math:\n  isclose = lambda *a: True\ndef f(x): return 0"
    assert failure("assert math.isclose(f(1), 1)", config, program) == "assertion failed"


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "reason"),
    [
        ("add", [1, 2], 3, ""),
        ("twoSum", [1, 2], [1, 2], ""),
        ("sum", [1, 2], -1, ""),
        ("add", [1, 2], 4, "wrong answer"),
        ("fail", [], 0, "ValueError: too small"),
        ("missing", [], 0, "AttributeError"),
        ("make", [], 0, "not plain data"),
    ],
)
def test_calls(name: str, arguments: list[Any], expected: Any, reason: str, config: SandboxConfig) -> None:
    result = score(PROGRAM, {"fn_name": name, "inputs": [arguments], "outputs": [expected]}, config)
    assert reason in result["reason"] and result["score"] == float(not reason)
