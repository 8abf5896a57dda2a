"""Estimators that the tests reach by import path."""

import numpy as np

from pipeline.advantage.estimators import Estimate, register_adv_est


def last_token(data, config):
    """The reward on its token, so that what the stage hands over can be seen in what comes out."""
    return Estimate(data.token_rewards, data.per_token(np.asarray(data.lengths, dtype=float)))


@register_adv_est("test_whole_batch", scope="batch")
def whole_batch(data, config):
    rows = data.per_token(data.rewards - data.rewards.mean())
    return Estimate(rows, rows)


def everywhere(data, config):
    """Does not look at the mask."""
    ones = np.ones(len(data.mask))
    return Estimate(ones, ones)


def too_short(data, config):
    return Estimate(np.zeros(1), np.zeros(1))


def not_finite(data, config):
    return Estimate(np.full(len(data.mask), np.inf), np.zeros(len(data.mask)))


constant = 3
