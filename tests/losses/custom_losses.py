"""A policy loss that the tests reach by import path."""

from pipeline.losses import register_policy_loss
from pipeline.losses.ppo import cispo
from pipeline.losses.registry import token_sums


def scaled(data, config):
    return -config.policy_loss.kwargs["scale"] * data.masked(data.advantages * data.log_probs), token_sums(data)


@register_policy_loss("test_flagged", zero_without_advantage=True)
def flagged(data, config):
    return scaled(data, config)


known = cispo
constant = 3
