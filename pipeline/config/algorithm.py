"""Settings of advantages, KL in the reward, off-policy correction and the order of the stream (`algorithm.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.learner import KL_ESTIMATES


@dataclass
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`fixed`, or `adaptive`: raised while the KL is above `target_kl`, lowered while below."""

    kl_coef: float = setting(0.001, at_least=0)
    """The coefficient; of an adaptive controller, the first one."""

    target_kl: float = setting(0.1, above=0)
    """KL per token that the adaptive controller aims at."""

    horizon: int = setting(10000, at_least=1)
    """Rows over which the adaptive controller may change the coefficient by 20 percent."""


@dataclass
class RolloutCorrectionConfig:
    """Correction of the gap between the engine's policy and the trainer's."""

    rollout_is: str | None = None
    """Importance weights: `token`, `sequence` (one per response) or `none`. Null takes `token` if
    `algorithm.max_staleness` is above 0 and the loss does not weigh by that ratio already."""

    rollout_is_threshold: str = "2.0"
    """One number caps the weights; `low_high`, such as `"0.5_2.0"`, sets weights outside to 0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the iteration."""

    rollout_rs: str | None = None
    """Rejection [rules](algorithms.md#off-policy-correction), comma separated; null rejects nothing."""

    rollout_rs_threshold: str | None = None
    """One bound per rule, comma separated."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: groups whose rewards all agree teach nothing, and others are
    generated in their place."""

    enable: bool = False
    """Leave out groups that agree, and generate until `data.train_batch_size` others are there."""

    metric: str = "score"
    """Value that is compared: `score`, or a part of the reward, such as `acc`."""

    max_num_gen_batches: int = setting(10, at_least=1)
    """Most batches of `data.train_batch_size` groups generated for one iteration; if they do not fill it, the run
    ends."""

    surplus: str = setting("discard", choices=("discard", "carry"))
    """Groups that the iteration has no room for: `discard` them, or `carry` them into the next (needs
    `algorithm.max_staleness` above 0)."""


@dataclass
class AlgorithmConfig:
    """How rewards become advantages, and how old a row may be."""

    adv_estimator: str = setting("grpo", path="code")
    """Name of the advantage estimator, or an import path `package.module:function`."""

    adv_estimator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of an estimator of your own."""

    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per token of `gae`, `reinforce_plus_plus` and `remax`."""

    turn_gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per turn of an episode, of `turn_grpo`, and beside `gamma` of `gae`, `reinforce_plus_plus` and
    `remax`."""

    lam: float = setting(1.0, at_least=0, at_most=1)
    """GAE's lambda: 1 is the whole return, 0 one step."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages of `grpo`, `turn_grpo`, `gdpo` and `grpo_passk` by the group's standard deviation."""

    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Rewards that `gdpo` normalises one by one: parts of the reward, or `score`."""

    gdpo_reward_weights: list[float] | None = None
    """Weight of each of `gdpo_reward_keys`; null: equal."""

    f_norm: float = setting(1.0, above=0)
    """Divisor of `gpg` advantages."""

    handle_zero_tail: bool = True
    """Optimal token baselines, where only one response of the group reaches: true takes a baseline of 0, false the
    response's own return."""

    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` times the KL to the reference from each token's reward."""

    kl_penalty: str = setting("kl", choices=KL_ESTIMATES)
    """[Estimate](algorithms.md#kl-to-the-reference-policy) of the KL in the reward."""

    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)

    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    max_staleness: int = setting(0, at_least=0)
    """Policy versions that a row may be older than the one that trains on it. 0 is strictly on-policy; 1 hides the
    shorter of generation and training."""

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        adaptive, groups = self.kl_ctrl.type == "adaptive", self.filter_groups
        return {
            "{algorithm.kl_ctrl.type} adapts the KL in the reward and {algorithm.use_kl_in_reward}; set that to true, "
            "or the type to fixed (the KL in the loss has the fixed weight actor.kl_loss_coef)": (
                adaptive and not self.use_kl_in_reward
            ),
            "{algorithm.kl_ctrl.kl_coef} with {algorithm.kl_ctrl.type}: the controller multiplies the coefficient, and "
            "0 stays 0; begin above 0": adaptive and self.use_kl_in_reward and self.kl_ctrl.kl_coef == 0,
            "{algorithm.filter_groups.enable} needs algorithm.filter_groups.metric: `score`, or a part of the reward "
            "such as `acc`": groups.enable and not groups.metric,
            "{algorithm.filter_groups.surplus} trains on groups of an older version, which {algorithm.max_staleness} "
            "forbids; set it to 1 or more, or surplus=discard": (
                groups.enable and groups.surplus == "carry" and self.max_staleness == 0
            ),
        }
