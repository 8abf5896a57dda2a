"""The stream on a real Ray, from parquet to the train workers' ends of it, with an instant stand-in for the engine.

Every stage but the engine is the run's own, the trainer's side is played by the test. Most tests read the stream that
is shared with other files.
"""

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.stage import LOOKAHEAD, Schedule
from pipeline.store.events import ValidationAnnounced, ValidationScored, VersionLoaded
from pipeline.track.trajectories import read_trajectories
from tests.streams import (
    ANSWER_S,
    BATCH,
    CHUNK,
    CHUNKS,
    RANKS,
    SAMPLES,
    WHOLE,
    Run,
    changed,
    closing,
    expected_prompts,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]


# One run of an outcome estimator.


@pytest.fixture(scope="module")
def whole(whole_stream: Run) -> Run:
    return whole_stream


def test_each_rank_gets_its_rows_in_order(whole: Run) -> None:
    for iteration in range(1, WHOLE + 1):
        first = (iteration - 1) * CHUNKS
        for rank, table in enumerate(whole.iterations[iteration]):
            assert len(table) == BATCH * SAMPLES // RANKS
            chunks = [first + rank + RANKS * i for i in range(CHUNKS // RANKS)]
            assert table["chunk"].to_pylist() == [chunk for chunk in chunks for _ in range(CHUNK * SAMPLES)]
            assert table["sample"].to_pylist() == list(range(SAMPLES)) * (len(table) // SAMPLES)


def test_prompts_are_those_of_the_source(whole: Run, prompt_files: Any) -> None:
    seen = [whole.uids(iteration) for iteration in range(1, WHOLE + 1)]
    assert seen == expected_prompts(whole.config, WHOLE)
    first_epoch = [uid for uids in seen[: prompt_files.train_rows // BATCH] for uid in uids]
    assert sorted(first_epoch) == sorted(f"0-{i}" for i in range(prompt_files.train_rows))


def test_strictly_on_policy(whole: Run) -> None:
    for iteration, tables in whole.iterations.items():
        assert {v for table in tables for v in table["policy_version"].to_pylist()} == {iteration - 1}
    admitted = whole.events("admitted")
    assert len(admitted) >= WHOLE * CHUNKS
    for event in admitted:
        wanted = event["iteration"] - 1 if event["split"] == "train" else event["iteration"]
        assert event["version"] == wanted
        assert event["time"] >= whole.published[wanted], f"{event} before version {wanted} was published"


def test_nothing_starts_while_a_version_is_awaited(whole: Run) -> None:
    held = whole.held
    assert 2 in held["asked"], "the next iteration's chunks do wait at the engine"
    assert held["admitted"] == {("val", 0), ("train", 1)}


def test_prompts_are_made_at_most_one_iteration_ahead(whole: Run) -> None:
    made = [True] * (1 + LOOKAHEAD) + [False] * (3 - LOOKAHEAD)
    assert whole.held["positions"] == made


def test_failed_rewards_keep_their_place(whole: Run) -> None:
    failed = 0
    for tables in whole.iterations.values():
        for row in pa.concat_tables(tables).to_pylist():
            length = len(row["response_ids"])
            assert length and len(row["response_mask"]) == len(row["advantages"]) == length
            if json.loads(row["extra_info"])["index"] % 5 == 0:
                failed += 1
                assert row["reward_error"].startswith("ArithmeticError: no score for")
                assert row["drop_reason"] == "reward_error" and row["advantages"] == [0.0] * length
            else:
                assert row["reward_error"] is row["drop_reason"] is None
                assert row["score"] == len(row["response"]) % 3
    # Two whole epochs have eight such prompts each.
    assert failed >= 2 * 8 * SAMPLES
    spread = {max(row) for tables in whole.iterations.values() for t in tables for row in t["advantages"].to_pylist()}
    assert len(spread) > 1, "advantages are estimated"


def test_validation_rows_leave_before_the_trainer(whole: Run, prompt_files: Any) -> None:
    versions = [0, 4, 8, WHOLE]
    assert [event.version for event in whole.told(ValidationAnnounced)] == versions
    assert {event.prompts for event in whole.told(ValidationAnnounced)} == {prompt_files.val_rows}
    reported: dict[int, list[str]] = {version: [] for version in versions}
    for scored in whole.told(ValidationScored):
        reported[scored.version] += [prompt.uid for prompt in scored.prompts]
    prompts = sorted(f"val-{i}" for i in range(prompt_files.val_rows))
    for version in versions:
        assert sorted(reported[version]) == prompts
        recorded = read_trajectories(str(whole.folder), version, "val")
        assert sorted(recorded["uid"].to_pylist()) == prompts
        assert set(recorded["policy_version"].to_pylist()) == {version}
    assert all(set(t["split"].to_pylist()) == {"train"} for tables in whole.iterations.values() for t in tables)


def test_every_row_is_recorded_as_the_trainer_got_it(whole: Run) -> None:
    for iteration in whole.iterations:
        got = whole.rows(iteration)
        recorded = read_trajectories(str(whole.folder), iteration)
        for name in ("uid", "sample", "response_ids", "score", "advantages", "policy_version"):
            assert recorded[name].to_pylist() == got[name].to_pylist(), name


def test_one_engine_serves_the_whole_run(whole: Run) -> None:
    assert len(whole.events("start")) == 1
    assert [event.version for event in whole.told(VersionLoaded)] == list(range(WHOLE + 1))


# Processes that die.


def workers(stage: str) -> list[psutil.Process]:
    """This session's actor processes of a stage; never those of another Ray on the machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"MapBatches({stage})" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.long
def test_killed_actors_lose_and_repeat_no_prompt(stream_config: Config, tmp_path: Path) -> None:
    own, last = changed(stream_config, tmp_path), 7
    run = Run(own, Schedule(last, CHUNKS, CHUNK, True, False, 3), tmp_path)
    with closing(run):
        run.train(1, 2)
        for stage in ("Prompts", "StandIn"):
            (victim,) = workers(stage)
            victim.send_signal(signal.SIGKILL)
            victim.wait(timeout=ANSWER_S)
            first = max(run.iterations) + 1
            run.train(first, first + 1)
        run.train(last, last)
        run.finish(last)
        assert [run.uids(iteration) for iteration in range(1, last + 1)] == expected_prompts(own, last)
        for iteration, tables in run.iterations.items():
            rows = pa.concat_tables(tables)
            assert len(rows) == BATCH * SAMPLES
            assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert len(run.events("start")) == 2, "the engine was started again, once"
        for version in (3, 6, last):
            assert len(read_trajectories(str(tmp_path), version, "val")) == 7
