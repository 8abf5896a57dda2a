"""The stream of an evaluation on a real Ray, with an instant engine: chunks, parts, failures, what is left to do."""

import copy
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray

from pipeline.config import Config
from pipeline.evaluate.folder import Folder
from pipeline.evaluate.prepare import Evaluation, prepare
from pipeline.evaluate.run import generate
from pipeline.evaluate.settings import used
from pipeline.rollout.seeds import seed_of
from pipeline.run.driver import sentence
from pipeline.track.console import THROUGHPUT
from pipeline.track.history import REWARD
from tests.stages import Silent, StandIn, answer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("stream_context")]

VERSION, SAMPLES = 6, 3


def settings(stream_config: Config, folder: Path) -> Config:
    """Seven validation prompts in chunks of two, three responses each; the reward fails for prompts 0 and 5."""
    config = copy.deepcopy(stream_config)
    config.rollout.val_kwargs.n, config.rollout.val_kwargs.temperature = SAMPLES, 1.0
    config.trainer.ray_num_cpus = 8
    own = used(config)
    own.trainer.default_local_dir = str(folder)
    return own


@pytest.fixture
def config(stream_config: Config, tmp_path: Path) -> Config:
    return settings(stream_config, tmp_path)


def evaluation(config: Config, out: Path) -> Evaluation:
    made = prepare(config, VERSION, out=out)
    made.folder.begin(made.description)
    return made


def generated(made: Evaluation, stage: type[StandIn] = StandIn) -> list[tuple[int, dict[str, float]]]:
    """Generate what is missing; chunks and figures, each time they are shown."""
    updates: list[tuple[int, dict[str, float]]] = []
    console: Any = SimpleNamespace(update=lambda done, figures: updates.append((done, figures)))
    generate(made, console, stage)
    return updates


def parts(folder: Folder) -> dict[int, list[dict[str, Any]]]:
    return {chunk: pq.read_table(path).to_pylist() for chunk, path in folder.parts().items()}


@pytest.fixture(scope="module")
def whole(stream_config: Config, stream_context: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """All chunks at once."""
    folder = tmp_path_factory.mktemp("whole")
    made = evaluation(settings(stream_config, folder), folder / "out")
    done, figures = generated(made)[-1]
    assert done == 4 and made.summary.prompts == 7
    assert made.tokens_per_s is not None and made.tokens_per_s > 0
    assert figures == {REWARD: made.summary.overall()["mean"], THROUGHPUT: made.tokens_per_s}
    return made


def test_every_prompt_has_its_responses(whole: Evaluation) -> None:
    found = parts(whole.folder)
    assert [len(rows) for rows in found.values()] == [6, 6, 6, 3]
    rows = [row for part in found.values() for row in part]
    assert [(row["uid"], row["sample"]) for row in rows] == [(f"val-{i}", s) for i in range(7) for s in range(SAMPLES)]
    for row in rows:
        seed = seed_of(f"{whole.config.trainer.seed}/{row['uid']}/{row['sample']}")
        assert row["response_ids"] == answer(row["prompt_ids"], -1, seed), "the seeds are those of a run"
        assert (row["reward_error"] is None) == (row["offset"] % 5 != 0)


def test_the_metrics_are_those_of_the_rows(whole: Evaluation) -> None:
    rows = [row for part in parts(whole.folder).values() for row in part]
    scores = np.array([row["score"] for row in rows]).reshape(7, SAMPLES)[[1, 2, 3, 4, 6]]
    overall = whole.summary.overall()
    assert overall["mean"] == pytest.approx(scores.mean()) and overall["pass@3"] == pytest.approx(
        scores.max(axis=1).mean()
    )
    assert overall["error_rate"] == pytest.approx(2 / 7) and "no score for 0" in str(whole.summary.first_error)


@pytest.mark.slow
@pytest.mark.long
def test_missing_chunks_are_added(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    first = evaluation(config, tmp_path / "out")
    for chunk in (0, 2):
        os.link(whole.folder.parts()[chunk], first.folder.responses / f"part-{chunk:06d}.parquet")
    before = first.folder.parts()[2].stat().st_mtime_ns
    again = evaluation(config, tmp_path / "out")
    assert again.pages.done == {0, 2} and again.summary.prompts == 4
    assert generated(again)[-1][0] == 4
    assert again.folder.parts()[2].stat().st_mtime_ns == before
    assert again.summary.overall() == pytest.approx(whole.summary.overall())
    ids = [[row["response_ids"] for row in rows] for rows in parts(again.folder).values()]
    assert ids == [[row["response_ids"] for row in rows] for rows in parts(whole.folder).values()]


@pytest.mark.slow
@pytest.mark.long
def test_prompts_that_are_too_long_are_left_out(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    config.data.max_prompt_length = min(len(row["prompt_ids"]) for row in parts(whole.folder)[0])
    config.data.filter_overlong_prompts = True
    made = evaluation(config, tmp_path / "out")
    generated(made)
    short = [row for part in parts(whole.folder).values() for row in part]
    kept = [row["uid"] for row in short if len(row["prompt_ids"]) <= config.data.max_prompt_length]
    assert [row["uid"] for part in parts(made.folder).values() for row in part] == kept
    assert made.summary.prompts == len(set(kept)) < made.prompts == 7


@pytest.mark.slow
@pytest.mark.long
def test_rate_limited_rewards_give_the_same(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    config.reward.rate_limit.max_concurrent = 2
    made = evaluation(config, tmp_path / "out")
    generated(made)
    assert made.summary.overall() == pytest.approx(whole.summary.overall())


def test_an_engine_that_never_answers_is_named(config: Config, tmp_path: Path, ray_session: None) -> None:
    config.trainer.deadlines.chunk = 1.0
    made = evaluation(config, tmp_path / "out")
    with pytest.raises((ray.exceptions.RayError, TimeoutError)) as caught:
        generated(made, Silent)
    said = sentence(caught.value)
    assert said.startswith("TimeoutError: engine ") and "(trainer.deadlines.chunk)" in said, said
    assert parts(made.folder) == {}


def test_rows_that_never_come_are_named(config: Config, tmp_path: Path, ray_session: None) -> None:
    config.trainer.deadlines.chunk = 10.0
    made = evaluation(config, tmp_path / "out")
    config.trainer.deadlines.rows = 3.0
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no responses within 3 s: 0 of at most 4 chunks .*trainer.deadlines.rows"):
        generated(made, Silent)
    assert time.monotonic() - begun < 60
