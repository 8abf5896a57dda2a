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
from tests.stages import UnevenStage
from tests.streams import BATCH, CHUNK, CHUNKS, RANKS, SAMPLES, Run, changed, closing

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

LAST = 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 10 == 7:
        raise ArithmeticError("no score")
    if {agrees}:
        return 1.0
    return float(len(solution_str) % 2) + len(solution_str) / 1000
"""
MOST = 20
SAME = ("uid", "chunk", "sample", "iteration", "response_ids", "policy_version", "score", "advantages")


Make = Callable[..., Run]


@pytest.fixture
def make(stream_config: Config, tmp_path: Path) -> Make:
    def build(name: str, agrees: str = "False", last: int = LAST, **more: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        config = changed(stream_config, folder)
        config.algorithm.filter_groups.enable = True
        config.algorithm.filter_groups.max_num_gen_batches = MOST
        config.reward.max_error_rate = 1.0
        config.algorithm.max_staleness = more.pop("staleness", 0)
        reward = folder / "reward.py"
        reward.write_text(REWARD.format(agrees=agrees))
        config.reward.custom_reward_function.path = str(reward)
        for key, value in more.pop("groups", {}).items():
            setattr(config.algorithm.filter_groups, key, value)
        config.trainer.test_freq = 1
        return Run(config, Schedule.of(config, last), folder, **more)

    return build


def check(run: Run, last: int = LAST) -> None:
    for iteration in range(1, last + 1):
        tables = run.iterations[iteration]
        assert [len(table) for table in tables] == [BATCH * SAMPLES // RANKS] * RANKS
        rows = run.rows(iteration)
        assert set(rows["iteration"].to_pylist()) == {iteration}
        per_chunk = [rows["uid"].slice(i * CHUNK * SAMPLES, CHUNK * SAMPLES) for i in range(CHUNKS)]
        assert [len(uids.unique()) for uids in per_chunk] == [CHUNK] * CHUNKS
        for group in rows.group_by("uid").aggregate([("score", "min"), ("score", "max")]).to_pylist():
            assert group["score_min"] < group["score_max"]
        staleness = {iteration - 1 - version for version in rows["policy_version"].to_pylist()}
        assert staleness <= set(range(run.config.algorithm.max_staleness + 1))
        assert read_trajectories(str(run.folder), iteration)["uid"].to_pylist() == rows["uid"].to_pylist()


def counted(run: Run) -> list[dict[str, Any]]:
    found = {event.iteration: event.metrics for event in run.told(PromptsMade)}
    return [found[iteration] for iteration in sorted(found)]


def ninety_percent(make: Make, name: str, **more: Any) -> Run:
    """A run of which nine groups in ten are dropped."""
    run = make(name, agrees="extra_info['index'] % 10", **more)
    with closing(run):
        run.train(1, LAST)
        run.finish(LAST)
    check(run)
    assert all(metrics["filter_groups/dropped_ratio"] > 0.8 for metrics in counted(run))
    assert all(metrics["filter_groups/failed"] > 0 for metrics in counted(run))
    return run


def test_ninety_percent_dropped_and_every_batch_is_full(make: Make) -> None:
    ninety_percent(make, "one", stage=UnevenStage)


@pytest.mark.slow
@pytest.mark.long
def test_batches_are_the_same_whichever_chunk_comes_first(make: Make) -> None:
    runs = [ninety_percent(make, "one"), ninety_percent(make, "other", stage=UnevenStage)]
    for iteration in runs[0].iterations:
        for mine, theirs in zip(runs[0].iterations[iteration], runs[1].iterations[iteration], strict=True):
            assert mine.select(SAME).equals(theirs.select(SAME))


def test_when_every_group_agrees_the_stream_ends_with_a_sentence(make: Make) -> None:
    run = make("all", agrees="True", groups={"max_num_gen_batches": 2})
    run.publish(0)
    with pytest.raises(Exception, match="max_num_gen_batches=2 x data.train_batch_size=8: 100%") as error:
        run.feeds[0].next(1)
    assert FinalError.__name__ in str(error.value)
    run.abandon()
