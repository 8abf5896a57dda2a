"""The prompt stage of an evaluation, without Ray: which chunks there are, what is left out, and the pace."""

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.evaluate import prompts
from pipeline.evaluate.prompts import EvaluationPrompts, Pace, Pages
from pipeline.evaluate.settings import used
from pipeline.prompts.stage import MAX_PAGES


def test_pages() -> None:
    assert (Pages(7).page_chunks, Pages(7).count) == (1, 7)
    many = Pages(10 * MAX_PAGES - 5, frozenset({0, 10, 11}))
    assert (many.page_chunks, many.count) == (10, MAX_PAGES)
    assert [many.made_before(page) for page in (0, 1, 2, 3)] == [0, 9, 17, 27]


@pytest.fixture
def config(stream_config: Config) -> Config:
    """Seven validation prompts in chunks of two."""
    return used(copy.deepcopy(stream_config))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After how many chunks the pace was asked."""
    found: list[int] = []
    monkeypatch.setattr(prompts.ray, "get", lambda made, timeout: found.append(made))
    return found


PACE: Any = SimpleNamespace(wait=SimpleNamespace(remote=lambda made, timeout: made))


def page(number: int) -> pa.Table:
    return pa.table({"id": [number]})


def made(stage: EvaluationPrompts, number: int) -> list[tuple[str, int]]:
    table = stage(page(number))
    assert set(table["split"].to_pylist()) <= {"val"} and set(table["iteration"].to_pylist()) <= {4}
    return list(zip(table["uid"].to_pylist(), table["chunk"].to_pylist(), strict=True))


def test_every_prompt_once_in_order(config: Config, asked: list[int], tmp_path: Path) -> None:
    stage = EvaluationPrompts(config, Pages(4), 4, PACE, str(tmp_path))
    found = [row for number in range(4) for row in made(stage, number)]
    assert found == [(f"val-{i}", i // 2) for i in range(7)]
    assert asked == [0, 1, 2, 3]


def test_done_chunks_are_left_out_and_a_restarted_actor_goes_on(
    config: Config, asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_PAGES", 2)
    pages = Pages(4, frozenset({0, 3}))
    assert pages.page_chunks == 2
    stage = EvaluationPrompts(config, pages, 4, PACE, str(tmp_path))
    assert made(stage, 0) == [("val-2", 1), ("val-3", 1)]
    assert made(stage, 1) == [("val-4", 2), ("val-5", 2)]
    assert asked == [0, 1]
    again = EvaluationPrompts(config, pages, 4, PACE, str(tmp_path))
    assert made(again, 1) == [("val-4", 2), ("val-5", 2)]
    assert made(again, 0) == [("val-2", 1), ("val-3", 1)], "a page that is asked for once more"


def test_pages_behind_the_last_prompt_are_empty(config: Config, asked: list[int], tmp_path: Path) -> None:
    stage = EvaluationPrompts(config, Pages(6), 4, PACE, str(tmp_path))
    assert [len(made(stage, number)) for number in range(6)] == [2, 2, 2, 1, 0, 0]


def test_the_pace_lets_so_many_go_ahead() -> None:
    async def scene() -> list[int]:
        pace, passed = Pace(2), []

        async def make() -> None:
            for number in range(6):
                await pace.wait(number, 10.0)
                passed.append(number)

        task = asyncio.create_task(make())
        seen = []
        for received in range(4):
            await pace.received(received)
            await asyncio.sleep(0.01)
            seen.append(len(passed))
        await pace.received(6)
        await task
        return seen

    assert asyncio.run(scene()) == [2, 3, 4, 5]


def test_the_pace_names_what_it_waited_for() -> None:
    with pytest.raises(TimeoutError, match=r"3 chunks were made, 0 were received, .* \(trainer.deadlines.rows\)"):
        asyncio.run(Pace(3).wait(3, 0.01))
