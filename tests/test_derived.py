"""Which stages a run has, from the needs of the estimator and from the keys that ask for them."""

import pytest

from pipeline.config import Config
from pipeline.derived import scorers, uses_baselines, uses_critic, uses_policy_scores, uses_reference


def make_config(name: str) -> Config:
    config = Config()
    config.algorithm.adv_estimator = name
    return config


@pytest.mark.parametrize(
    ("name", "critic", "policy_scores", "baselines"),
    [
        ("grpo", False, False, False),
        ("gae", True, False, False),
        ("remax", False, False, True),
        ("optimal_token_baseline", False, True, False),
        ("tir_optimal_token_baseline", False, True, False),
        ("pipeline.advantage.returns:gae", True, False, False),
    ],
)
def test_the_estimator_brings_what_it_reads(name, critic, policy_scores, baselines):
    config = make_config(name)
    found = uses_critic(config), uses_policy_scores(config), uses_baselines(config), uses_reference(config)
    assert found == (critic, policy_scores, baselines, False)


def test_a_critic_can_be_asked_for():
    config = make_config("grpo")
    config.critic.enable = True
    assert uses_critic(config)


@pytest.mark.parametrize(("in_reward", "in_loss"), [(True, False), (False, True), (True, True)])
def test_a_kl_brings_the_reference(in_reward, in_loss):
    config = make_config("grpo")
    config.algorithm.use_kl_in_reward, config.actor.use_kl_loss = in_reward, in_loss
    assert uses_reference(config)


def test_pools_in_the_order_of_the_stream():
    config = make_config("optimal_token_baseline")
    config.critic.enable = config.actor.use_kl_loss = True
    scoring = config.scoring
    config.reward.model.path = "judge"
    expected = [("reward_model", scoring.reward_model)]
    expected += [("reference", scoring.reference), ("value", scoring.value), ("policy", scoring.policy)]
    assert list(scorers(config).items()) == expected
    assert scorers(Config()) == {}


def test_an_unknown_estimator():
    with pytest.raises(ValueError, match="'grpoo' is unknown"):
        scorers(make_config("grpoo"))
