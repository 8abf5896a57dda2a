"""Sides of `benchmarks.train` that give freed memory back."""

from typing import Any

import pytest

from benchmarks import train_sides
from benchmarks.train import command
from benchmarks.train_sides import FREED, SHAPES, SIDES


@pytest.mark.parametrize(("side", "freed"), [("slipstream", False), ("slipstream, malloc_trim", True)])
def test_memory_is_given_back_after_each_update(monkeypatch: pytest.MonkeyPatch, side: str, freed: bool) -> None:
    done: list[str] = []

    class Update:
        def __init__(self, *_: Any) -> None:
            pass

        def add(self, rows: Any) -> None:
            done.append("added")

        def finish(self) -> None:
            done.append("finished")

    monkeypatch.setattr(train_sides, "StreamedUpdate", Update)
    monkeypatch.setattr(train_sides, "build_actor", lambda *_: None)
    monkeypatch.setattr(train_sides, "give_back", lambda: done.append("given back"))
    monkeypatch.setattr(train_sides.actors, "load_policy", None)
    made = (SIDES | FREED)[side](SHAPES["sums"])
    for _ in range(2):
        made.update(None)
    assert done == ["added", "finished", *["given back"] * freed] * 2


def test_one_side_has_the_variable_of_the_c_library() -> None:
    words = [command(side, "sums", 1, None) for side in FREED]
    assert ["MALLOC_MMAP_THRESHOLD_=262144" in found for found in words] == [False, True]
    assert words[0][-4:] == ["slipstream, malloc_trim", "sums", "--threads", "1"]
