"""The prompt stage of an evaluation, without Ray: which chunks there are, and which rows are left out."""

import copy
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.evaluate import stream
from pipeline.evaluate.settings import used
from pipeline.evaluate.stream import EvaluationPrompts, FixedPolicy, Pages
from pipeline.prompts.stage import MAX_PAGES
from tests.rollout.test_stage import Make, chunk, generate, make  # noqa: F401 (a fixture)


def test_pages() -> None:
    assert (Pages(7).page_chunks, Pages(7).count) == (1, 7)
    many = Pages(10 * MAX_PAGES - 5)
    assert (many.page_chunks, many.count) == (10, MAX_PAGES)


@pytest.fixture
def config(stream_config: Config) -> Config:
    """Seven validation prompts in chunks of two."""
    return used(copy.deepcopy(stream_config))


def made(stage: EvaluationPrompts, number: int) -> list[tuple[str, int]]:
    table = stage(pa.table({"id": [number]}))
    assert set(table["split"].to_pylist()) <= {"val"} and set(table["iteration"].to_pylist()) <= {4}
    return list(zip(table["uid"].to_pylist(), table["chunk"].to_pylist(), strict=True))


def test_every_prompt_once_in_order_and_empty_pages_behind_the_last(config: Config, tmp_path: Path) -> None:
    stage = EvaluationPrompts(config, Pages(6), 4, str(tmp_path))
    pages = [made(stage, number) for number in range(6)]
    assert [row for page in pages for row in page] == [(f"val-{i}", i // 2) for i in range(7)]
    assert [len(page) for page in pages] == [2, 2, 2, 1, 0, 0]


def test_done_chunks_are_left_out_and_a_restarted_actor_goes_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_PAGES", 2)
    pages = Pages(4, frozenset({0, 3}))
    assert pages.page_chunks == 2
    stage = EvaluationPrompts(config, pages, 4, str(tmp_path))
    assert made(stage, 0) == [("val-2", 1), ("val-3", 1)]
    assert made(stage, 1) == [("val-4", 2), ("val-5", 2)]
    again = EvaluationPrompts(config, pages, 4, str(tmp_path))
    assert made(again, 1) == [("val-4", 2), ("val-5", 2)]
    assert made(again, 0) == [("val-2", 1), ("val-3", 1)], "a page that is asked for once more"


def test_an_engine_loads_no_weights(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stage = make("grpo")
    monkeypatch.setattr(stage, "_policy", FixedPolicy())
    monkeypatch.setattr(stage.fake, "load", None)  # type: ignore[attr-defined]
    table = generate(stage, chunk("val"))
    assert len(table) == 6 and stage.engine.steps > 0
