"""Group relative advantages of single turns, for multi-turn episodes whose environment rewards each turn.

    G_k = r_k + turn_gamma G_(k + 1)        A_k = (G_k - mean) / (std + 1e-6)

A turn is one generation of the policy in an episode. r_k is the sum of the rewards of the tokens of turn k. Mean and
std (ddof 1) run over the G_k of all samples of the group that have a turn k. All trained tokens of turn k get A_k. So a
turn gets no credit for earlier rewards, and is compared with turns at the same point of other episodes. The estimator
is close to GTPO (Ding et al. 2025, arXiv 2511.14846), which normalises discounted returns too, and to MT-GRPO (Zeng et
al. 2025, arXiv 2505.11821).

The mean of the returns G_k is a baseline that depends only on the episode before turn k. If instead each reward r_k
were normalised and the results summed, there would be no such baseline: by ending an episode early, the policy would
choose how many means are subtracted.

A turn without trained tokens does not count. If turn k exists in only one sample of the group, or all G_k are equal,
A_k is exactly 0. If all rows have one turn, the estimator equals `grpo`. The returns are G_k.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import spread
from pipeline.advantage.statistics import normalised
from pipeline.config.algorithm import AlgorithmConfig


def turn_grpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Estimate A_k by the formula of the module; with `norm_adv_by_std_in_grpo=false` A_k = G_k - mean."""
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
