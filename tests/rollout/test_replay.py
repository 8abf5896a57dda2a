"""The replay stage: recorded responses as if an engine had given them now."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.encode import stamp, to_table
from pipeline.prompts.recorded import RecordedSupply
from pipeline.prompts.recording import Recording
from pipeline.rollout.replay import Replay
from pipeline.rows import BASELINE, PROMPT, ROLLOUT
from pipeline.store.cursor import PromptCursor
from pipeline.store.versions import Ticket
from tests.recordings import BATCH, SAMPLES, record


class Admitting:
    """A policy store that is at version 7, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    async def admit(self, split: str, chunk: int, version: int) -> Ticket:
        self.asked.append((split, chunk, version))
        return Ticket(7, [])

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        raise AssertionError("nothing was loaded")


@dataclasses.dataclass
class Replayed:
    recorded: list[dict[str, Any]]
    prompts: pa.Table
    table: pa.Table
    asked: list[tuple[str, int, int]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.table.to_pylist()


def replay(folder: Path, estimator: str = "grpo", passes: int = 0, size: int = BATCH, **changes: Any) -> Replayed:
    """The first chunk, of `size` prompts, of a later pass over a recording of two iterations."""
    recorded = record(folder, [1, 2], **changes)
    config = Config()
    config.data.recorded_run = str(folder)
    config.algorithm.adv_estimator = estimator
    supply = RecordedSupply(Recording(str(folder)), None)
    supply.load(PromptCursor(passes, 1))
    prompts = stamp(to_table(supply.iteration(8, size)), "train", 31, 8)
    policy = Admitting()
    table = asyncio.run(Replay(config, policy)(prompts))
    return Replayed(recorded[SAMPLES : (1 + size) * SAMPLES], prompts, table, policy.asked)


def test_tokens_and_log_probs_are_those_of_the_recording(tmp_path: Path) -> None:
    found = replay(tmp_path)
    assert found.table.schema.names == [*PROMPT.names, *ROLLOUT.names]
    assert found.table.schema.types == [*PROMPT.types, *ROLLOUT.types]
    assert len(found.rows) == len(found.recorded) == BATCH * SAMPLES
    for row, was in zip(found.rows, found.recorded, strict=True):
        assert row["version_runs"] == [{"version": 7, "tokens": len(was["response_ids"])}]
        for name in ("uid", "prompt_ids", "ground_truth", "extra_info", "data_source", "prompt_index"):
            assert row[name] == was[name]
        for name in ("sample", "response_ids", "response_mask", "response", "finish_reason", "engine"):
            assert row[name] == was[name]
        # To the last bit of a float32.
        assert row["rollout_log_probs"] == pa.array(was["rollout_log_probs"], pa.float32()).to_pylist()


def test_rows_carry_the_numbers_of_the_run_that_trains(tmp_path: Path) -> None:
    found = replay(tmp_path)
    assert found.asked == [("train", 31, 8)]
    for row in found.rows:
        assert (row["split"], row["chunk"], row["iteration"], row["policy_version"]) == ("train", 31, 8, 7)
        assert row["generate_s"] is row["load_s"] is None


def test_a_later_pass_is_another_visit(tmp_path: Path) -> None:
    found = replay(tmp_path, passes=2)
    assert [row["uid"] for row in found.rows] == [f"{was['uid']}/2" for was in found.recorded]
    assert {row["epoch"] for row in found.rows} == {2}
    assert [row["response"] for row in found.rows] == [was["response"] for was in found.recorded]


def test_recorded_baselines_come_along_where_the_estimator_reads_them(tmp_path: Path) -> None:
    assert replay(tmp_path).table.schema.names[-1] == ROLLOUT.names[-1]
    found = replay(tmp_path, "remax", baseline=0.75)
    assert found.table.schema.field("baseline").type == BASELINE.field("baseline").type
    assert {row["baseline"] for row in found.rows} == {0.75} and {row["split"] for row in found.rows} == {"train"}
    assert len(found.rows) == BATCH * SAMPLES


def test_waiting_for_files_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, [1])
    config = Config()
    config.data.recorded_run = str(tmp_path)
    config.trainer.deadlines.chunk = 0.05
    stage = Replay(config, Admitting())
    prompts = stamp(to_table(RecordedSupply(Recording(str(tmp_path)), 1).iteration(1, 1)), "train", 3, 1)
    monkeypatch.setattr(Recording, "responses", lambda *_: time.sleep(1))
    with pytest.raises(TimeoutError, match=r"chunk 3 were not read from .* within 0 s \(trainer.deadlines.chunk\)"):
        asyncio.run(stage(prompts))
