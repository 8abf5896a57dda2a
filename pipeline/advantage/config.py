"""Settings of advantages, KL in the reward, off-policy correction and the order of the stream (`algorithm.*`)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KLControlConfig:
    """The coefficient of the KL penalty in the reward (`algorithm.kl_ctrl.*`)."""

    type: str = "fixed"
    """`fixed`, or `adaptive`: raised while the KL is above `target_kl` and lowered while it is below."""

    kl_coef: float = 0.001
    """The coefficient, or the one an adaptive controller begins with."""

    target_kl: float = 0.1
    """KL per token that the adaptive controller steers to."""

    horizon: int = 10000
    """Rows over which the adaptive controller may change the coefficient by 20 percent."""


@dataclass
class RolloutCorrectionConfig:
    """Correction of the gap between the engine's policy and the trainer's (`algorithm.rollout_correction.*`).

    With `actor.old_log_probs=recompute` three policies are told apart (decoupled mode): the correction is the one from
    the engine's policy to the recomputed old one, once per iteration. With `engine` there are two (bypass mode): the
    correction is from the engine's policy to the current one, in every step.
    """

    rollout_is: str | None = None
    """Importance weights: `token`, `sequence` (one weight per response), or `none`. Null takes `token` where rows may
    be older than the policy that trains on them (`algorithm.max_staleness` above 0) and the loss does not weigh them by
    that ratio itself, else `none`."""

    rollout_is_threshold: str = "2.0"
    """One number caps the weights there (truncated importance sampling); `low_high`, such as `"0.5_2.0"` (in quotes in
    YAML), sets weights outside the range to 0 (IcePop)."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the iteration."""

    rollout_rs: str | None = None
    """Rejection rules, comma separated: `token_k1`, `token_k2`, `token_k3`, `seq_sum_k1` to `seq_sum_k3`,
    `seq_mean_k1` to `seq_mean_k3`, `seq_max_k2`, `seq_max_k3`; null rejects nothing."""

    rollout_rs_threshold: str | None = None
    """One bound per rule, comma separated. k1: bounds `low_high` on the probability ratio trainer / engine (one number
    `b` means `1/b_b`); k2 and k3: the largest value that is kept."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (`algorithm.filter_groups.*`): groups whose rewards all agree teach nothing, and others are
    generated in their place."""

    enable: bool = False
    """Leave out groups that agree, and generate until `data.train_batch_size` groups are there that do not."""

    metric: str = "score"
    """What is compared: `score`, or a part of the reward by name, such as `acc` where the score is shaped."""

    max_num_gen_batches: int = 10
    """Most batches of `data.train_batch_size` groups that may be generated for one iteration; the run ends when they do
    not fill it."""

    surplus: str = "discard"
    """What becomes of groups of the last chunk that an iteration has no room for: `discard`, or `carry` into the next
    iteration (with `algorithm.max_staleness` above 0)."""


@dataclass
class AlgorithmConfig:
    """How rewards become advantages, and how old a row may be."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator, or an import path `package.module:function`."""

    adv_estimator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of an estimator of your own, which reads them from here."""

    gamma: float = 1.0
    """Discount per token of `gae`, `reinforce_plus_plus` and `remax`."""

    lam: float = 1.0
    """GAE's lambda: 1 is the whole return, 0 one step."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of `grpo`, `gdpo` and `grpo_passk` by the group's standard deviation; false is Dr.GRPO."""

    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Rewards that `gdpo` normalises one by one: names of the reward function's parts, or `score`."""

    gdpo_reward_weights: list[float] | None = None
    """Weight of each of `gdpo_reward_keys`; null weighs them equally."""

    f_norm: float = 1.0
    """Divisor of `gpg` advantages."""

    handle_zero_tail: bool = True
    """Where a single response of the group is that long, the optimal token baselines take 0 for the baseline (advantage
    = return); false leaves its own return as the baseline (advantage 0)."""

    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` times the KL to the reference policy from each token's reward."""

    kl_penalty: str = "kl"
    """Estimate of the KL in the reward: `kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3)."""

    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Coefficient of the KL in the reward."""

    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Off-policy correction."""

    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""

    max_staleness: int = 0
    """How many policy versions a row may be older than the one that trains on it; 0 is strictly on-policy. Above 0
    engines generate the next iterations while one is trained on; 1 is enough to hide the shorter of the two."""

    on_stale: str = "drop"
    """What becomes of a response that takes too long for that: with `drop` nobody overtakes it any more
    (`stream.order`), or it is given up (`rollout.oversample_policy=carry`), and a row that is older all the same is
    kept out of the loss; with `correct` it may fall behind further and is trained on, with the weights that correct
    others, and nobody waits for it. Rows past the bound are counted (`training/staleness/over`)."""
