"""Engines that join and die, on a real Ray: the pool grows while chunks fill it, and the rows do not show it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import FinalError
from pipeline.prompts.stage import Schedule
from pipeline.store.events import VersionLoaded
from pipeline.train.feed import RowsTimeout
from tests.stages import Failing, Hopeless, Killed, KilledAtStart, NeverAgain, Slow, StandIn
from tests.streams import (
    ANSWER_S,
    BATCH,
    CHUNK,
    CHUNKS,
    RANKS,
    SAMPLES,
    Run,
    changed,
    closing,
    expected_prompts,
)
from tests.test_stream import workers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("stream_context")]

SAME = ("uid", "chunk", "sample", "response_ids", "rollout_log_probs", "policy_version", "score", "advantages")
"""Columns that do not depend on which engine generated a row."""
PATIENCE_S = 90.0


def until(what: Callable[[], bool], run: Run) -> None:
    """Train on until it is so, and one iteration more."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        iterate(run)
    iterate(run)


def iterate(run: Run) -> None:
    following = max(run.iterations, default=0) + 1
    run.train(following, following)


def engines_of(run: Run, iteration: int) -> set[str]:
    return set(run.rows(iteration)["engine"].to_pylist())


@pytest.mark.long
def test_the_pool_grows_and_the_rows_do_not_change(stream_config: Config, tmp_path: Path, whole_stream: Run) -> None:
    own, last = changed(stream_config, tmp_path), 200
    own.rollout.max_engines = 3
    run = Run(own, Schedule(last, CHUNKS, CHUNK, False, False, -1), tmp_path, stage=Slow)
    with closing(run):
        # Four chunks of 0.4 s are 1.6 s of one engine and 0.8 s of each of two.
        until(lambda: len(run.events("start")) > 1, run)
        until(lambda: len(engines_of(run, max(run.iterations))) > 1, run)
        assert len(run.events("start")) <= 3
        for iteration in range(1, 5):
            for mine, theirs in zip(run.iterations[iteration], whole_stream.iterations[iteration], strict=True):
                assert mine.select(SAME).equals(theirs.select(SAME))

        victim = workers("Slow")[0]
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=ANSWER_S)
        started = len(run.events("start"))
        until(lambda: len(run.events("start")) > started, run)

        seen = [run.uids(iteration) for iteration in sorted(run.iterations)]
        assert seen == expected_prompts(own, len(seen))
        for iteration, tables in run.iterations.items():
            assert {v for table in tables for v in table["policy_version"].to_pylist()} == {iteration - 1}
            assert [len(table) for table in tables] == [BATCH * SAMPLES // RANKS] * RANKS
        run.abandon()


# Engines that die.


def started(stream_config: Config, folder: Path, stage: type[StandIn]) -> Run:
    schedule = Schedule(3, CHUNKS, CHUNK, False, False, -1)
    return Run(changed(stream_config, folder), schedule, folder, stage=stage)


@pytest.mark.parametrize("stage", [pytest.param(Killed, marks=pytest.mark.long), Failing])
def test_a_chunk_of_a_dead_engine_comes_from_another_with_the_current_weights(
    stream_config: Config, tmp_path: Path, whole_stream: Run, stage: type[StandIn]
) -> None:
    run = started(stream_config, tmp_path, stage)
    with closing(run):
        run.train(1, 3)
        run.finish(3)
        assert (tmp_path / "deaths").read_text() == "x" and len(run.events("start")) == 2
        for iteration in run.iterations:
            for mine, theirs in zip(run.iterations[iteration], whole_stream.iterations[iteration], strict=True):
                assert mine.select(SAME).equals(theirs.select(SAME))
        loads = run.told(VersionLoaded)
        old, new = (
            [load.version for load in loads if (load.engine == loads[0].engine) == own] for own in (True, False)
        )
        assert new == [1, 2], "the new engine loaded what the old one had"
        assert old in ([0], [0, 1]), "it may die before it has said that it loaded a version"


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Hopeless, "was started again and died before it had finished a chunk: .*out of memory"),
        (NeverAgain, "the model's folder is gone"),
    ],
)
def test_an_engine_that_cannot_come_back_ends_the_stream(
    stream_config: Config, tmp_path: Path, stage: type[StandIn], words: str
) -> None:
    run = started(stream_config, tmp_path, stage)
    run.train(1, 1)
    run.publish(1)
    with pytest.raises(Exception, match=f"(?s){words}") as error:
        run.feeds[0].next(2)
    assert not isinstance(error.value, RowsTimeout)
    if stage is Hopeless:
        assert FinalError.__name__ in str(error.value)
    run.abandon()


@pytest.mark.long
def test_an_engine_that_is_killed_at_every_start_holds_the_run_for_a_deadline_at_most(
    stream_config: Config, tmp_path: Path
) -> None:
    run = started(stream_config, tmp_path, KilledAtStart)
    run.train(1, 1)
    run.publish(1)
    for feed in run.feeds:
        feed._blocks._timeout = 15.0
    with pytest.raises(RowsTimeout, match="no rows for iteration 2 within 15 s"):
        run.feeds[0].next(2)
    run.abandon()
