"""A whole run whose rows are episodes: environments in processes, real engine, real trainer, a tiny policy."""

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from pipeline.rows import ANSWER, flat
from pipeline.track.trajectories import read_trajectories
from tests.runs import BATCH, SAMPLES, Run, replayed, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

TURNS = 3
MARK = str(uuid.uuid4())
"""Value of a variable of the environment's processes."""
ENVIRONMENT = """
from pipeline.agent import Environment, Observation

class Count(Environment):
    def reset(self, row, seed):
        self.index, self.turn = row["extra_info"]["index"], 0
        return "Begin."

    def step(self, message):
        self.turn += 1
        if self.index % 5 == 0 and self.turn == 2:
            raise ValueError("every fifth one fails")
        worth = (len(message.text) + self.index) % 4 / 3
        return Observation(f"so {self.turn}", reward=worth, parts={"length": len(message.text)})
"""


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any, ray_session: None
) -> Callable[..., Run]:
    """Starts a run of two iterations, by its name and further settings."""
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "count.py").write_text(ENVIRONMENT)
    settings = tiny_settings(folder, tiny_model, prompt_files)
    settings = [each for each in settings if not each.startswith(("reward.", "data.max_response_length"))]
    agent = (f"agent.environment={folder / 'count.py'}:Count", f"agent.max_turns={TURNS}", "agent.max_turn_tokens=5")
    agent = (*agent, f"agent.env_vars.MARK={MARK}")
    more = ("data.max_response_length=60", "reward.max_error_rate=0.5", "trainer.max_log_prob_gap=1e-4")
    turns = ("algorithm.adv_estimator=turn_grpo", "algorithm.turn_gamma=0.5")
    begin = starter(settings)
    return lambda name, *own: begin(name, *agent, *more, *turns, "trainer.total_training_steps=2", *own)


@pytest.fixture(scope="module")
def run(start: Callable[..., Run]) -> Run:
    return start("episodes")


def rows_of(run: Run, iteration: int) -> pa.Table:
    return read_trajectories(str(run.folder), iteration)


def test_rows_are_whole_episodes(run: Run) -> None:
    for iteration in (1, 2):
        table = rows_of(run, iteration)
        assert len(table) == BATCH * SAMPLES
        assert set(table["policy_version"].to_pylist()) == {iteration - 1}
        for row in table.to_pylist():
            failed = json.loads(row["extra_info"])["index"] % 5 == 0
            assert (row["turns"], row["ended"]) == ((2, "error") if failed else (TURNS, "turns"))
            rewards = [span["reward"] for span in row["spans"] if span["kind"] == ANSWER]
            if failed:
                assert "every fifth one fails (count.py, line" in row["reward_error"]
                assert row["drop_reason"] == "reward_error" and not any(row["advantages"])
            else:
                assert row["score"] == pytest.approx(sum(rewards)) and row["reward_error"] is None
            mask = row["response_mask"]
            assert [bool(token) for token in row["advantages"]].count(True) <= sum(mask) < len(mask)


def test_every_answer_gets_the_rewards_from_it_on(run: Run) -> None:
    for row in rows_of(run, 1).to_pylist():
        if row["reward_error"] is not None:
            continue
        rewards = [span["reward"] for span in row["spans"] if span["kind"] == ANSWER]
        returns = [sum(reward / 2**later for later, reward in enumerate(rewards[turn:])) for turn in range(TURNS)]
        wanted = [returns.pop(0) if span["kind"] == ANSWER else 0.0 for span in row["spans"]]
        tokens = [value for value, span in zip(wanted, row["spans"], strict=True) for _ in range(span["tokens"])]
        assert row["returns"] == pytest.approx(tokens, abs=1e-6)


def test_trainer_and_engine_agree_on_every_sampled_token(run: Run) -> None:
    for iteration in (1, 2):
        assert run.records[iteration]["training/rollout_log_probs_diff_max"] < 1e-4
    assert abs(run.records[2]["actor/pg_loss"]) > 1e-4, "observations without a mask would not have changed that"


def test_metrics_and_validation(run: Run) -> None:
    record = run.records[2]
    table = rows_of(run, 2)
    turns = table["turns"].to_pylist()
    assert record["agent/turns/mean"] == pytest.approx(sum(turns) / len(turns))
    assert record["agent/stop_reason/error"] == pytest.approx(table["ended"].to_pylist().count("error") / len(table))
    policy = flat(table, "response_mask")[0].sum() / len(table)
    assert record["response_length/mean"] == pytest.approx(policy), "observations are not counted"
    assert any(name.startswith("val-core/") for name in record)


@pytest.mark.long
def test_rows_are_the_same_where_hosts_hold_the_processes(run: Run, start: Callable[..., Run]) -> None:
    hosted = start("hosted", "agent.hosts=2", "agent.host_cpus=0.5")
    columns = ["response_ids", "prompt_ids", "score", "reward_error", "turns", "ended", "env_parts", "advantages"]
    for iteration in (1, 2):
        there, here = (
            rows_of(each, iteration).sort_by([("uid", "ascending"), ("sample", "ascending")]) for each in (hosted, run)
        )
        assert there.select(columns).to_pylist() == here.select(columns).to_pylist()
        assert there.num_rows


@pytest.mark.long
def test_it_replays_without_environments_and_engines(run: Run) -> None:
    again = replayed(run.folder, "again", "trainer.max_log_prob_gap=1e-4")
    for iteration in (1, 2):
        assert again.records[iteration]["actor/pg_loss"] == run.records[iteration]["actor/pg_loss"]


@pytest.mark.long
def test_it_replays_with_a_critic(run: Run) -> None:
    other = replayed(run.folder, "critic", "algorithm.adv_estimator=gae", "trainer.max_log_prob_gap=null")
    for iteration in (1, 2):
        assert other.records[iteration]["critic/score/mean"] == run.records[iteration]["critic/score/mean"]
        assert other.records[iteration]["agent/turns/mean"] == run.records[iteration]["agent/turns/mean"]
        assert other.records[iteration]["critic/grad_norm"] > 0


def test_no_process_of_an_environment_is_left(run: Run) -> None:
    def left() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get("MARK") == MARK]

    # Engines and hosts end with the run, and with them what they have started.
    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()
