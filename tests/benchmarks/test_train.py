"""Sides of `benchmarks.train` that give freed memory back."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

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


def test_rows_of_the_bare_loop_attend_with_fewer_heads_of_keys() -> None:
    query, key, value = (torch.randn(1, heads, 5, 4) for heads in (6, 2, 2))
    found, _ = train_sides._attend_row_by_row(None, query, key, value, None, 0.5, [0, 2, 5])
    key, value = (states.repeat_interleave(3, 1) for states in (key, value))
    rows = [
        scaled_dot_product_attention(*(states[:, :, a:b] for states in (query, key, value)), is_causal=True, scale=0.5)
        for a, b in ((0, 2), (2, 5))
    ]
    torch.testing.assert_close(found, torch.cat(rows, 2).transpose(1, 2))
