"""Estimators that see one number per response: the group is the baseline.

Each gives one advantage per row, which all trained tokens of the row share; R is a row's reward and mean, std (ddof 1)
and n are those of its group. A group whose rewards are all equal, one of a single row included, has exactly 0 before
whitening: it says nothing about which response is better. (verl gives a single row its bare reward in all of them but
`grpo_passk`, which it refuses.) Whitening takes away the mean over tokens, which is not 0 where rows differ in length,
so that such a group may end with one number other than 0 in all its tokens. A row without trained tokens has no
advantages, and its reward still counts in its group. Returns equal the advantages.
"""

import numpy as np

from pipeline.advantage.registry import Estimate, EstimatorInput, register_adv_est
from pipeline.advantage.sequences import trained_offsets
from pipeline.advantage.statistics import STD_EPS, deviations, group_sizes, group_std, normalised, whiten
from pipeline.config.algorithm import AlgorithmConfig


@register_adv_est("grpo", scope="group")
def grpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Group relative advantages (Shao et al. 2024, section 4.1.2): A = (R - mean) / (std + 1e-6).

    With `norm_adv_by_std_in_grpo=false` A = R - mean (Dr.GRPO, Liu et al. 2025).
    """
    return _of_rows(data, normalised(data.rewards, data.group, config.norm_adv_by_std_in_grpo))


@register_adv_est("gdpo", scope="batch", needs=("parts",))
def gdpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Decoupled normalisation of several rewards (GDPO, Liu et al. 2026): A = whiten(sum over keys k of w_k A_k).

    A_k is the GRPO advantage of the reward part k of `gdpo_reward_keys`, w_k its entry in `gdpo_reward_weights` (1
    without), so that no reward drowns another of smaller spread. The sum is whitened over the trained tokens of the
    batch. A KL penalty in the reward is in no part, so `gdpo` does not see it.

    Raises:
        ValueError: no keys, a key that is no part or not finite in some row, or another number of weights than keys.
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


@register_adv_est("grpo_passk", scope="group")
def grpo_passk(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Advantages for the best of n (Tang et al. 2025): A = (R_max - R_2nd) / (std + 1e-6) for the best row, else 0.

    What the best response adds is how far it surpasses the second. With `norm_adv_by_std_in_grpo=false` the difference
    is not divided. Where two rows share the best reward all are 0, and so is a group of one: there is no second.
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


@register_adv_est("rloo", scope="group")
def rloo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Leave-one-out (Ahmadian et al. 2024): A = R - mean of the others' R = n / (n - 1) * (R - mean)."""
    size = group_sizes(data.group)[data.group]
    return _of_rows(data, deviations(data.rewards, data.group) * size / np.maximum(size - 1, 1))


@register_adv_est("opo", scope="group")
def opo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Optimal reward baseline (Hao et al. 2025): A = R - sum(len * R) / sum(len), len being the row's trained tokens.

    The baseline of least variance where a gradient's squared length grows with the response's. A row without trained
    tokens has no weight in it.
    """
    length = np.diff(trained_offsets(data.mask, data.offsets))
    # With the rewards themselves the result is the same but for rounding, which is 0 here where they are equal.
    differences = deviations(data.rewards, data.group)
    weighted = np.bincount(data.group, weights=length * differences)
    baseline = weighted / np.maximum(np.bincount(data.group, weights=length), 1)
    return _of_rows(data, differences - baseline[data.group])


@register_adv_est("gpg", scope="batch")
def gpg(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Group policy gradient (Chu et al. 2025): A = alpha * (R - mean) / f_norm, alpha = rows / rows with R not 0.

    The paper's alpha makes up for rows without a gradient, those in groups of equal rewards: rows / other rows. This
    one is verl's, which takes a reward of 0 for the lack of a gradient: it counts the wrong rows of mixed groups as
    lacking one too, and those of all-right groups as having one. A batch of nothing but zeros has advantages 0.
    """
    alpha = len(data.rewards) / max(int(np.count_nonzero(data.rewards)), 1)
    return _of_rows(data, alpha * deviations(data.rewards, data.group) / config.f_norm)


@register_adv_est("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """REINFORCE++ with a group baseline (Hu et al. 2025): A = whiten(R - mean) over the trained tokens of the batch."""
    return _whitened(data, deviations(data.rewards, data.group))


def _of_rows(data: EstimatorInput, rows: np.ndarray) -> Estimate:
    advantages = data.per_token(rows)
    return Estimate(advantages, advantages)


def _whitened(data: EstimatorInput, rows: np.ndarray) -> Estimate:
    advantages = whiten(data.per_token(rows), data.mask)
    return Estimate(advantages, advantages)
