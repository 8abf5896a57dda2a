"""Settings of the two learners, policy and critic (`actor.*`, `critic.*`): loss, optimiser, sharding, batches."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Ways in which token losses become one number."""
KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names of the estimates of a KL at one token (`pipeline/kl_estimate.py`)."""
OFFLOADS = ("none", "optimizer", "all")
"""What a learner may leave in host memory."""
KL_LOSSES = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    name: str = setting("adamw", choices=("adamw", "adamw_8bit"))
    """`adamw_8bit` (`pip install torchao`) keeps AdamW's two averages in 8 bits, with a scale for each 256 numbers: 2
    bytes a parameter instead of 8."""

    lr: float = setting(1e-6, at_least=0)
    """Peak learning rate."""

    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1)
    """AdamW's moving-average factors."""

    eps: float = setting(1e-8, above=0)
    """AdamW's denominator term."""

    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""

    lr_scheduler_type: str = setting("constant", choices=("constant", "cosine", "linear"))
    """Schedule after warm-up: `constant`, `cosine` or `linear`."""

    lr_warmup_steps: int = setting(-1, at_least=-1)
    """Optimiser steps of linear warm-up; -1 uses `lr_warmup_steps_ratio`."""

    lr_warmup_steps_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Share of all optimiser steps in warm-up."""

    min_lr_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Share of the peak learning rate at which `cosine` and `linear` end."""

    def warmup(self, steps: int) -> int:
        """Optimiser steps of the warm-up of a run of `steps`."""
        return int(self.lr_warmup_steps_ratio * steps) if self.lr_warmup_steps < 0 else self.lr_warmup_steps


@dataclass
class FSDPConfig:
    """How FSDP2 shards the model."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward: less memory, one more gather."""

    param_dtype: str | None = setting(None, choices=(None, "float32", "bfloat16"))
    """Type of the gathered weights and the computation; null is bfloat16 on GPUs, and `model.dtype` on CPUs. The
    trained weights stay in `model.dtype`."""

    reduce_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type in which gradients are summed over ranks."""

    offload: str = setting("none", choices=OFFLOADS)
    """What waits in host memory, for GPUs alone: `optimizer` (its state, which visits the GPU parameter by parameter in
    each step) or `all` (also weights and gradients; the step is taken on CPUs)."""

    def compute_dtype(self, model_dtype: str, gpu: bool) -> str:
        """The type of the computation, of a model whose weights are of `model_dtype`."""
        return self.param_dtype or ("bfloat16" if gpu else model_dtype)


@dataclass
class ParallelConfig:
    """How a model is divided over the train workers beside FSDP; `trainer.num_workers` is a multiple of the product of
    `tensor`, `sequence` and `replicate`."""

    tensor: int = setting(1, at_least=1)
    """Tensor parallelism: so many workers, neighbours on a node, see the same rows, and each computes a part of every
    layer. It divides heads and vocabulary of the model."""

    sequence: int = setting(1, at_least=1)
    """Sequence parallelism (Ulysses), for long rows: so many workers, neighbours on a node, see the same rows, and each
    computes a part of the positions, in attention a part of the heads. It divides the query heads of the model (times
    `tensor`), which must be able to attend over packed rows."""

    expert: int = setting(1, at_least=1)
    """Expert parallelism of mixtures of experts: so many workers have different experts. 1, or as `tensor`."""

    replicate: int = setting(1, at_least=1)
    """FSDP keeps so many copies of the sharded weights, each on neighbouring workers, which alone gather from each
    other; for slow networks between nodes."""

    @property
    def ranks_with_same_rows(self) -> int:
        """Workers that see the same rows."""
        return self.tensor * self.sequence


@dataclass
class PolicyLossConfig:
    """Which policy loss, and the options of those that have some."""

    loss_mode: str = setting("vanilla", path="code")
    """Name of the policy loss, or an import path `package.module:function`."""

    clip_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """`clip_cov`: share of the mini-batch's tokens that lose their gradient; at least one token."""

    clip_cov_lb: float = 1.0
    """`clip_cov`: tokens are drawn above this covariance."""

    clip_cov_ub: float = 5.0
    """`clip_cov`: and below this covariance."""

    kl_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """`kl_cov`: share of tokens, those of highest covariance, with a KL penalty; at least one."""

    ppo_kl_coef: float = setting(0.1, at_least=0)
    """`kl_cov`: weight of that penalty."""

    dro_beta: float | None = setting(None, above=0)
    """`dro`: weight of the squared log ratio; required."""

    dpo_beta: float = setting(0.1, above=0)
    """`online_dpo`: scale of the rewards, which are log ratios of policy and reference."""

    tau_pos: float = setting(1.0, above=0)
    """`sapo`: temperature of the gate where the advantage is positive."""

    tau_neg: float = setting(1.05, above=0)
    """`sapo`: temperature of the gate where it is not."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of a loss of your own."""


@dataclass
class ActorConfig:
    """The policy update."""

    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)

    optim: OptimConfig = field(default_factory=OptimConfig)

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Of actor and critic."""

    clip_ratio: float = setting(0.2, above=0)
    """PPO clip range: the ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]."""

    clip_ratio_low: float | None = setting(None, above=0)
    """Lower clip range; null takes `clip_ratio`."""

    clip_ratio_high: float | None = setting(None, above=0)
    """Upper clip range; null takes `clip_ratio`."""

    clip_ratio_c: float = setting(3.0, above=1, infinite=True)
    """Dual clip: bound of the ratio, above 1, for negative advantages."""

    loss_agg_mode: str = setting("token-mean", choices=AGG_MODES)
    """How token losses become one number ([algorithms.md](algorithms.md#aggregation))."""

    loss_scale_factor: float | None = setting(None, above=0)
    """Divisor of `seq-mean-token-sum-norm`; null takes `data.max_response_length`."""

    entropy_coeff: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""

    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""

    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of that KL."""

    kl_loss_type: str = setting("low_var_kl", choices=KL_LOSSES)
    """[Estimate](algorithms.md#kl-to-the-reference-policy) of that KL."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Gradients with a larger norm are scaled down to this one."""

    ppo_epochs: int = setting(1, at_least=1)
    """Passes over an iteration's rows."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Prompts per optimiser step; null takes `data.train_batch_size`."""

    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens in one forward pass of a rank; padding counts, in models that cannot attend over packed rows. The
    ranks of `actor.parallel.sequence` share a pass, which may hold this many tokens for each of them."""

    old_log_probs: str = setting("recompute", choices=("recompute", "engine"))
    """Old log-probs of the ratio: `recompute` (a pass of the trainer before the update; decoupled mode) or `engine` (as
    sampled; bypass mode)."""

    logits_chunk_tokens: int = setting(1024, at_least=1)
    """Response tokens whose logits are in memory at a time."""

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        loss, parallel = self.policy_loss, self.parallel
        return {
            "{actor.policy_loss.clip_cov_lb} must be below {actor.policy_loss.clip_cov_ub}": (
                not loss.clip_cov_lb < loss.clip_cov_ub
            ),
            "{actor.parallel.expert} must be 1 or {actor.parallel.tensor}: experts are divided among the workers that "
            "see the same rows": parallel.expert not in (1, parallel.tensor),
        }


@dataclass
class CriticConfig:
    """The value model and its update."""

    enable: bool | None = None
    """Train a critic; null: if the advantage estimator reads values (`gae`)."""

    path: str | None = setting(None, path="model")
    """Hugging Face model for the critic's decoder; null takes `model.path`. The value head starts at 0."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    warmup: int = setting(0, at_least=0)
    """First iterations, in which only the critic is trained."""

    cliprange_value: float = setting(0.5, above=0, infinite=True)
    """Clip range of a value around the row's value."""

    loss_agg_mode: str | None = setting(None, choices=(None, *AGG_MODES))
    """How token losses become one number; null takes the actor's."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Gradients with a larger norm are scaled down to this one."""

    ppo_epochs: int | None = setting(None, at_least=1)
    """Passes over an iteration's rows; null takes the actor's."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Prompts per optimiser step; null takes the actor's."""

    ppo_max_token_len_per_gpu: int | None = None
    """Most tokens in one forward pass of a rank, as the actor's; null takes that."""
