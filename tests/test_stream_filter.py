"""Dynamic sampling in a stream on a real Ray: full batches for every rank, whichever groups agree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import FinalError
from pipeline.prompts.stage import Schedule
from pipeline.store.events import PromptsMade
from pipeline.track.trajectories import read_trajectories
from tests.stages import StandIn, UnevenStage
from tests.streams import BATCH, CHUNK, CHUNKS, RANKS, SAMPLES, Run, changed, closing

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

LAST = 3
AGREEMENT = "agreement"
"""File beside the reward function from which on all groups agree; before, nine in ten do."""
REWARD = f"""
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 10 == 7:
        raise ArithmeticError("no score")
    if extra_info["index"] % 10 or Path(__file__).with_name({AGREEMENT!r}).exists():
        return 1.0
    return float(len(solution_str) % 2) + len(solution_str) / 1000
"""
MOST = 20
SAME = ("uid", "chunk", "sample", "iteration", "response_ids", "policy_version", "score", "advantages")


Make = Callable[..., Run]


@pytest.fixture
def make(stream_config: Config, tmp_path: Path) -> Make:
    def build(name: str, last: int = LAST, **more: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        config = changed(stream_config, folder)
        config.algorithm.filter_groups.enable = True
        config.algorithm.filter_groups.max_num_gen_batches = MOST
        config.reward.max_error_rate = 1.0
        reward = folder / "reward.py"
        reward.write_text(REWARD)
        config.reward.custom_reward_function.path = str(reward)
        config.trainer.test_freq = 1
        return Run(config, Schedule.of(config, last), folder, **more)

    return build


def trained(run: Run) -> Run:
    """The run after `LAST` iterations, of whose groups nine in ten were dropped."""
    run.train(1, LAST)
    for iteration in range(1, LAST + 1):
        tables = run.iterations[iteration]
        assert [len(table) for table in tables] == [BATCH * SAMPLES // RANKS] * RANKS
        rows = run.rows(iteration)
        assert set(rows["iteration"].to_pylist()) == {iteration}
        per_chunk = [rows["uid"].slice(i * CHUNK * SAMPLES, CHUNK * SAMPLES) for i in range(CHUNKS)]
        assert [len(uids.unique()) for uids in per_chunk] == [CHUNK] * CHUNKS
        for group in rows.group_by("uid").aggregate([("score", "min"), ("score", "max")]).to_pylist():
            assert group["score_min"] < group["score_max"]
        assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert read_trajectories(str(run.folder), iteration)["uid"].to_pylist() == rows["uid"].to_pylist()
    found = {event.iteration: event.metrics for event in run.told(PromptsMade)}
    assert sorted(found) == list(range(1, LAST + 1))
    for metrics in found.values():
        assert metrics["filter_groups/dropped_ratio"] > 0.8 and metrics["filter_groups/failed"] > 0
    return run


def test_every_batch_is_full_until_all_groups_agree_and_the_stream_ends_with_a_sentence(make: Make) -> None:
    run = trained(make("one", LAST + 1, stage=UnevenStage))
    (run.folder / AGREEMENT).touch()
    run.publish(LAST)
    with pytest.raises(Exception, match=f"max_num_gen_batches={MOST} x data.train_batch_size=8: 100%") as error:
        run.feeds[0].next(LAST + 1)
    assert FinalError.__name__ in str(error.value)
    run.abandon()


@pytest.mark.slow
@pytest.mark.long
def test_batches_are_the_same_whichever_chunk_comes_first(make: Make) -> None:
    runs = []
    for name, stage in (("one", StandIn), ("other", UnevenStage)):
        with closing(trained(make(name, stage=stage))) as run:
            run.finish(LAST)
        runs.append(run)
    for iteration in runs[0].iterations:
        for mine, theirs in zip(runs[0].iterations[iteration], runs[1].iterations[iteration], strict=True):
            assert mine.select(SAME).equals(theirs.select(SAME))
