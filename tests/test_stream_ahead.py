"""A stream on a real Ray, resumed and in pages of several iterations, whose engines generate ahead of training.

The engine is an instant stand-in, the trainer's side is played by the test.
"""

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.store.events import ValidationAnnounced
from pipeline.track.trajectories import read_trajectories
from tests.stages import Paged
from tests.streams import BATCH, CHUNK, CHUNKS, Run, changed, closing, expected_prompts, training_loader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

BASE, LAST, TEST_FREQ, STALENESS = 4, 10, 3, 2
HOLD_S = 1.5
VALIDATED = (6, 9, 10)


@pytest.fixture(scope="module")
def ahead(stream_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ahead")
    config = changed(stream_config, folder)
    config.algorithm.max_staleness = STALENESS
    loader = training_loader(config)
    loader.iteration(1, BATCH * BASE)
    schedule = Paged(LAST, CHUNKS, CHUNK, True, True, TEST_FREQ, STALENESS)
    assert schedule.pages == 6
    run = Run(config, schedule, folder, BASE, loader.cursor)
    with closing(run):
        run.train(BASE + 1, BASE + 1)
        # The trainer thinks about the next version for a while after all that may happen before it.
        run.wait(lambda: sum(e["split"] == "train" for e in run.events("admitted")) >= (1 + STALENESS) * CHUNKS)
        time.sleep(HOLD_S)
        run.held = {"admitted": {(event["split"], event["iteration"]) for event in run.events("admitted")}}
        run.train(BASE + 2, LAST)
        run.finish(LAST)
        yield run


def test_prompts_go_on_behind_the_checkpoint(ahead: Run) -> None:
    seen = [ahead.uids(iteration) for iteration in range(BASE + 1, LAST + 1)]
    assert seen == expected_prompts(ahead.config, LAST)[BASE:]


def test_engines_go_ahead_as_far_as_they_may_and_no_further(ahead: Run) -> None:
    first = range(BASE + 1, BASE + 2 + STALENESS)
    # The version it began with was validated before the interruption.
    assert ahead.held["admitted"] == {("train", iteration) for iteration in first}
    # What was generated meanwhile is that much older when it trains.
    for iteration in first:
        assert set(ahead.rows(iteration)["policy_version"].to_pylist()) == {BASE}


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
