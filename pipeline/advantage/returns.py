"""Advantage estimators built on G_t, the discounted sum of rewards from token t to the end of the row.

t counts the trained tokens of a row. Tokens of tools and environments are skipped; their advantages and returns are 0.
r_t is the reward of token t, and V_t the critic's value before token t. After the last token rewards and values are 0,
also if the response was cut at the length limit. The discount gamma_t is `gamma` within a turn, and `gamma` times
`turn_gamma` from the last token of a turn to the first token of the next turn. If an episode has several contexts, t
runs through them one after the other: V_(t + 1) of a context's last token is V of the next context's first token,
although that token has another prompt.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import discounted, spread, trained_offsets
from pipeline.advantage.statistics import whiten
from pipeline.config.algorithm import AlgorithmConfig


def gae(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): A_t = delta_t + gamma_t lam A_(t + 1).

    delta_t = r_t + gamma_t V_(t + 1) - V_t, and lam = `algorithm.lam`. The returns, the critic's target, are A_t + V_t.
    After that the advantages are whitened over the trained tokens of the batch. They are 0 if all are equal or there
    are fewer than two (verl raises an error). Groups do not matter.
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

    `whiten` runs over the trained tokens of the batch (the result is 0 if all G_t are equal or there are fewer than
    two). Groups do not matter. The returns are G_t.
    """
    returns = _returns(data, config)
    return Estimate(whiten(returns, data.mask), returns)


def remax(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """ReMax (Li et al. 2023): A_t = G_t - b, with G_t = r_t + gamma_t G_(t + 1).

    The baseline b is the score of the greedy response to the prompt. b is not discounted: with gamma below 1 (verl has
    no gamma here) and positive scores, b is too large for early tokens. Other samples of the group do not matter. The
    returns are G_t.
    """
    assert data.baselines is not None
    returns = _returns(data, config)
    return Estimate(returns - data.per_token(data.baselines), returns)


def _returns(data: EstimatorInput, config: AlgorithmConfig) -> np.ndarray:
    """[N] G_t, the discounted sum of rewards from each trained token to the end of the row; 0 if the mask is false."""
    offsets = trained_offsets(data.mask, data.offsets)
    return spread(discounted(data.token_rewards[data.mask], offsets, _discounts(data, config)), data.mask)


def _discounts(data: EstimatorInput, config: AlgorithmConfig) -> np.ndarray:
    """[trained tokens] the discount gamma_t from each trained token to the next one."""
    turns = np.zeros(len(data.mask)) if data.turns is None else data.turns
    # The last token of a row has no next one, so that it may hold any number.
    later = np.maximum(np.diff(turns[data.mask], append=0), 0)
    return config.gamma * config.turn_gamma**later
