"""Reward settings that cannot be: one sentence each, with the key and what to do."""

from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.bounds import violations
from pipeline.config.reward import OverlongBufferConfig, RateLimitConfig, RepetitionPenaltyConfig, RewardConfig
from pipeline.config.sandbox import SandboxConfig
from pipeline.plan.check_reward import problems
from tests.sentences import Named

OWN = {"own": {"path": "my.module"}}


def config(**settings: Any) -> Config:
    config = Config()
    config.reward = RewardConfig(**settings)
    return config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"functions": {"rule": {}, "own": {"path": "my.module", "weight": -0.5, "batch": True, "timeout_s": 5}}},
        {"rule_kwargs": {"gsm8k": {"method": "strict"}}},
        {"overlong_buffer": OverlongBufferConfig(enable=True, len=512)},
        {"clip": [-1.0, 1.0], "normalize": {"s": [0.5, 2.0]}, "source_scale": {"s": -1.0}},
        {"functions": OWN, "rate_limit": RateLimitConfig(max_concurrent=1)},
    ],
)
def test_settings_that_can_be(settings: dict[str, Any]) -> None:
    assert list(problems(config(**settings))) == []


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"timeout_s": float("inf")}, "reward.timeout_s"),
        ({"functions": {"acc": {}}}, "reward.functions.acc"),
        ({"functions": {"my part": {}}}, "reward.functions.my"),
        ({"functions": {"f": {"weight": 0}}}, "reward.functions.f.weight"),
        ({"functions": {"f": {"weight": float("nan")}}}, "reward.functions.f.weight"),
        ({"functions": {"f": {"timeout_s": 0}}}, "reward.functions.f.timeout_s"),
        ({"functions": {"f": {"batch": True}}}, "reward.functions.f.batch"),
        ({"functions": {"f": {"kwargs": {"a": 1}}}}, "reward.functions.f.kwargs"),
        ({"rule_kwargs": {"gsm9k": {}}}, "reward.rule_kwargs.gsm9k"),
        ({"rule_kwargs": {"gsm8k": {"mode": 1}}}, "reward.rule_kwargs.gsm8k"),
        ({"rule_kwargs": {"countdown": {"mode": 1}}}, "reward.rule_kwargs.countdown"),
        ({"rule_kwargs": {"taco": {}}}, "reward.rule_kwargs.taco"),
        ({"rule_kwargs": {"numina_*": {}}}, "reward.rule_kwargs.numina_"),
        ({"overlong_buffer": OverlongBufferConfig(enable=True)}, "reward.overlong_buffer.len"),
        ({"overlong_buffer": OverlongBufferConfig(True, 513)}, "reward.overlong_buffer.len"),
        ({"overlong_buffer": OverlongBufferConfig(True, 5, -1.0)}, "reward.overlong_buffer.penalty_factor"),
        ({"length_penalty": -1.0}, "reward.length_penalty"),
        ({"repetition_penalty": RepetitionPenaltyConfig(-1.0)}, "reward.repetition_penalty.factor"),
        ({"clip": [1.0, 1.0]}, "reward.clip"),
        ({"clip": [1.0]}, "reward.clip"),
        ({"normalize": {"s": [1.0, 0.0]}}, "reward.normalize.s"),
        ({"normalize": {"s": [1.0]}}, "reward.normalize.s"),
        ({"source_scale": {"s": float("nan")}}, "reward.source_scale.s"),
        ({"rate_limit": RateLimitConfig(max_concurrent=4)}, "reward.rate_limit"),
        (
            {"functions": OWN, "rate_limit": RateLimitConfig(max_per_minute=10)},
            "reward.rate_limit.max_per_minute",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], keys: str, named: Named) -> None:
    made = config(**settings)
    made.data.train_batch_size, made.rollout.n = 128, 8
    (found,) = [*violations(made), *problems(made)]
    named(found, keys)


def test_the_address_of_a_sandbox_is_a_url(named: Named) -> None:
    (found,) = problems(config(sandbox=SandboxConfig(url="localhost:8080")))
    named(found, "reward.sandbox.url=localhost:8080")


def test_one_function_and_several_exclude_each_other(named: Named) -> None:
    both = config(functions=OWN)
    both.reward.custom_reward_function.path = "my.module"
    (found,) = problems(both)
    named(found, "reward.functions reward.custom_reward_function.path")
