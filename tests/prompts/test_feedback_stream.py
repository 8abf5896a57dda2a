"""Samplers that learn, in the real stream: outcomes are on disk in time, and a resumed run repeats the same choices."""

import shutil
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.store.events import PromptsMade
from pipeline.track.trajectories import discard_trajectories
from tests.streams import BATCH, CHUNK, CHUNKS, Run, changed, closing, training_loader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

LAST, STOP = 12, 7


@pytest.mark.long
def test_solve_rates_reach_the_prompts_and_a_resumed_run_makes_the_same(stream_config: Config, tmp_path: Path) -> None:
    own = changed(stream_config, tmp_path)
    own.data.sampler, own.data.val_files = "solve_rate", None
    schedule = Schedule(LAST, CHUNKS, CHUNK, False, False, -1)
    whole = Run(own, schedule, tmp_path)
    with closing(whole):
        whole.train(1, STOP)
        whole.publish(STOP)
        state = whole.end_of(STOP)
        whole.train(STOP + 1, LAST)
        whole.finish(LAST)
    passed = [event.metrics["prompts/passed_over"] for event in whole.told(PromptsMade)]
    assert passed[-1] > 0

    # The same prompts follow from what was recorded, in a process that never saw the run.
    loader = training_loader(own, str(tmp_path), schedule.feedback_lag)
    expected = [[row["uid"] for row in loader.iteration(number, BATCH)] for number in range(1, LAST + 1)]
    assert [whole.uids(number) for number in range(1, LAST + 1)] == expected

    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "trajectories", folder / "trajectories")
    assert discard_trajectories(str(folder), STOP + 1) == [*range(STOP + 1, LAST + 1)]
    again = Run(changed(own, folder), schedule, folder, STOP, state)
    with closing(again):
        again.train(STOP + 1, LAST)
        again.finish(LAST)
    assert [again.uids(number) for number in range(STOP + 1, LAST + 1)] == expected[STOP:]
