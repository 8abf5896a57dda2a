"""The stream of a replay on a real Ray: the run's own stages, no engine; the trainer's side is played by the test."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.store.cursor import PromptCursor
from pipeline.store.events import PromptsMade, VersionLoaded
from pipeline.track.trajectories import read_trajectories
from tests import recordings
from tests.streams import BATCH, CHUNK, CHUNKS, RANKS, SAMPLES, Run, changed, closing

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("stream_context")]

RECORDED = 6
GROUPS = RECORDED * recordings.BATCH
"""Groups of the recording, whose iterations are half as large as those of the replay."""
PASSES = 2
LAST = PASSES * GROUPS // BATCH


def replaying(config: Config, folder: Path, **changes: Any) -> tuple[Config, list[dict[str, Any]]]:
    """Settings of a replay in `folder`, and the rows of the recording, each group's one after the other."""
    rows = recordings.record(folder / "recorded", range(1, RECORDED + 1), **changes)
    own = changed(config, folder)
    own.data.train_files = own.data.val_files = None
    own.data.recorded_run = str(folder / "recorded")
    own.trainer.total_training_steps, own.trainer.total_epochs = None, PASSES
    # More than there are: engines do not count.
    own.rollout.num_engines, own.rollout.num_gpus = 3, 1
    return own, rows


@pytest.fixture(scope="module")
def whole(
    stream_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("replay")
    own, recorded = replaying(stream_config, folder)
    run = Run(own, Schedule(LAST, CHUNKS, CHUNK, False, True, -1), folder)
    with closing(run):
        run.train(1, LAST)
        run.finish(LAST)
        yield run, recorded


def test_the_trainer_gets_the_recorded_rows_in_order(whole: tuple[Run, list[dict[str, Any]]]) -> None:
    run, recorded = whole
    rows = pa.concat_tables(run.rows(iteration) for iteration in range(1, LAST + 1)).to_pylist()
    assert len(rows) == PASSES * len(recorded)
    for row, was in zip(rows, recorded * PASSES, strict=True):
        assert row["uid"] == was["uid"] + (f"/{row['epoch']}" if row["epoch"] else "")
        for name in ("sample", "prompt_ids", "response_ids", "response"):
            assert row[name] == was[name]
        assert row["rollout_log_probs"] == pa.array(was["rollout_log_probs"], pa.float32()).to_pylist()
    assert [row["epoch"] for row in rows] == [0] * len(recorded) + [1] * len(recorded)


def test_rows_are_dealt_and_numbered_as_in_any_run(whole: tuple[Run, list[dict[str, Any]]]) -> None:
    run, _ = whole
    for iteration in range(1, LAST + 1):
        for rank, table in enumerate(run.iterations[iteration]):
            assert len(table) == BATCH * SAMPLES // RANKS
            first = (iteration - 1) * CHUNKS
            chunks = [first + rank + RANKS * i for i in range(CHUNKS // RANKS)]
            assert table["chunk"].to_pylist() == [chunk for chunk in chunks for _ in range(CHUNK * SAMPLES)]
            # Strictly on-policy, as far as the store is concerned.
            assert set(table["policy_version"].to_pylist()) == {iteration - 1}


def test_rewards_and_advantages_are_made_anew(whole: tuple[Run, list[dict[str, Any]]]) -> None:
    run, _ = whole
    failed = 0
    for iteration in range(1, LAST + 1):
        for row in run.rows(iteration).to_pylist():
            if json.loads(row["extra_info"])["index"] % 5 == 0:
                failed += 1
                assert row["reward_error"].startswith("ArithmeticError: no score for")
            else:
                assert row["score"] == len(row["response"]) % 3 and row["reward_error"] is None
    assert failed == PASSES * SAMPLES * len(range(0, GROUPS, 5))
    assert any(any(row) for row in run.rows(1)["advantages"].to_pylist())


def test_a_replay_records_its_own_rows_and_leaves_the_recording_alone(whole: tuple[Run, list[dict[str, Any]]]) -> None:
    run, recorded = whole
    for iteration in range(1, LAST + 1):
        own = read_trajectories(str(run.folder), iteration)
        assert own["response_ids"].to_pylist() == run.rows(iteration)["response_ids"].to_pylist()
    assert run.config.data.recorded_run is not None
    again = read_trajectories(run.config.data.recorded_run, RECORDED).to_pylist()
    assert [row["score"] for row in again] == [row["score"] for row in recorded[-len(again) :]]
    counts = [event.metrics["prompts/recorded_iteration"] for event in run.told(PromptsMade)]
    assert counts == [2, 4, 6] * PASSES
    assert run.told(VersionLoaded) == [] and run.events("start") == []


@pytest.mark.slow
@pytest.mark.long
def test_recorded_baselines_in_a_resumed_replay(stream_config: Config, tmp_path: Path) -> None:
    own, recorded = replaying(stream_config, tmp_path, baseline=0.75)
    own.algorithm.adv_estimator, base, last = "remax", 2, 4
    run = Run(own, Schedule(last, CHUNKS, CHUNK, False, True, -1), tmp_path, base, PromptCursor(0, base * BATCH))
    with closing(run):
        run.train(base + 1, last)
        run.finish(last)
        groups = [f"0-{group}" for group in range(base * BATCH, GROUPS)] + [f"0-{group}/1" for group in range(BATCH)]
        assert [*run.uids(3), *run.uids(4)] == groups
        for iteration in (3, 4):
            for row in run.rows(iteration).to_pylist():
                assert row["baseline"] == 0.75 and row["split"] == "train"
                if row["reward_error"] is None:
                    assert row["advantages"] == pytest.approx([row["score"] - 0.75] * len(row["response_ids"]))
