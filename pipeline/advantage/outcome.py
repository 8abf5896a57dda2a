"""Advantage estimators that compare the reward of a whole response with the rewards of the other samples of its group.

All trained tokens of a row get the same advantage A. R is the row's reward; mean, std (ddof 1) and n are the mean, the
standard deviation and the number of rewards in the row's group. In a group of equal rewards, or of one row, advantages
before whitening are exactly 0. (In verl the advantage of a single row is R; verl's `grpo_passk` raises an error for
it.) Whitening subtracts the mean over tokens, which may move such a group away from 0. A row without trained tokens
still counts in mean, std and n. The returns equal the advantages.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput
from pipeline.advantage.sequences import trained_offsets
from pipeline.advantage.statistics import STD_EPS, deviations, group_sizes, group_std, normalised, whiten
from pipeline.config.algorithm import AlgorithmConfig


def grpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Group relative advantages (Shao et al. 2024, section 4.1.2): A = (R - mean) / (std + 1e-6).

    With `norm_adv_by_std_in_grpo=false` A = R - mean (Dr.GRPO, Liu et al. 2025).
    """
    return _of_rows(data, normalised(data.rewards, data.group, config.norm_adv_by_std_in_grpo))


def gdpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Decoupled normalisation of several rewards (GDPO, Liu et al. 2026): A = whiten(sum over keys k of w_k A_k).

    k runs over `gdpo_reward_keys`, which name parts of the reward. A_k is the GRPO advantage computed from part k, and
    w_k the entry for k in `gdpo_reward_weights` (default 1). So a part of large variance does not hide a part of small
    variance. The sum is whitened over the trained tokens of the batch. The KL penalty of `use_kl_in_reward` is in none
    of the parts, so it has no effect.

    Raises ValueError without keys, if a key is not a reward part or not finite in some row, or if the numbers of
    weights and keys differ.
    """
    assert data.parts is not None
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
    known = ", ".join(sorted(data.parts))
    if not keys:
        raise ValueError(f"algorithm.gdpo_reward_keys is empty; gdpo needs the rewards it normalises, some of {known}")
    if weights is not None and len(weights) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights has length {len(weights)} and gdpo_reward_keys has length {len(keys)}; "
            "give one weight for each key, or null for equal weights"
        )
    rows = np.zeros(len(data.rewards))
    for key, weight in zip(keys, weights or [1.0] * len(keys), strict=True):
        if key not in data.parts:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {key!r}, which the reward function did not return for every row; "
                f"known are {known}"
            )
        part = data.parts[key]
        if not np.isfinite(part).all():
            raise ValueError(
                f"the reward part {key!r} of algorithm.gdpo_reward_keys is {part[~np.isfinite(part)][0]} in a row; the "
                "reward function must return a finite number"
            )
        rows += weight * normalised(part, data.group, config.norm_adv_by_std_in_grpo)
    return _whitened(data, rows)


def grpo_passk(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Advantages for pass@k (Tang et al. 2025): A = (R_max - R_2nd) / (std + 1e-6) for the best row of a group, else 0.

    R_max and R_2nd are the two highest rewards of the group. With `norm_adv_by_std_in_grpo=false` the difference is not
    divided. All advantages of a group are 0 if two rows share the best reward, or if the group has one row.
    """
    order = np.lexsort((data.rewards, data.group))
    group = data.group[order]
    same_as_before = group[1:] == group[:-1]
    last = np.append(group[1:] != group[:-1], True)[1:]
    best = np.flatnonzero(same_as_before & last) + 1
    rows = np.zeros(len(data.rewards))
    rows[order[best]] = data.rewards[order[best]] - data.rewards[order[best - 1]]
    if config.norm_adv_by_std_in_grpo:
        rows /= group_std(deviations(data.rewards, data.group), data.group) + STD_EPS
    return _of_rows(data, rows)


def online_dpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Mark the pair of each group for online DPO (Guo et al. 2024, arXiv 2402.04792): A = 1 for the response with the
    highest reward, -1 for the response with the lowest, 0 for all others.

    If several share the highest or the lowest reward, one of them is chosen. In a group of equal rewards all A are 0.
    """
    order = np.lexsort((data.rewards, data.group))
    first = np.flatnonzero(np.append(True, np.diff(data.group[order]) != 0)) if len(order) else order
    worst, best = order[first], order[np.append(first[1:], len(order)) - 1] if len(order) else order
    differ = data.rewards[best] > data.rewards[worst]
    rows = np.zeros(len(data.rewards))
    rows[best[differ]], rows[worst[differ]] = 1.0, -1.0
    return _of_rows(data, rows)


def rloo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """RLOO, leave-one-out baseline (Ahmadian et al. 2024): A = R - mean over the group's other rows = n / (n - 1) *
    (R - mean)."""
    size = group_sizes(data.group)[data.group]
    return _of_rows(data, deviations(data.rewards, data.group) * size / np.maximum(size - 1, 1))


def opo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """OPO, optimal reward baseline (Hao et al. 2025): A = R - sum(len * R) / sum(len), with sums over the group.

    len is the number of trained tokens of a row. The gradient has the least variance with this baseline if the squared
    norm of a response's gradient is proportional to len.
    """
    length = np.diff(trained_offsets(data.mask, data.offsets))
    # Differences instead of rewards: equal rewards then give exactly 0.
    differences = deviations(data.rewards, data.group)
    weighted = np.bincount(data.group, weights=length * differences)
    baseline = weighted / np.maximum(np.bincount(data.group, weights=length), 1)
    return _of_rows(data, differences - baseline[data.group])


def gpg(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """GPG, group policy gradient (Chu et al. 2025): A = alpha * (R - mean) / f_norm.

    As in verl, alpha = (rows in the batch) / (rows with R not 0). The paper's alpha is (rows in the batch) / (rows with
    a gradient), and the rows without a gradient are the rows in groups of equal rewards. If all rewards are 0, all
    advantages are 0.
    """
    alpha = len(data.rewards) / max(int(np.count_nonzero(data.rewards)), 1)
    return _of_rows(data, alpha * deviations(data.rewards, data.group) / config.f_norm)


def reinforce_plus_plus_baseline(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """REINFORCE++ with a group baseline (Hu et al. 2025): A = whiten(R - mean) over the trained tokens of the batch."""
    return _whitened(data, deviations(data.rewards, data.group))


def _of_rows(data: EstimatorInput, rows: np.ndarray) -> Estimate:
    advantages = data.per_token(rows)
    return Estimate(advantages, advantages)


def _whitened(data: EstimatorInput, rows: np.ndarray) -> Estimate:
    advantages = whiten(data.per_token(rows), data.mask)
    return Estimate(advantages, advantages)
