"""Estimators of discounted sums of the rewards from each token on.

Tokens of tools and environments are no steps: they are skipped, and their advantages and returns are 0. Below, t runs
over the trained tokens of a row, r_t is the token's reward and V_t the critic's value before it. Rewards and values
after the last token are 0, also for a response that was cut at its length limit.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput, register_adv_est
from pipeline.advantage.sequences import discounted, trained_offsets
from pipeline.advantage.statistics import whiten
from pipeline.config.algorithm import AlgorithmConfig


@register_adv_est("gae", scope="batch", needs=("values",))
def gae(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): A_t = delta_t + gamma lam A_(t + 1).

    delta_t = r_t + gamma V_(t + 1) - V_t. The returns, the critic's target, are A_t + V_t. The advantages are then
    whitened over the trained tokens of the batch (0 if they are all equal or fewer than two, where verl raises an
    error). Groups do not matter.
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

    Whitened over the trained tokens of the batch (0 if all G_t are equal or fewer than two). Groups do not matter. The
    returns are G_t.
    """
    returns = _returns(data, config.gamma)
    return Estimate(whiten(returns, data.mask), returns)


@register_adv_est("remax", scope="group", needs=("baselines",))
def remax(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """ReMax (Li et al. 2023): A_t = G_t - b, G_t = r_t + gamma G_(t + 1), b the score of the prompt's greedy response.

    b is not discounted, so with gamma below 1 (verl has no gamma here) it is too large for early tokens if scores are
    positive. Other samples of the group do not matter. The returns are G_t.
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
