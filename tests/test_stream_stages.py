"""The optional stages in a stream: baselines, reference, value and policy scores, each between its real neighbours.

Two streams are run. One has every stage there is, on a cluster with hardly more CPUs than these hold, and an estimator
that reads all they write; its trainer publishes other weights with every version. The other is that of ReMax, and ends
with the epochs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import Config
from pipeline.models.policy import Policy
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.value import ValueModel
from pipeline.prompts.stage import Schedule
from pipeline.rows import (
    AGENT,
    BASELINE,
    IMAGES,
    POLICY,
    REFERENCE,
    REWARD_MODEL,
    SCHEMA,
    TEACHER,
    TEACHER_TOP,
    VALUE,
    flat,
)
from pipeline.store.events import PromptsMade, ValidationAnnounced, ValidationScored
from pipeline.store.policy_store import PolicyStore
from pipeline.track.trajectories import read_trajectories
from pipeline.weights.load import Shard
from pipeline.weights.publish import pack, parts
from tests.scoring.generated import assert_near
from tests.scoring.test_policy import sums, variant
from tests.scoring.test_reference import chosen
from tests.scoring.test_value import expected as values_of
from tests.scoring.test_value import trained
from tests.stages import answer
from tests.streams import BATCH, CHUNK, CHUNKS, RANKS, SAMPLES, Run, changed, closing, expected_prompts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

ITERATIONS = 3
TEMPERATURE = 0.7
BUCKET = 20_000
TRAINER_CPUS = 2
OPTIONAL = {*BASELINE.names, *REFERENCE.names, *VALUE.names, *POLICY.names}
ABSENT = {*REWARD_MODEL.names, *AGENT.names, *IMAGES.names, *TEACHER.names, *TEACHER_TOP.names}
"""Of stages that neither stream has, of episodes, and of images."""


class Published:
    """Weights of every version: those the run begins with, then others each time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.policies = [model, *(variant(model, folder / str(version), version) for version in (1, 2, 3))]
        beginning = ValueModel(AutoModelForCausalLM.from_pretrained(model))
        self.critics = [beginning, *(trained(model, version) for version in (1, 2, 3))]

    def __call__(self, version: int) -> dict[str, Shard]:
        policy = Policy(AutoModelForCausalLM.from_pretrained(self.policies[version]))
        return {
            "policy": pack(parts(policy, 0, torch.float32, Policy.hf_name), 0, BUCKET, ray.put),
            "critic": pack(parts(self.critics[version], 0, torch.float32), 0, BUCKET, ray.put),
        }


def kl_coef(version: int) -> float:
    return 0.5 + version


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tiny_model, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def occupied(stream_context: None) -> Iterator[None]:
    """The CPUs that train workers would hold."""

    @ray.remote(num_cpus=TRAINER_CPUS)
    class Trainer:
        def ready(self) -> None:
            pass

    trainer = Trainer.remote()
    ray.get(trainer.ready.remote(), timeout=60)
    yield
    ray.kill(trainer)


@pytest.fixture(scope="module")
def full(
    occupied: None, published: Published, stream_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("full")
    config = changed(stream_config, folder)
    config.algorithm.adv_estimator = "tests.stages:everything"
    config.algorithm.use_kl_in_reward = True
    config.rollout.temperature = TEMPERATURE
    config.rollout.num_cpus = config.reward.num_cpus = 1
    schedule = Schedule(ITERATIONS, CHUNKS, CHUNK, True, True, 1)
    run = Run(config, schedule, folder, weights=published, kl_coef=kl_coef)
    with closing(run):
        run.train(1, ITERATIONS)
        run.finish(ITERATIONS)
        yield run


@pytest.fixture(scope="module")
def remax(stream_config: Config, prompt_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Footers promise five iterations; a quarter of the prompts is too long, so three come."""
    folder = tmp_path_factory.mktemp("remax")
    table = pq.read_table(prompt_files.train).to_pylist()
    for row in table[::4]:
        row["prompt"][0]["content"] *= 9
    long = folder / "long.parquet"
    pq.write_table(pa.Table.from_pylist(table, pq.read_schema(prompt_files.train)), long)
    config = changed(stream_config, folder)
    config.algorithm.adv_estimator = "remax"
    config.data.train_files, config.data.filter_overlong_prompts = str(long), True
    config.trainer.total_training_steps, config.trainer.total_epochs = None, 1
    run = Run(config, Schedule(5, CHUNKS, CHUNK, True, False, -1), folder)
    with closing(run):
        run.train(1, ITERATIONS)
        run.publish(ITERATIONS)
        run.held = {"next": [feed.next(ITERATIONS + 1) for feed in run.feeds]}
        yield run


def fine(run: Run, iteration: int) -> pa.Table:
    """The rows whose reward did not fail."""
    rows = run.rows(iteration)
    return rows.filter(pc.is_null(rows["reward_error"]))


def test_every_stage_finds_its_cpus(full: Run, prompt_files: Any) -> None:
    """The run is over, then: with CPUs set aside stage by stage the last ones would never get any."""
    for iteration in range(1, ITERATIONS + 1):
        first = (iteration - 1) * CHUNKS
        for rank, table in enumerate(full.iterations[iteration]):
            chunks = [first + rank + RANKS * i for i in range(CHUNKS // RANKS)]
            assert table["chunk"].to_pylist() == [chunk for chunk in chunks for _ in range(CHUNK * SAMPLES)]
            assert table.schema.names == [name for name in SCHEMA.names if name not in ABSENT]
    assert [full.uids(iteration) for iteration in range(1, ITERATIONS + 1)] == expected_prompts(full.config, ITERATIONS)
    for version in range(ITERATIONS + 1):
        validated = read_trajectories(str(full.folder), version, "val")
        assert len(validated) == prompt_files.val_rows and not (OPTIONAL | ABSENT) & set(validated.column_names)


@pytest.mark.parametrize("name", ["full", "remax"])
def test_each_row_carries_the_score_of_its_prompts_greedy_response(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    tokenizer, baselines = load_tokenizer(run.config.model), []
    for iteration in range(1, ITERATIONS + 1):
        for row in run.rows(iteration).to_pylist():
            greedy = tokenizer.decode(answer(row["prompt_ids"], iteration - 1, None), skip_special_tokens=True)
            failed = json.loads(row["extra_info"])["index"] % 5 == 0
            assert row["baseline"] == (None if failed else len(greedy) % 3)
            assert row["score"] == (0 if failed else len(row["response"]) % 3)
            assert failed == (row["reward_error"] is not None)
            baselines.append((row["baseline"], row["score"]))
    assert len(set(baselines)) > 6, "scores and baselines differ"


@pytest.mark.parametrize("name", ["full", "remax"])
def test_greedy_responses_leave_before_the_trainer(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    for iteration in range(1, ITERATIONS + 1):
        for rows in (run.rows(iteration), read_trajectories(str(run.folder), iteration)):
            assert set(rows["split"].to_pylist()) == {"train"}
            assert rows["sample"].to_pylist() == list(range(SAMPLES)) * BATCH
            assert set(rows["policy_version"].to_pylist()) == {iteration - 1}


def test_remax_has_no_other_stage_than_it_reads(remax: Run) -> None:
    for iteration in range(1, ITERATIONS + 1):
        rows = remax.rows(iteration)
        assert (OPTIONAL | ABSENT) & set(rows.column_names) == {"baseline"}
        for row in fine(remax, iteration).to_pylist():
            assert row["advantages"] == [row["score"] - row["baseline"]] * len(row["response_ids"])


def test_the_stream_ends_with_the_epochs_and_validates_the_last_version(remax: Run, prompt_files: Any) -> None:
    assert remax.held["next"] == [None, None]
    assert remax.store.call(PolicyStore.last_version) == ITERATIONS
    assert [event.version for event in remax.told(ValidationAnnounced)] == [ITERATIONS]
    assert sum(len(scored.prompts) for scored in remax.told(ValidationScored)) == prompt_files.val_rows
    counts = [event.metrics["prompts/filtered_overlong"] for event in remax.told(PromptsMade)]
    assert counts == sorted(counts) and 0 < counts[-1] <= 10
    seen = [uid for iteration in range(1, ITERATIONS + 1) for uid in remax.uids(iteration)]
    assert len(set(seen)) == ITERATIONS * BATCH


def test_ref_log_probs_are_those_of_the_model_before_training(full: Run, tiny_model: Path) -> None:
    for iteration in range(1, ITERATIONS + 1):
        rows = full.rows(iteration)
        assert_near(rows["ref_log_probs"], chosen(tiny_model, rows, TEMPERATURE))


def test_values_are_those_of_the_critic_of_the_rows_version(full: Run, published: Published) -> None:
    assert set(flat(full.rows(1), "values")[0]) == {0.0}, "the head starts at 0"
    for iteration in range(1, ITERATIONS + 1):
        rows = full.rows(iteration)
        assert set(rows["value_version"].to_pylist()) == {iteration - 1}
        assert_near(rows["values"], values_of(published.critics[iteration - 1], rows))


def test_sums_are_those_of_the_policy_of_the_rows_version(full: Run, published: Published) -> None:
    for iteration in range(1, ITERATIONS + 1):
        rows = full.rows(iteration)
        assert set(rows["pi_version"].to_pylist()) == {iteration - 1}
        assert_near(rows["sum_pi_squared"], sums(published.policies[iteration - 1], rows, TEMPERATURE))


def test_rewards_pay_the_kl_with_the_coefficient_of_the_rows_version(full: Run) -> None:
    for iteration in range(1, ITERATIONS + 1):
        assert set(full.rows(iteration)["kl_coef"].to_pylist()) == {kl_coef(iteration - 1)}
        for row in fine(full, iteration).to_pylist():
            kl = np.array(row["rollout_log_probs"]) - row["ref_log_probs"]
            assert row["kl"] == pytest.approx(kl.mean(), rel=1e-5)
            assert row["reward"] == pytest.approx(row["score"] - kl_coef(iteration - 1) * kl.sum(), rel=1e-5)


def test_the_estimator_reads_the_whole_iteration_with_all_columns(full: Run) -> None:
    for iteration in range(1, ITERATIONS + 1):
        rows = fine(full, iteration)
        mean = rows["reward"].to_numpy().astype(np.float64).mean()
        for row in rows.to_pylist():
            want = mean - row["baseline"] + np.array(row["values"])
            assert row["advantages"] == pytest.approx(want.tolist(), rel=1e-4, abs=1e-4)
            assert row["returns"] == pytest.approx(row["sum_pi_squared"], rel=1e-5)
