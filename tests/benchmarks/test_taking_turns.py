"""Sides that take turns: what a turn reports, and a side that ends or hangs."""

import sys
import time

import pytest

from benchmarks.taking_turns import Side

SCRIPT = """
import time
from benchmarks.taking_turns import serve

def build():
    kept = b"x" * (64 * 2**20)
    print("a library prints")
    def run():
        print("and again")
        passing = len(kept) and b"x" * (128 * 2**20)
        {body}
    return run

serve(build)
"""


def side(body: str, timeout_s: float = 30.0) -> Side:
    return Side("the side", [sys.executable, "-c", SCRIPT.format(body=body)], timeout_s)


def test_a_turn_has_its_own_seconds_and_peak() -> None:
    body = "end = time.process_time() + 0.2\n        while time.process_time() < end: pass"
    with side(body) as process:
        turns = [process.turn() for _ in range(3)]
    for turn in turns:
        assert 0.2 <= turn["cpu_s"] < 2
        # The same in each turn: the peak of one before is forgotten.
        assert 190 <= turn["peak_mib"] < 230


def test_a_side_that_ends_or_hangs_is_named() -> None:
    with side("raise SystemExit") as process, pytest.raises(RuntimeError, match="the side ended, or took longer than"):
        process.turn()
    begun = time.monotonic()
    with side("time.sleep(60)", 1.0) as process, pytest.raises(RuntimeError, match="longer than 1 s"):
        process.turn()
    assert time.monotonic() - begun < 30
