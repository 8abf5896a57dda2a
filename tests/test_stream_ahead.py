"""The stream on a real Ray while engines generate ahead of training, with an instant stand-in for the engine."""

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.store.events import ValidationAnnounced
from pipeline.track.trajectories import read_trajectories
from tests.streams import CHUNK, CHUNKS, Run, changed, closing

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

ITERATIONS, TEST_FREQ, STALENESS = 9, 3, 2
HOLD_S = 1.5
VALIDATED = (0, 3, 6, 9)


@pytest.fixture(scope="module")
def ahead(stream_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ahead")
    config = changed(stream_config, folder)
    config.algorithm.max_staleness = STALENESS
    run = Run(config, Schedule(ITERATIONS, CHUNKS, CHUNK, True, True, TEST_FREQ, STALENESS), folder)
    with closing(run):
        run.train(1, 1)
        # The trainer thinks about version 1 for a while after all that may happen before it.
        run.wait(lambda: sum(e["split"] == "train" for e in run.events("admitted")) >= (1 + STALENESS) * CHUNKS)
        time.sleep(HOLD_S)
        run.held = {(event["split"], event["iteration"]) for event in run.events("admitted")}  # type: ignore[attr-defined]
        run.train(2, ITERATIONS)
        run.finish(ITERATIONS)
        yield run


def test_engines_go_ahead_as_far_as_they_may_and_no_further(ahead: Run) -> None:
    held: Any = ahead.held  # type: ignore[attr-defined]
    assert held == {("val", 0), *(("train", iteration) for iteration in range(1, 2 + STALENESS))}
    # What was generated meanwhile is that much older when it trains.
    for iteration in range(1, 2 + STALENESS):
        assert set(ahead.rows(iteration)["policy_version"].to_pylist()) == {0}


def test_no_row_is_older_than_the_bound(ahead: Run) -> None:
    for iteration, tables in ahead.iterations.items():
        versions = pa.concat_tables(tables)["policy_version"].to_pylist()
        assert all(iteration - 1 - STALENESS <= version <= iteration - 1 for version in versions)
    for event in ahead.events("admitted"):
        assert event["time"] >= ahead.published[event["version"]]


def test_every_validation_is_of_the_version_it_names(ahead: Run, prompt_files: Any) -> None:
    prompts = sorted(f"val-{i}" for i in range(prompt_files.val_rows))
    assert [event.version for event in ahead.told(ValidationAnnounced)] == list(VALIDATED)
    for version in VALIDATED:
        recorded = read_trajectories(str(ahead.folder), version, "val")
        assert sorted(recorded["uid"].to_pylist()) == prompts
        assert set(recorded["policy_version"].to_pylist()) == {version}
    # No engine is given a newer version before.
    admitted = ahead.events("admitted")
    for version in VALIDATED:
        last = max(event["time"] for event in admitted if (event["split"], event["iteration"]) == ("val", version))
        assert all(event["time"] >= last for event in admitted if event["version"] > version)
