"""The stream of an evaluation on a real Ray, with an instant engine: chunks, parts, failures, what is left to do."""

import copy
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray

from pipeline.config import Config
from pipeline.evaluate.folder import Folder
from pipeline.evaluate.prepare import Evaluation, prepare
from pipeline.evaluate.rollout import EvaluationRollout
from pipeline.evaluate.run import Speed, generate
from pipeline.evaluate.settings import used
from pipeline.rollout import vllm
from pipeline.train.run import sentence
from tests.streams import Answers, answer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("stream_context")]

VERSION, SAMPLES = 6, 3


class Instant(EvaluationRollout):
    """The rollout stage with `Answers` for its engine, which notes where it ran."""

    def __init__(self, config: Config, version: int) -> None:
        # This is the only stage in its process, which is spared the seconds that the import of vLLM takes.
        kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
        modules: Any = {"vllm": SimpleNamespace(SamplingParams=SimpleNamespace), "vllm.sampling_params": kinds}
        sys.modules.update(modules)
        with patch.object(vllm, "build", lambda *args: self.started()):
            super().__init__(config, version)

    def started(self) -> Answers:
        return Answers()


class Silent(Instant):
    """An engine that never answers."""

    def started(self) -> Answers:
        engine = Answers()
        engine.step = lambda: time.sleep(0.05) or []  # type: ignore[method-assign]
        return engine


@pytest.fixture
def config(stream_config: Config) -> Config:
    """Seven validation prompts in chunks of two, three responses each; the reward fails for prompts 0 and 5."""
    own = copy.deepcopy(stream_config)
    own.rollout.val_kwargs.n, own.rollout.val_kwargs.temperature = SAMPLES, 1.0
    own.trainer.ray_num_cpus = 8
    return used(own)


def evaluation(config: Config, out: Path) -> Evaluation:
    made = prepare(config, VERSION, out=out)
    made.folder.begin(made.description)
    return made


def parts(folder: Folder) -> dict[int, list[dict[str, Any]]]:
    return {chunk: pq.read_table(path).to_pylist() for chunk, path in folder.parts().items()}


@pytest.fixture(scope="module")
def whole(stream_config: Config, stream_context: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """All chunks at once."""
    own = copy.deepcopy(stream_config)
    own.rollout.val_kwargs.n, own.rollout.val_kwargs.temperature = SAMPLES, 1.0
    own.trainer.ray_num_cpus = 8
    made = evaluation(used(own), tmp_path_factory.mktemp("whole") / "out")
    seen: list[int] = []
    speed = Speed()
    generate(made, speed, lambda: seen.append(made.summary.prompts), Instant)
    assert seen == [2, 4, 6, 7]
    assert speed.tokens == made.summary.tokens and speed.tokens_per_s is not None and speed.tokens_per_s > 0
    return made


def test_every_prompt_has_its_responses(whole: Evaluation) -> None:
    found = parts(whole.folder)
    assert [len(rows) for rows in found.values()] == [6, 6, 6, 3]
    rows = [row for part in found.values() for row in part]
    assert [(row["uid"], row["sample"]) for row in rows] == [(f"val-{i}", s) for i in range(7) for s in range(SAMPLES)]
    for row in rows:
        seed = vllm.seed_of(f"{whole.config.trainer.seed}/{row['uid']}/{row['sample']}")
        assert row["response_ids"] == answer(row["prompt_ids"], VERSION, seed), "the seeds are those of a run"
        assert (row["reward_error"] is None) == (row["offset"] % 5 != 0)


def test_the_metrics_are_those_of_the_rows(whole: Evaluation) -> None:
    rows = [row for part in parts(whole.folder).values() for row in part]
    scores = np.array([row["score"] for row in rows]).reshape(7, SAMPLES)[[1, 2, 3, 4, 6]]
    overall = whole.summary.overall()
    assert overall["mean"] == pytest.approx(scores.mean()) and overall["pass@3"] == pytest.approx(
        scores.max(axis=1).mean()
    )
    assert overall["error_rate"] == pytest.approx(2 / 7) and "no score for 0" in str(whole.summary.first_error)


def test_missing_chunks_are_added(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    first = evaluation(config, tmp_path / "out")
    for chunk in (0, 2):
        os.link(whole.folder.parts()[chunk], first.folder.responses / f"part-{chunk:06d}.parquet")
    before = first.folder.parts()[2].stat().st_mtime_ns
    again = evaluation(config, tmp_path / "out")
    assert again.pages.done == {0, 2} and again.summary.prompts == 4
    seen: list[int] = []
    generate(again, Speed(), lambda: seen.append(again.summary.prompts), Instant)
    assert seen == [6, 7]
    assert again.folder.parts()[2].stat().st_mtime_ns == before
    assert again.summary.overall() == pytest.approx(whole.summary.overall())
    ids = [[row["response_ids"] for row in rows] for rows in parts(again.folder).values()]
    assert ids == [[row["response_ids"] for row in rows] for rows in parts(whole.folder).values()]


def test_prompts_that_are_too_long_are_left_out(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    config.data.max_prompt_length = min(len(row["prompt_ids"]) for row in parts(whole.folder)[0])
    config.data.filter_overlong_prompts = True
    made = evaluation(config, tmp_path / "out")
    generate(made, Speed(), lambda: None, Instant)
    short = [row for part in parts(whole.folder).values() for row in part]
    kept = [row["uid"] for row in short if len(row["prompt_ids"]) <= config.data.max_prompt_length]
    assert [row["uid"] for part in parts(made.folder).values() for row in part] == kept
    assert made.summary.prompts == len(set(kept)) < made.prompts == 7


def test_rate_limited_rewards_give_the_same(whole: Evaluation, config: Config, tmp_path: Path) -> None:
    config.reward.rate_limit.max_concurrent = 2
    made = evaluation(config, tmp_path / "out")
    generate(made, Speed(), lambda: None, Instant)
    assert made.summary.overall() == pytest.approx(whole.summary.overall())


def test_an_engine_that_never_answers_is_named(config: Config, tmp_path: Path, ray_session: None) -> None:
    config.trainer.deadlines.chunk = 1.0
    made = evaluation(config, tmp_path / "out")
    with pytest.raises((ray.exceptions.RayError, TimeoutError)) as caught:
        generate(made, Speed(), lambda: None, Silent)
    said = sentence(caught.value)
    assert said.startswith("TimeoutError: engine ") and "(trainer.deadlines.chunk)" in said, said
    assert parts(made.folder) == {}


def test_rows_that_never_come_are_named(config: Config, tmp_path: Path, ray_session: None) -> None:
    config.trainer.deadlines.chunk = 10.0
    made = evaluation(config, tmp_path / "out")
    config.trainer.deadlines.rows = 3.0
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no responses within 3 s: 0 of at most 4 chunks .*trainer.deadlines.rows"):
        generate(made, Speed(), lambda: None, Silent)
    assert time.monotonic() - begun < 60
