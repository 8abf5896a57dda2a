"""Recorded episodes are scored and estimated again, without their environment."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.advantage.baseline import Baseline
from pipeline.advantage.stage import Advantage
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.reward import RewardConfig
from pipeline.dynamic_sampling.filter import judge
from pipeline.prompts.stage import Schedule
from pipeline.replay.stage import Replay
from pipeline.reward.stage import Reward
from pipeline.rows import ADVANTAGE, AGENT, PROMPT, REWARD, ROLLOUT
from pipeline.stats import reduce
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from pipeline.track.metrics import iteration_metrics
from pipeline.track.trajectories import Record
from pipeline.weights.load import Shard
from tests.recordings import BATCH, CHUNK, CHUNKS, SAMPLES, recorded_row
from tests.replay.test_stage import Config, Store
from tests.reward.rewards import custom

MASK = [1, 1, 0, 0, 0, 1]


def played() -> pa.Table:
    """What the rollout stage makes of an iteration: two answers with a reward each; one environment failed."""
    rows: list[dict[str, Any]] = []
    draw = np.random.default_rng(3)
    for group in range(BATCH):
        for sample in range(SAMPLES):
            rewards = draw.integers(-2, 3, 2).tolist()
            failed = (group, sample) == (1, 2)
            spans = [(1, 2, rewards[0]), (0, 3, None), (1, 1, rewards[1])]
            row = recorded_row(group, sample, group // CHUNK, 1) | {
                "response_ids": [5] * len(MASK),
                "response_mask": MASK,
                "rollout_log_probs": [-1.0] * len(MASK),
                "version_runs": [{"version": 0, "tokens": len(MASK)}],
                "spans": [dict(zip(("kind", "tokens", "reward"), span, strict=True)) for span in spans],
                "messages": json.dumps([{"role": "assistant", "content": "x"}] * 3),
                "env_score": 0.0 if failed else float(sum(rewards)),
                "env_parts": json.dumps({"acc": sample}),
                "env_error": "ValueError: boom" if failed else None,
                "turns": 2,
                "ended": "error" if failed else "done",
                "episode": json.dumps({"calls": {}, "episode_s": 1.0, "env_s": 0.5}),
            }
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=pa.schema([*PROMPT, *ROLLOUT, *AGENT]))


def estimated(
    rows: pa.Table, estimator: str, scored_by: str = "environment", reward: RewardConfig | None = None
) -> Any:
    scored = Reward(reward or RewardConfig(), scored_by=scored_by)(rows)
    return Advantage(AlgorithmConfig(adv_estimator=estimator), turn_rewards=scored_by != "function")(scored)


@pytest.fixture
def replayed(tmp_path: Path) -> pa.Table:
    """The rows of a replay of `played`, which was trained on with `grpo`."""
    made = estimated(played(), "grpo")
    for chunk in range(CHUNKS):
        Record(str(tmp_path))(made.slice(chunk * CHUNK * SAMPLES, CHUNK * SAMPLES))
    config = Config()
    config.data.recorded_run = str(tmp_path)
    store = Store(Admission(CHUNK, BATCH, 0), 0, PromptCursor())
    store.call(PolicyStore.publish, 0, {"policy": Shard(0, [], [], [])}, 0.0)
    schedule = Schedule(1, CHUNKS, CHUNK, False, False, -1, 0)
    stage = Replay(config.data, False, True, False, schedule, store, config.trainer.deadlines)  # type: ignore[arg-type]
    return stage(pa.table({"id": [0]}))


def test_the_same_settings_give_the_same(replayed: pa.Table) -> None:
    was, now = estimated(played(), "grpo"), estimated(replayed, "grpo")
    for name in ("score", "reward_parts", "reward_error", *ADVANTAGE.names):
        assert now[name] == was[name], name
    assert now["reward_error"].drop_null().to_pylist() == ["environment: ValueError: boom"]
    metrics = reduce([iteration_metrics(now)])
    assert metrics["agent/turns/mean"] == 2 and metrics["response_length/mean"] == 3
    assert metrics["reward/acc/mean"] == np.mean([0, 1, 2] * BATCH, where=np.arange(12) != 5)


def test_another_estimator_and_another_reward(replayed: pa.Table, tmp_path: Path) -> None:
    by_turn = estimated(replayed, "turn_grpo")
    assert by_turn.select(ADVANTAGE.names).equals(estimated(played(), "turn_grpo").select(ADVANTAGE.names))
    # Turns differ from each other; in GRPO all tokens of a row are alike.
    own = [[a for a, m in zip(row, MASK, strict=True) if m] for row in by_turn["advantages"].to_pylist()]
    assert any(first != last for first, _, last in own)
    source = "def compute_score(extra_info, turns, messages, **row): return extra_info['index'] + turns + len(messages)"
    function = estimated(replayed, "turn_grpo", "function", custom(tmp_path, source))
    assert function["score"].to_pylist()[:6] == [5.0] * 3 + [6.0] * 2 + [0.0]
    both = estimated(replayed, "grpo", "sum", custom(tmp_path, source))
    scores = np.array(function["score"].to_pylist()) + np.array(replayed["env_score"].to_pylist())
    assert both["score"].to_pylist() == scores.tolist()


def test_stages_between_keep_the_columns_of_episodes() -> None:
    scored = Reward(RewardConfig(), scored_by="environment")(played())
    is_greedy = pa.array((["train"] * (SAMPLES - 1) + ["baseline"]) * BATCH)
    mixed = scored.set_column(scored.column_names.index("split"), scored.schema.field("split"), is_greedy)
    kept = Baseline()(mixed)
    assert kept.column_names == [*PROMPT.names, *ROLLOUT.names, *AGENT.names, *REWARD.names, "baseline"]
    places = [row for row in range(len(scored)) if row % SAMPLES < SAMPLES - 1]
    assert kept.select(AGENT.names).equals(scored.select(AGENT.names).take(places))
    assert kept["baseline"].null_count == SAMPLES - 1
    # ReMax's greedy episode is scored by its environment like any other.
    assert kept["baseline"][0].as_py() == scored["score"][SAMPLES - 1].as_py()
    _, found = judge(scored, "acc")
    assert found.kept == list(range(BATCH)) and found.errors == 1
