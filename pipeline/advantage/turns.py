"""Group relative advantages of single turns, for episodes whose environment rewards answers one by one.

    G_k = r_k + turn_gamma G_(k + 1)        A_k = (G_k - mean) / (std + 1e-6)

r_k is the sum of the rewards of the tokens of turn k (an answer of the policy). Mean and std (ddof 1) run over the G_k
of the samples of the group that have a turn k. All trained tokens of turn k get A_k. So a turn gets no credit for
rewards before it, and is compared with turns that had as much of the episode ahead of them. It is close to
GTPO (Ding et al. 2025, arXiv 2511.14846), which normalises discounted returns too, and to MT-GRPO (Zeng et al. 2025,
arXiv 2505.11821).

The mean of returns is a baseline that depends only on the episode before the turn. A sum of normalised rewards would
not be one: the policy's own choice to end the episode would decide how many means are subtracted.

A turn without trained tokens does not count. A turn that no other sample of the group has, and turns of equal
returns, have advantages of exactly 0; in rows of one turn this is `grpo`. The returns are G_k.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import spread
from pipeline.advantage.statistics import normalised
from pipeline.config.algorithm import AlgorithmConfig


def turn_grpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Apply the module's formula; with `norm_adv_by_std_in_grpo=false` A_k = G_k - mean."""
    rows = np.repeat(np.arange(len(data.rewards)), data.lengths)[data.mask]
    turns = np.zeros(len(rows), np.int64) if data.turns is None else data.turns[data.mask]
    shape = len(data.rewards), int(turns.max(initial=0)) + 1
    cells = rows * shape[1] + turns  # of the trained tokens, in arrays of rows by turns
    rewards = np.bincount(cells, data.token_rewards[data.mask], shape[0] * shape[1]).reshape(shape)
    returns = np.zeros(shape)
    carry = np.zeros(shape[0])
    for turn in reversed(range(shape[1])):
        carry = rewards[:, turn] + config.turn_gamma * carry
        returns[:, turn] = carry
    # Sums of equal rewards in another order differ by rounding; in float32 they are equal.
    rounded = returns.astype(np.float32).astype(np.float64).ravel()

    counted = np.unique(cells)
    group = data.group[counted // shape[1]] * shape[1] + counted % shape[1]
    number = np.unique(group, return_inverse=True)[1]
    advantages = np.zeros(len(rounded))
    advantages[counted] = normalised(rounded[counted], number, config.norm_adv_by_std_in_grpo)
    return Estimate(spread(advantages[cells], data.mask), spread(rounded[cells], data.mask))
