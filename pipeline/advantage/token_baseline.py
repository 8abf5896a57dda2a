"""Optimal token baseline: a baseline of least variance for each position in the response (Li et al. 2026).

    A_t = G_t - B_t        B_t = sum over i of G_t W_t / sum over i of W_t        W_t = w_1 + ... + w_t
    w_t = 1 - 2 pi_t + sum over the vocabulary of pi^2

G_t is the undiscounted sum of rewards from token t to the end of the row. i runs over the responses of the group that
have a trained token at position t. pi_t is the probability with which the token was sampled, and w_t the squared norm
of the gradient of log pi_t with respect to the logits.

Two differences from verl: a negative w_t counts as 0 (rounding, or `sum_pi_squared` of another policy than the
log-probs, may make w_t negative). If all W_t of a position are 0, the baseline is the plain mean (verl adds 1e-8 to the
divisor, which pulls the baseline of a nearly certain policy to 0).

If only one response of the group reaches a position, the baseline equals that response's G_t, and A_t = 0. With
`handle_zero_tail` the baseline is 0 there: A_t = G_t, unbiased, without a reduction of variance. If two or more
responses have equal G_t at a position, A_t is exactly 0. The returns are G_t. A_t and G_t are 0 if the mask is false.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import cumulative, discounted, trained_offsets
from pipeline.config.algorithm import AlgorithmConfig


def optimal_token_baseline(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Estimate A_t by the formula of the module; t counts all tokens of the response, tokens of tools included."""
    position = np.arange(len(data.mask)) - np.repeat(data.offsets[:-1], data.lengths)
    return _estimate(data, position[data.mask], config.handle_zero_tail)


def tir_optimal_token_baseline(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Estimate A_t by the formula of the module; t counts trained tokens, so the length of tool results has no effect.

    TIR is tool-integrated reasoning.
    """
    offsets = trained_offsets(data.mask, data.offsets)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    return _estimate(data, position, config.handle_zero_tail)


def _estimate(data: EstimatorInput, position: np.ndarray, handle_zero_tail: bool) -> Estimate:
    """Estimate A_t by the formula of the module.

    Args:
        data: the estimator's input.
        position: [trained tokens] int64, position t of each trained token, from 0.
        handle_zero_tail: whether A_t = G_t, instead of 0, at positions that only one response reaches.
    """
    assert data.sum_pi_squared is not None
    mask = data.mask
    offsets = trained_offsets(mask, data.offsets)
    energy = 1.0 - 2.0 * np.exp(data.log_probs[mask]) + data.sum_pi_squared[mask]
    weights = cumulative(np.maximum(energy, 0.0), offsets)
    returns = discounted(data.token_rewards[mask], offsets, 1.0)

    group = np.repeat(data.group, np.diff(offsets))
    longest = int(position.max(initial=0)) + 1
    _, first, place, count = np.unique(
        group * longest + position, return_index=True, return_inverse=True, return_counts=True
    )
    # Relative to one return of the position: equal returns then give exactly 0.
    differences = returns - returns[first][place]
    total = np.bincount(place, weights=weights)
    weights = np.where((total > 0)[place], weights, 1.0)
    baseline = np.bincount(place, weights=differences * weights) / np.bincount(place, weights=weights)
    trained = differences - baseline[place]
    if handle_zero_tail:
        trained = np.where((count == 1)[place], returns, trained)

    advantages, all_returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantages[mask], all_returns[mask] = trained, returns
    return Estimate(advantages, all_returns)
