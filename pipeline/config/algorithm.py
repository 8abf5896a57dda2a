"""Settings of advantages, KL in the reward, off-policy correction and dynamic sampling (`algorithm.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.learner import KL_ESTIMATES


@dataclass
class KLControlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """Controller of the coefficient: `fixed` keeps it; `adaptive` raises it while the KL is above `target_kl` and
    lowers it while the KL is below."""

    kl_coef: float = setting(0.001, at_least=0)
    """Coefficient of the KL penalty. With `type=adaptive`, the coefficient at the start."""

    target_kl: float = setting(0.1, above=0)
    """Mean KL per token that `type=adaptive` steers to."""

    horizon: int = setting(10000, at_least=1)
    """Number of rows over which `type=adaptive` can change the coefficient by up to 20 percent."""


@dataclass
class RolloutCorrectionConfig:
    """Correction for the difference between the policy of the engine, which samples responses, and of the trainer."""

    rollout_is: str | None = None
    """Importance weights of rows: `token` (one per token), `sequence` (one per response) or `none`. Null takes `token`
    if `algorithm.max_staleness` is above 0 and the loss does not already weigh tokens by the ratio of trainer to engine
    probabilities, else `none`."""

    rollout_is_threshold: str = "2.0"
    """Bounds of the importance weights. One number is a cap: larger weights are lowered to it. Two numbers `low_high`,
    such as `"0.5_2.0"`: weights outside of them become 0."""

    rollout_is_batch_normalize: bool = False
    """Divide the importance weights by their mean over the iteration."""

    rollout_rs: str | None = None
    """Rejection [rules](algorithms.md#off-policy-correction), separated by commas. Null rejects no row."""

    rollout_rs_threshold: str | None = None
    """Bounds of the rejection rules, one per rule, separated by commas."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling. If all rewards of a group are equal, its advantages are 0 and it teaches nothing: such groups
    are left out, and groups of other prompts are generated in their place."""

    enable: bool = False
    """Leave out groups with equal rewards, and generate until `data.train_batch_size` groups with unequal rewards are
    there."""

    metric: str = "score"
    """Value that must differ within a group: `score`, or a named part of the reward, such as `acc`."""

    max_num_gen_batches: int = setting(10, at_least=1)
    """Maximum number of batches generated per iteration, each of `data.train_batch_size` groups. If they hold too few
    groups with unequal rewards, the run ends."""

    surplus: str = setting("discard", choices=("discard", "carry"))
    """Groups beyond `data.train_batch_size`: `discard` them, or `carry` them into the next iteration (needs
    `algorithm.max_staleness` above 0)."""


@dataclass
class AlgorithmConfig:
    """Advantages, and the staleness of rows."""

    adv_estimator: str = setting("grpo", path="code")
    """Advantage estimator: a name, or a function of your own as `package.module:function`."""

    adv_estimator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an advantage estimator of your own."""

    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per token, for `gae`, `reinforce_plus_plus` and `remax`."""

    turn_gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per turn of an episode, for `turn_grpo`; for `gae`, `reinforce_plus_plus` and `remax` it multiplies
    `gamma` at the end of each turn."""

    lam: float = setting(1.0, at_least=0, at_most=1)
    """Lambda of GAE: 1 sums rewards to the end of the response, 0 takes one step and the next value."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages of `grpo`, `turn_grpo`, `gdpo` and `grpo_passk` by the group's standard deviation."""

    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Names of the rewards that `gdpo` normalises one by one: parts of the reward, or `score`."""

    gdpo_reward_weights: list[float] | None = None
    """Weights of `gdpo_reward_keys`, in their order. Null weighs them equally."""

    f_norm: float = setting(1.0, above=0)
    """Divisor of the advantages of `gpg`."""

    handle_zero_tail: bool = True
    """For optimal token baselines: the baseline at token positions that only one response of the group reaches. True:
    0. False: the response's own return, so the advantage is 0."""

    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` times the KL to the reference policy from the reward of each token."""

    kl_penalty: str = setting("kl", choices=KL_ESTIMATES)
    """[Estimator](algorithms.md#kl-to-the-reference-policy) of the KL in the reward."""

    teacher_coef: float = setting(0.0, at_least=0)
    """Weight of the teacher's advantage: each token's advantage gets `teacher_coef` times log-prob of the teacher minus
    log-prob of the engine (on-policy distillation). 0: none."""

    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)

    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    max_staleness: int = setting(0, at_least=0)
    """Staleness limit: number of policy versions by which a row may be older than the version that trains on it. 0 is
    strictly on-policy. With 1 or more, generation and training run at the same time."""

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        adaptive, groups = self.kl_ctrl.type == "adaptive", self.filter_groups
        return {
            "{algorithm.kl_ctrl.type} adapts the KL in the reward, but {algorithm.use_kl_in_reward}; set it to true, "
            "or set type=fixed (the KL in the loss has the fixed weight actor.kl_loss_coef)": (
                adaptive and not self.use_kl_in_reward
            ),
            "{algorithm.kl_ctrl.kl_coef} with {algorithm.kl_ctrl.type}: the controller multiplies the coefficient, so "
            "0 stays 0; set it above 0": adaptive and self.use_kl_in_reward and self.kl_ctrl.kl_coef == 0,
            "{algorithm.filter_groups.enable} needs algorithm.filter_groups.metric: `score`, or a part of the reward "
            "such as `acc`": groups.enable and not groups.metric,
            "{algorithm.filter_groups.surplus} trains on groups of an older version, which {algorithm.max_staleness} "
            "forbids; set it to 1 or more, or surplus=discard": (
                groups.enable and groups.surplus == "carry" and self.max_staleness == 0
            ),
        }
