"""Placement and pool sizes reach Ray Data, stage by stage."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipeline import stream
from pipeline.config import load_config
from pipeline.prompts.stage import Schedule

STAGES = {
    "prompts": ("Prompts",),
    "rollout": ("Rollout",),
    "reward": ("Reward", "Validation", "Advantage", "Record"),
    "reward_model": ("RewardModelScore",),
    "reference": ("Reference",),
    "value": ("Value",),
    "policy": ("PolicyScore",),
}


class Recorder:
    """Stands in for a data set and keeps what its stages were given."""

    def __init__(self) -> None:
        self.selectors: dict[str, Any] = {}
        self.pools: dict[str, Any] = {}

    def map_batches(self, stage: Any, **options: Any) -> "Recorder":
        name = stage.__name__ if isinstance(stage, type) else type(stage).__name__
        self.selectors[name] = options.get("label_selector")
        self.pools[name] = options.get("compute")
        return self

    def repartition(self, **options: Any) -> "Recorder":
        return self


def recorded(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Recorder:
    files = ["data.train_files=a.parquet", "data.val_files=b.parquet"]
    config = load_config([*files, "model.path=owner/model", *overrides])
    recorder = Recorder()
    monkeypatch.setattr(stream.ray.data, "from_blocks", lambda blocks: recorder)
    monkeypatch.setattr(stream.ray, "get", lambda *args, **options: 0)
    context = SimpleNamespace(execution_options=SimpleNamespace(), custom_execution_callback_classes=[])
    context.set_config = lambda name, value: None
    monkeypatch.setattr(stream.DataContext, "get_current", lambda: context)
    stream.build(config, Schedule.of(config, 3), MagicMock(), "/runs/none")
    return recorder


def selectors(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    return recorded(monkeypatch, *overrides).selectors


@pytest.mark.parametrize("estimator", ["gae", "optimal_token_baseline"])
def test_each_stage_is_given_its_labels(monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    all_of_them = (f"algorithm.adv_estimator={estimator}", "actor.use_kl_loss=true", "reward.model.path=owner/judge")
    placed = selectors(monkeypatch, *all_of_them, *(f"trainer.placement.{stage}.at={stage}" for stage in STAGES))
    absent = "PolicyScore" if estimator == "gae" else "Value"
    expected = {name: {"at": stage} for stage, names in STAGES.items() for name in names if name != absent}
    assert placed == expected
    assert set(selectors(monkeypatch, *all_of_them).values()) == {None}


def test_recorded_rows_are_admitted_before_a_task_waits_for_their_kl_coefficient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kl = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=true")
    replay = ("data.train_files=null", "data.val_files=null", "data.recorded_run=/runs/recorded")
    stages = ["Replay", "Reward", "Reference", "Gate", "Advantage", "Record"]
    assert list(selectors(monkeypatch, *kl, *replay)) == stages
    assert "Gate" not in selectors(monkeypatch, *replay) and "Gate" not in selectors(monkeypatch, *kl)


def test_no_validation_stage_where_nothing_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Validation" in selectors(monkeypatch)
    assert "Validation" not in selectors(monkeypatch, "data.val_files=null")


def test_rate_limited_rewards_are_placed_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = selectors(monkeypatch, "reward.rate_limit.max_concurrent=2", "trainer.placement.reward.at=cpus")
    assert placed["SingleReward"] == {"at": "cpus"} and placed["Rollout"] is None


def test_an_elastic_pool_has_two_sizes_and_a_gate_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = recorded(monkeypatch, "rollout.num_engines=2", "rollout.min_engines=1", "rollout.max_engines=5").pools
    engines = pools["Rollout"]
    assert (engines.min_size, engines.initial_size, engines.max_size) == (1, 2, 5)
    # The next iteration's chunks wait at the gate, all of them.
    assert pools["Gate"].max_concurrent_calls_per_actor == 64 and list(pools).index("Gate") == 1
    fixed = recorded(monkeypatch, "rollout.num_engines=2").pools
    assert "Gate" not in fixed and fixed["Rollout"].min_size == fixed["Rollout"].max_size == 2
