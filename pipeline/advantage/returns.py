"""Estimators of discounted sums of the rewards from each token on.

Tokens of tools and environments are not steps: they are skipped, and their advantages and returns are 0. Below, t runs
over the trained tokens of a row, r_t is the token's reward and V_t the critic's value before it. Rewards and values
after the last token are 0, also for a response that was cut at its length limit. gamma_t is `gamma` within a turn of an
episode, and `gamma` times `turn_gamma` from the last token of a turn to the first of the next. The steps of an episode
of several contexts are the steps of its contexts, one context after the other: the last token of a context is followed
by V of the next context's first token, which has another prompt.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import discounted, spread, trained_offsets
from pipeline.advantage.statistics import whiten
from pipeline.config.algorithm import AlgorithmConfig


def gae(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): A_t = delta_t + gamma_t lam A_(t + 1).

    delta_t = r_t + gamma_t V_(t + 1) - V_t. The returns, the critic's target, are A_t + V_t. The advantages are then
    whitened over the trained tokens of the batch. They are 0 if they are all equal or fewer than two; verl raises an
    error then. Groups do not matter.
    """
    assert data.values is not None
    values, rewards = data.values[data.mask], data.token_rewards[data.mask]
    offsets = trained_offsets(data.mask, data.offsets)
    following = np.append(values[1:], 0.0)[: len(values)]
    following[offsets[1:][np.diff(offsets) > 0] - 1] = 0.0
    gamma = _discounts(data, config)
    advantages = discounted(rewards + gamma * following - values, offsets, gamma * config.lam)
    return Estimate(whiten(spread(advantages, data.mask), data.mask), spread(advantages + values, data.mask))


def reinforce_plus_plus(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """REINFORCE++ (Hu et al. 2025): A_t = whiten(G_t), G_t = r_t + gamma_t G_(t + 1).

    Whitened over the trained tokens of the batch (0 if all G_t are equal or fewer than two). Groups do not matter. The
    returns are G_t.
    """
    returns = _returns(data, config)
    return Estimate(whiten(returns, data.mask), returns)


def remax(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """ReMax (Li et al. 2023): A_t = G_t - b, G_t = r_t + gamma_t G_(t + 1), b the prompt's greedy response's score.

    b is not discounted, so with gamma below 1 (verl has no gamma here) it is too large for early tokens if scores are
    positive. Other samples of the group do not matter. The returns are G_t.
    """
    assert data.baselines is not None
    returns = _returns(data, config)
    return Estimate(returns - data.per_token(data.baselines), returns)


def _returns(data: EstimatorInput, config: AlgorithmConfig) -> np.ndarray:
    """[N] discounted sum of rewards from each trained token on, 0 if the mask is false."""
    offsets = trained_offsets(data.mask, data.offsets)
    return spread(discounted(data.token_rewards[data.mask], offsets, _discounts(data, config)), data.mask)


def _discounts(data: EstimatorInput, config: AlgorithmConfig) -> np.ndarray:
    """Return the discount gamma_t from each trained token to the next one."""
    turns = np.zeros(len(data.mask)) if data.turns is None else data.turns
    # The last token of a row has no next one, so that it may hold any number.
    later = np.maximum(np.diff(turns[data.mask], append=0), 0)
    return config.gamma * config.turn_gamma**later
