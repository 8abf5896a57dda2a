"""Reward settings that cannot be: one sentence each, with the key and what to do."""

from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.bounds import violations
from pipeline.config.reward import OverlongBufferConfig, RateLimitConfig, RepetitionPenaltyConfig, RewardConfig
from pipeline.config.sandbox import SandboxConfig
from pipeline.plan.check_reward import problems

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
    ("settings", "message"),
    [
        ({"timeout_s": float("inf")}, "reward.timeout_s=inf must be a finite number"),
        ({"functions": {"acc": {}}}, "none of score, acc, pred"),
        ({"functions": {"my part": {}}}, "letters, digits and _"),
        ({"functions": {"f": {"wieght": 1}}}, "there is no key reward.functions.f.wieght"),
        ({"functions": {"f": {"weight": 0}}}, "reward.functions.f.weight=0 must be a number other than 0"),
        ({"functions": {"f": {"weight": float("nan")}}}, "reward.functions.f.weight=nan"),
        ({"functions": {"f": {"timeout_s": 0}}}, "reward.functions.f.timeout_s=0 must be above 0"),
        ({"functions": {"f": {"batch": True}}}, "reward.functions.f.batch is set and reward.functions.f.path is not"),
        ({"functions": {"f": {"kwargs": {"a": 1}}}}, "its options are in reward.rule_kwargs"),
        ({"rule_kwargs": {"gsm9k": {}}}, "reward.rule_kwargs.gsm9k: data_source 'gsm9k' has no reward rule"),
        ({"rule_kwargs": {"gsm8k": {"mode": 1}}}, "the rule takes method"),
        ({"rule_kwargs": {"countdown": {"mode": 1}}}, "unexpected keyword argument 'mode'"),
        ({"rule_kwargs": {"taco": {}}}, "is the sandbox"),
        ({"rule_kwargs": {"numina_*": {}}}, "by the exact data_source"),
        ({"overlong_buffer": OverlongBufferConfig(enable=True)}, "reward.overlong_buffer.len=0 must lie between 1"),
        ({"overlong_buffer": OverlongBufferConfig(True, 513)}, "data.max_response_length=512"),
        ({"overlong_buffer": OverlongBufferConfig(True, 5, -1.0)}, "reward.overlong_buffer.penalty_factor=-1 must be"),
        ({"length_penalty": -1.0}, "reward.length_penalty=-1 must be at least 0"),
        ({"repetition_penalty": RepetitionPenaltyConfig(-1.0)}, "reward.repetition_penalty.factor=-1 must be"),
        ({"clip": [1.0, 1.0]}, "reward.clip=[1.0, 1.0] must be two numbers"),
        ({"clip": [1.0]}, "reward.clip=[1.0] must be two numbers"),
        ({"normalize": {"s": [1.0, 0.0]}}, "reward.normalize.s=[1.0, 0.0] must be a mean and a standard deviation"),
        ({"normalize": {"s": [1.0]}}, "reward.normalize.s=[1.0]"),
        ({"source_scale": {"s": float("nan")}}, "reward.source_scale.s=nan must be a finite number"),
        ({"rate_limit": RateLimitConfig(max_concurrent=4)}, "no function of your own to call"),
        ({"sandbox": SandboxConfig(url="localhost:8080")}, "reward.sandbox.url=localhost:8080 must begin"),
        (
            {"functions": OWN, "rate_limit": RateLimitConfig(max_per_minute=10)},
            "take 102 minutes at reward.rate_limit.max_per_minute=10, longer than trainer.deadlines.rows",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    made = config(**settings)
    made.data.train_batch_size, made.rollout.n = 128, 8
    (found,) = [*violations(made), *problems(made)]
    assert message in found


def test_one_function_and_several_exclude_each_other() -> None:
    both = config(functions=OWN)
    both.reward.custom_reward_function.path = "my.module"
    (found,) = problems(both)
    assert "reward.functions and reward.custom_reward_function.path=my.module are both set" in found
