"""`trainer.placement` reaches Ray Data, stage by stage."""

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

    def map_batches(self, stage: Any, **options: Any) -> "Recorder":
        name = stage.__name__ if isinstance(stage, type) else type(stage).__name__
        self.selectors[name] = options.get("label_selector")
        return self

    def repartition(self, **options: Any) -> "Recorder":
        return self


def selectors(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    config = load_config(["data.train_files=a.parquet", "model.path=owner/model", *overrides])
    recorder = Recorder()
    monkeypatch.setattr(stream.ray.data, "range", lambda *args, **options: recorder)
    monkeypatch.setattr(stream.ray, "get", lambda *args, **options: 0)
    monkeypatch.setattr(stream.DataContext, "get_current", lambda: SimpleNamespace(execution_options=SimpleNamespace()))
    stream.build(config, Schedule.of(config, 3), MagicMock(), "/runs/none")
    return recorder.selectors


@pytest.mark.parametrize("estimator", ["gae", "optimal_token_baseline"])
def test_each_stage_is_given_its_labels(monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    all_of_them = (f"algorithm.adv_estimator={estimator}", "actor.use_kl_loss=true", "reward.model.path=owner/judge")
    placed = selectors(monkeypatch, *all_of_them, *(f"trainer.placement.{stage}.at={stage}" for stage in STAGES))
    absent = "PolicyScore" if estimator == "gae" else "Value"
    expected = {name: {"at": stage} for stage, names in STAGES.items() for name in names if name != absent}
    assert placed == expected
    assert set(selectors(monkeypatch, *all_of_them).values()) == {None}


def test_rate_limited_rewards_are_placed_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = selectors(monkeypatch, "reward.rate_limit.max_concurrent=2", "trainer.placement.reward.at=cpus")
    assert placed["SingleReward"] == {"at": "cpus"} and placed["Rollout"] is None
