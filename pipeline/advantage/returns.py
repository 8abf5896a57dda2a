"""Estimators that look ahead from each token: sums of what the rest of the response will earn.

Tokens the policy did not choose (tools, environments) are no steps of it. They are skipped: neither the discount nor
the value counts them, and the token before them is followed by the one after them. Their own advantages and returns
are 0; a response without trained tokens has nothing else. Below, t runs over the trained tokens of a row, r_t is the
token's reward, V_t the critic's value before it, and what lies past the last of them is 0: a response that was cut at
its length limit is taken to be finished.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput, register_adv_est
from pipeline.advantage.sequences import discounted, trained_offsets
from pipeline.advantage.statistics import whiten
from pipeline.config.algorithm import AlgorithmConfig


@register_adv_est("gae", scope="batch", needs=("values",))
def gae(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): A_t = delta_t + gamma lam A_(t + 1).

    delta_t = r_t + gamma V_(t + 1) - V_t. The returns, the critic's target, are A_t + V_t. Then the advantages are
    whitened over the trained tokens of the batch; where these are fewer than two, or the advantages all equal, they
    are 0 (verl raises an error below two). Groups do not matter, one of a single row included.
    """
    assert data.values is not None
    values, rewards = data.values[data.mask], data.token_rewards[data.mask]
    offsets = trained_offsets(data.mask, data.offsets)
    following = np.append(values[1:], 0.0)[: len(values)]
    following[offsets[1:][np.diff(offsets) > 0] - 1] = 0.0
    advantages = discounted(rewards + config.gamma * following - values, offsets, config.gamma * config.lam)
    return Estimate(whiten(_spread(advantages, data.mask), data.mask), _spread(advantages + values, data.mask))


@register_adv_est("reinforce_plus_plus", scope="batch")
def reinforce_plus_plus(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """REINFORCE++ (Hu et al. 2025): A_t = whiten(G_t), G_t = r_t + gamma G_(t + 1).

    The trained tokens of the batch are the baseline: groups do not matter, one of a single row included. Where all G_t
    are equal, or fewer than two, the advantages are 0. The returns are G_t.
    """
    returns = _returns(data, config.gamma)
    return Estimate(whiten(returns, data.mask), returns)


@register_adv_est("remax", scope="group", needs=("baselines",))
def remax(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """ReMax (Li et al. 2023): A_t = G_t - b, G_t = r_t + gamma G_(t + 1), b the score of the prompt's greedy response.

    b is not discounted, so a gamma below 1 (verl has none here) sets early tokens against too much where scores are
    positive. The other samples of the group do not matter: a group of one is like any other, and equal rewards give 0
    only where they equal b. The returns are G_t.
    """
    assert data.baselines is not None
    returns = _returns(data, config.gamma)
    return Estimate(returns - data.per_token(data.baselines), returns)


def _returns(data: EstimatorInput, gamma: float) -> np.ndarray:
    """[N] discounted sum of rewards from each trained token on, 0 where the mask is false."""
    offsets = trained_offsets(data.mask, data.offsets)
    return _spread(discounted(data.token_rewards[data.mask], offsets, gamma), data.mask)


def _spread(trained: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] the numbers of the trained tokens in their places, 0 elsewhere."""
    tokens = np.zeros(len(mask))
    tokens[mask] = trained
    return tokens
