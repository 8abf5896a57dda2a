"""Settings of the two learners, policy and critic (`actor.*`, `critic.*`): loss, optimiser, sharding, batches."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Names of the aggregations of token losses into one number."""
KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names of the estimates of a KL at one token (`pipeline/kl_estimate.py`)."""
OFFLOADS = ("none", "optimizer", "all")
"""Parts of a learner that may wait in host memory."""
KL_LOSSES = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    name: str = setting("adamw", choices=("adamw", "adamw_8bit"))
    """Optimiser: `adamw`, or `adamw_8bit` (`pip install torchao`), which keeps AdamW's two averages in 8 bits with one
    scale per 256 numbers: 2 bytes per parameter instead of 8."""

    lr: float = setting(1e-6, at_least=0)
    """Peak learning rate."""

    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1)
    """Decay rates of AdamW's two averages."""

    eps: float = setting(1e-8, above=0)
    """Number added to AdamW's denominator."""

    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay of matrices. Vectors (norms, biases) are not decayed."""

    lr_scheduler_type: str = setting("constant", choices=("constant", "cosine", "linear"))
    """Learning-rate schedule after warm-up: `constant`, `cosine` or `linear`."""

    lr_warmup_steps: int = setting(-1, at_least=-1)
    """Optimiser steps of linear warm-up. -1 takes `lr_warmup_steps_ratio`."""

    lr_warmup_steps_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Share of all optimiser steps that is warm-up."""

    min_lr_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Final learning rate of `cosine` and `linear`, as a share of `lr`."""

    def warmup(self, steps: int) -> int:
        """Optimiser steps of the warm-up of a run of `steps`."""
        return int(self.lr_warmup_steps_ratio * steps) if self.lr_warmup_steps < 0 else self.lr_warmup_steps


@dataclass
class FSDPConfig:
    """Sharding of a model by FSDP2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward. Takes less memory and one more all-gather."""

    param_dtype: str | None = setting(None, choices=(None, "float32", "bfloat16"))
    """Type of the gathered weights and of the computation. Null is bfloat16 on GPUs, and `model.dtype` on CPUs. The
    trained weights stay in `model.dtype`."""

    reduce_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type in which gradients are summed over ranks."""

    offload: str = setting("none", choices=OFFLOADS)
    """State that waits in host memory between steps, for GPUs only: `none`; `optimizer`, which visits the GPU one
    parameter at a time in each step; or `all`, also weights and gradients, with the step on CPUs."""

    def compute_dtype(self, model_dtype: str, gpu: bool) -> str:
        """Return the type of the computation for a model whose weights have the type `model_dtype`."""
        return self.param_dtype or ("bfloat16" if gpu else model_dtype)


@dataclass
class ParallelConfig:
    """Division of a model over the train workers, in addition to FSDP. `trainer.num_workers` must be a multiple of
    `tensor * sequence * replicate`."""

    tensor: int = setting(1, at_least=1)
    """Tensor-parallel workers: neighbours on one node that see the same rows and each compute a part of every layer.
    The number must divide the model's heads and vocabulary."""

    sequence: int = setting(1, at_least=1)
    """Sequence-parallel (Ulysses) workers, for long rows: neighbours on one node that see the same rows. Each computes
    a part of the positions, and in attention a part of the heads. The number times `tensor` must divide the query
    heads, and the model must be able to attend over packed rows."""

    expert: int = setting(1, at_least=1)
    """Expert-parallel workers of a mixture of experts: each has different experts. 1, or the value of `tensor`."""

    replicate: int = setting(1, at_least=1)
    """Copies of the sharded weights that FSDP keeps (hybrid sharding), each on neighbouring workers that gather only
    from each other. For slow networks between nodes."""

    @property
    def ranks_with_same_rows(self) -> int:
        """Workers that see the same rows."""
        return self.tensor * self.sequence


@dataclass
class PolicyLossConfig:
    """Policy loss and the options of single losses."""

    loss_mode: str = setting("vanilla", path="code")
    """Policy loss: a name, or a function of your own as `package.module:function`."""

    clip_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """Share of the mini-batch's tokens whose gradient `clip_cov` removes; at least one token."""

    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of tokens that `clip_cov` may draw."""

    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of tokens that `clip_cov` may draw."""

    kl_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """Share of the mini-batch's tokens, with the highest covariance, that get the KL penalty of `kl_cov`; at least one
    token."""

    ppo_kl_coef: float = setting(0.1, at_least=0)
    """Weight of the KL penalty of `kl_cov`."""

    dro_beta: float | None = setting(None, above=0)
    """Weight of the squared log ratio in `dro`, which requires it."""

    dpo_beta: float = setting(0.1, above=0)
    """Scale of the rewards of `online_dpo`, which are log ratios of policy and reference."""

    tau_pos: float = setting(1.0, above=0)
    """Temperature of the gate of `sapo` for positive advantages."""

    tau_neg: float = setting(1.05, above=0)
    """Temperature of the gate of `sapo` for all other advantages."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of a loss of your own."""


@dataclass
class ActorConfig:
    """Update of the policy."""

    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)

    optim: OptimConfig = field(default_factory=OptimConfig)

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallelism of actor and critic."""

    clip_ratio: float = setting(0.2, above=0)
    """Clip range of PPO: the ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]."""

    clip_ratio_low: float | None = setting(None, above=0)
    """Lower clip range. Null takes `clip_ratio`."""

    clip_ratio_high: float | None = setting(None, above=0)
    """Upper clip range. Null takes `clip_ratio`."""

    clip_ratio_c: float = setting(3.0, above=1, infinite=True)
    """Dual clip: cap of the ratio for negative advantages."""

    loss_agg_mode: str = setting("token-mean", choices=AGG_MODES)
    """Aggregation of token losses into one number ([algorithms.md](algorithms.md#aggregation))."""

    loss_scale_factor: float | None = setting(None, above=0)
    """Divisor of `seq-mean-token-sum-norm`. Null takes `data.max_response_length`."""

    entropy_coeff: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus. 0: none."""

    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""

    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of the KL in the loss."""

    kl_loss_type: str = setting("low_var_kl", choices=KL_LOSSES)
    """[Estimate](algorithms.md#kl-to-the-reference-policy) of the KL in the loss."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Largest gradient norm. Gradients with a larger norm are scaled down to it."""

    ppo_epochs: int = setting(1, at_least=1)
    """Passes over an iteration's rows."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Prompts per optimiser step. Null takes `data.train_batch_size`."""

    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens in one forward pass of a rank; padding counts, in models that cannot attend over packed rows. The
    ranks of `actor.parallel.sequence` share a pass, which may hold this many tokens for each of them."""

    old_log_probs: str = setting("recompute", choices=("recompute", "engine"))
    """Old log-probs of the ratio: `recompute` takes a forward pass of the trainer before the update (decoupled mode),
    `engine` takes the engine's as sampled (bypass mode)."""

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
    """Value model and its update."""

    enable: bool | None = None
    """Train a critic. Null: if the advantage estimator reads values (`gae`)."""

    path: str | None = setting(None, path="model")
    """Hugging Face model for the critic's decoder: a folder or a hub name. Null takes `model.path`. The value head
    starts at 0."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    warmup: int = setting(0, at_least=0)
    """Iterations at the start in which only the critic is trained."""

    cliprange_value: float = setting(0.5, above=0, infinite=True)
    """Clip range of a new value around the row's value."""

    loss_agg_mode: str | None = setting(None, choices=(None, *AGG_MODES))
    """Aggregation of token losses into one number. Null takes the actor's."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Largest gradient norm. Gradients with a larger norm are scaled down to it."""

    ppo_epochs: int | None = setting(None, at_least=1)
    """Passes over an iteration's rows. Null takes the actor's."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Prompts per optimiser step. Null takes the actor's."""

    ppo_max_token_len_per_gpu: int | None = None
    """Most tokens in one forward pass of a rank, counted as for the actor. Null takes the actor's."""
