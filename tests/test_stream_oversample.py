"""The stream on a real Ray with more groups begun than trained, and a stand-in engine that takes a step a token."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.track.trajectories import read_trajectories
from tests.streams import BATCH, CHUNK, CHUNKS, RANKS, SAMPLES, Answers, Run, StandIn, changed, closing

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

ITERATIONS, PARTIAL = 4, 3


class Uneven(Answers):
    """Long responses take long."""

    SECONDS = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        super().add_request(request_id, prompt, params)
        (completion,) = self._running[-1].outputs
        if len(completion.token_ids) > params.max_tokens:
            completion.token_ids, completion.finish_reason = completion.token_ids[: params.max_tokens], "length"
            completion.logprobs.logprobs = completion.logprobs.logprobs[: params.max_tokens]

    def step(self) -> list[Any]:
        time.sleep(self.SECONDS)
        for one in self._running:
            one.steps = getattr(one, "steps", 0) + 1
        done = [one for one in self._running if one.steps >= self.steps(one.outputs[0].token_ids)]
        self._running = [one for one in self._running if one not in done]
        return done

    def steps(self, tokens: list[int]) -> int:
        """That a response takes."""
        return len(tokens)

    def abort_request(self, request_ids: list[str]) -> None:
        self._running = [one for one in self._running if one.request_id not in request_ids]

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        """It has none."""


class UnevenStandIn(StandIn):
    answers = Uneven


@pytest.fixture(scope="module", params=["drop", "cancel", "carry", "partial"])
def oversampled(
    request: pytest.FixtureRequest, stream_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param)
    config = changed(stream_config, folder)
    config.rollout.oversample, config.rollout.oversample_policy = 0.5, request.param
    if request.param == "carry":
        config.rollout.update, config.algorithm.max_staleness = "in_flight", 1
    if request.param == "partial":
        config.rollout.oversample_policy, config.rollout.partial_tokens = "carry", PARTIAL
        config.algorithm.max_staleness = 1
    run = Run(config, Schedule.of(config, ITERATIONS), folder, stage=UnevenStandIn)
    with closing(run):
        run.train(1, ITERATIONS)
        run.finish(ITERATIONS)
        yield run


def test_every_iteration_has_its_groups_and_none_comes_twice(oversampled: Run) -> None:
    seen: list[str] = []
    for iteration, tables in oversampled.iterations.items():
        assert [len(table) for table in tables] == [BATCH * SAMPLES // RANKS] * RANKS
        uids = oversampled.rows(iteration)["uid"].to_pylist()
        assert {uids.count(uid) for uid in uids} == {SAMPLES} and len(set(uids)) == BATCH
        seen += set(uids)
    assert len(seen) == len(set(seen))


def test_what_was_cut_off_is_told(oversampled: Run) -> None:
    policy, told = oversampled.config.rollout.oversample_policy, oversampled.messages("counted")
    assert [message["iteration"] for message in told].count(1) == CHUNKS
    for message in told:
        own = {name.removeprefix("oversample/"): count for name, count in message["metrics"].items()}
        assert own["begun"] + own["taken_up"] - own["cut_off"] == CHUNK
        assert own["begun"] + own["not_begun"] == CHUNK + 1
        assert own["lost"] == own["cut_off"] or policy != "drop"
    assert (sum(message["metrics"]["oversample/taken_up"] for message in told) > 0) == (policy != "drop")


def test_only_what_is_carried_over_is_older(oversampled: Run) -> None:
    carries = oversampled.config.rollout.oversample_policy == "carry"
    for iteration in range(1, ITERATIONS + 1):
        ages = {iteration - 1 - version for version in oversampled.rows(iteration)["policy_version"].to_pylist()}
        assert ages <= ({0, 1} if carries else {0})


def test_responses_that_are_interrupted_go_on_with_newer_weights(oversampled: Run) -> None:
    partial = oversampled.config.rollout.partial_tokens
    interrupted = sum(message["metrics"]["oversample/interrupted"] for message in oversampled.messages("counted"))
    runs = [
        [(run["version"], run["tokens"]) for run in own]
        for iteration in range(1, ITERATIONS + 1)
        for own in oversampled.rows(iteration)["version_runs"].to_pylist()
    ]
    gone_on = [own for own in runs if len(own) > 1]
    assert bool(interrupted) == bool(gone_on) == bool(partial)
    assert all(tokens % PARTIAL == 0 for own in gone_on for _, tokens in own[:-1])


def test_validations_are_whole(oversampled: Run, prompt_files: Any) -> None:
    for version in (0, ITERATIONS):
        recorded = read_trajectories(str(oversampled.folder), version, "val")
        assert sorted(recorded["uid"].to_pylist()) == sorted(f"val-{i}" for i in range(prompt_files.val_rows))
