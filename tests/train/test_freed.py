"""Freed memory between blocks that are still in use goes back to the system."""

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.train import freed
from pipeline.train.freed import give_back

BLOCK, BLOCKS = 96 * 2**10, 2_000
"""Bytes of a block, which the C library takes from its heap, and number of blocks."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gaps_between_blocks_are_given_back() -> None:
    blocks: list[np.ndarray | None] = [np.ones(BLOCK, np.uint8) for _ in range(BLOCKS)]
    for number in range(BLOCKS):
        if number % 20:
            blocks[number] = None
    before = resident()
    give_back()
    assert before - resident() > BLOCK * BLOCKS // 2
    assert sum(block is not None for block in blocks) == BLOCKS // 20


def test_another_c_library_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed.ctypes, "CDLL", lambda name: object())
    give_back()
