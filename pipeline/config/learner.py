"""Settings of the two learners, policy and critic (`actor.*`, `critic.*`): loss, optimiser, sharding, batches."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Names of the ways to aggregate token losses into one number (`pipeline/losses`)."""
KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names of the estimators of the KL at one token (`pipeline/kl_estimate.py`)."""
OFFLOADS = ("none", "optimizer", "all")
"""Values of `fsdp.offload`: the state of a learner that is kept in host memory between steps."""
KL_LOSSES = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    name: str = setting("adamw", choices=("adamw", "adamw_8bit"))
    """Optimiser: `adamw`, or `adamw_8bit` (`pip install torchao`). The second keeps AdamW's two averages in 8 bits with
    one scale per 256 numbers, which takes 2 bytes per parameter instead of 8."""

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
    """Number of optimiser steps of linear warm-up. -1: the number follows from `lr_warmup_steps_ratio`."""

    lr_warmup_steps_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Fraction of all optimiser steps that is warm-up, from 0 to 1. Used if `lr_warmup_steps` is -1."""

    min_lr_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Final learning rate of `cosine` and `linear`, as a fraction of `lr`."""

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` optimiser steps."""
        return int(self.lr_warmup_steps_ratio * steps) if self.lr_warmup_steps < 0 else self.lr_warmup_steps


@dataclass
class FSDPConfig:
    """Sharding of a model by FSDP2."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a layer between its forward and backward pass. Takes less memory and one more
    all-gather."""

    param_dtype: str | None = setting(None, choices=(None, "float32", "bfloat16"))
    """Type of the gathered weights and of the computation. Null is bfloat16 on GPUs, and `model.dtype` on CPUs. The
    trained weights stay in `model.dtype`."""

    reduce_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Type in which gradients are summed over ranks."""

    offload: str = setting("none", choices=OFFLOADS)
    """State that is kept in host memory, for GPUs only. `none`: no state. `optimizer`: the optimiser state, which is
    copied to the GPU one parameter at a time in each step. `all`: also weights and gradients; the optimiser step then
    runs on CPUs."""

    def compute_dtype(self, model_dtype: str, gpu: bool) -> str:
        """Return the dtype of the forward and backward pass, for weights of the dtype `model_dtype`.

        Args:
            model_dtype: `model.dtype`.
            gpu: True if the model is on a GPU.
        """
        return self.param_dtype or ("bfloat16" if gpu else model_dtype)


@dataclass
class ParallelConfig:
    """Parallelism of a model over the train workers, in addition to FSDP. `trainer.num_workers` must be a multiple of
    `tensor * sequence * pipeline * replicate`."""

    tensor: int = setting(1, at_least=1)
    """Number of tensor-parallel workers: neighbours on one node that see the same rows and each compute a part of every
    layer. It must divide the numbers of the model's heads and of its vocabulary."""

    sequence: int = setting(1, at_least=1)
    """Number of sequence-parallel (Ulysses) workers, for long rows: neighbours on one node that see the same rows. Each
    computes a part of the positions, and in attention a part of the heads. `sequence * tensor` must divide the number
    of query heads, and the model must be able to attend over packed rows."""

    expert: int = setting(1, at_least=1)
    """Number of expert-parallel workers of a mixture of experts; each has different experts. 1, or the same as
    `tensor`. With `actor.strategy=megatron`: any divisor of the workers of a stage."""

    pipeline: int = setting(1, at_least=1)
    """Number of pipeline stages. Each stage has some neighbouring layers, divided by the other sizes over the workers
    of the stage. Workers of different stages see the same rows, and send each other hidden states. For models with
    more weights than FSDP can gather over the network while it computes."""

    replicate: int = setting(1, at_least=1)
    """Number of copies of the sharded weights (hybrid sharding). Each copy is on neighbouring workers, which gather
    weights only from each other. For slow networks between nodes."""

    @property
    def ranks_with_same_rows(self) -> int:
        """Number of workers that see the same rows."""
        return self.tensor * self.sequence * self.pipeline


@dataclass
class PolicyLossConfig:
    """Policy loss and the options of single losses."""

    loss_mode: str = setting("vanilla", path="code")
    """Policy loss: a name, or a function of your own as `package.module:function`."""

    clip_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """Fraction of the mini-batch's tokens that `clip_cov` draws and gives no gradient; at least one token."""

    clip_cov_lb: float = 1.0
    """`clip_cov` removes the gradient only of tokens whose covariance is above this bound."""

    clip_cov_ub: float = 5.0
    """`clip_cov` removes the gradient only of tokens whose covariance is below this bound."""

    kl_cov_ratio: float = setting(2e-4, above=0, at_most=1)
    """Fraction of the mini-batch's tokens that get the KL penalty of `kl_cov`: the tokens with the highest covariance,
    at least one."""

    ppo_kl_coef: float = setting(0.1, at_least=0)
    """Weight of the KL penalty of `kl_cov`."""

    dro_beta: float | None = setting(None, above=0)
    """Weight of the squared log ratio in `dro`, which requires it."""

    dpo_beta: float = setting(0.1, above=0)
    """Beta of `online_dpo`: factor of the log ratio of policy and reference in the implicit reward."""

    tau_pos: float = setting(1.0, above=0)
    """Temperature of the gate of `sapo` for positive advantages."""

    tau_neg: float = setting(1.05, above=0)
    """Temperature of the gate of `sapo` for all other advantages."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a policy loss of your own."""


@dataclass
class ActorConfig:
    """Update of the policy."""

    strategy: str = setting("fsdp", choices=("fsdp", "fsdp2", "megatron"))
    """Way to train the policy. `fsdp`, or `fsdp2`: PyTorch's FSDP2 with the sizes of `parallel`, for every model.
    `megatron`: the layers, schedules and optimiser of Megatron-Core, for Llama, Qwen2, Qwen3 and Qwen3-MoE on GPUs
    ([gpus.md](gpus.md#megatron))."""

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
    """Divisor of the summed loss of a response, with `loss_agg_mode=seq-mean-token-sum-norm`. Null takes
    `data.max_response_length`."""

    entropy_coeff: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus. 0: none."""

    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""

    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of the KL in the loss."""

    kl_loss_type: str = setting("low_var_kl", choices=KL_LOSSES)
    """[Estimator](algorithms.md#kl-to-the-reference-policy) of the KL in the loss."""

    kl_loss_ratio: bool = False
    """Multiply the KL of a token by the token's probability ratio. Then the KL in the loss is the one of the current
    policy, also after several steps on the same rows."""

    distill_coef: float = setting(0.0, at_least=0)
    """Weight of the distillation loss: the divergence of the teacher and the policy over the teacher's most likely
    tokens. 0: none."""

    distill_top_k: int = setting(64, at_least=1)
    """Number of the teacher's most likely tokens in the distillation loss. All others together are one more outcome."""

    distill_beta: float = setting(0.0, at_least=0, at_most=1)
    """Divergence of the distillation loss: 0 is KL(teacher || policy), 1 is KL(policy || teacher), a number between
    them the generalised Jensen-Shannon divergence ([algorithms.md](algorithms.md#teachers))."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Maximum gradient norm. Gradients with a larger norm are scaled down to it."""

    ppo_epochs: int = setting(1, at_least=1)
    """Number of passes over the rows of an iteration."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Number of prompts per optimiser step. Null takes `data.train_batch_size`."""

    ppo_max_token_len_per_gpu: int = 16384
    """Maximum number of tokens in one forward pass of a rank. Padding counts too, if the model cannot attend over
    packed rows. Sequence-parallel ranks share one pass, of up to `actor.parallel.sequence` times as many tokens."""

    old_log_probs: str = setting("recompute", choices=("recompute", "engine"))
    """Source of the old log-probs in the policy ratio. `recompute`: a forward pass of the trainer before the update
    (decoupled mode). `engine`: the log-probs that the engine returned when it sampled (bypass mode)."""

    logits_chunk_tokens: int = setting(1024, at_least=1)
    """Number of response tokens whose logits are in memory at a time."""

    @property
    def clip_low(self) -> float:
        """Lower clip range: `clip_ratio_low`, or `clip_ratio` if that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range: `clip_ratio_high`, or `clip_ratio` if that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        loss, parallel = self.policy_loss, self.parallel
        return {
            "{actor.policy_loss.clip_cov_lb} must be below {actor.policy_loss.clip_cov_ub}": (
                not loss.clip_cov_lb < loss.clip_cov_ub
            ),
            "{actor.parallel.expert} must be 1 or {actor.parallel.tensor}: experts are divided among the workers that "
            "see the same rows": parallel.expert not in (1, parallel.tensor) and self.strategy != "megatron",
        }


@dataclass
class CriticConfig:
    """Value model and its update."""

    enable: bool | None = None
    """Train a critic. Null: only if the advantage estimator reads values (`gae`)."""

    path: str | None = setting(None, path="model")
    """Hugging Face model from which the critic's decoder starts: a folder or a hub name. Null takes `model.path`. The
    weights of the value head start at 0."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    warmup: int = setting(0, at_least=0)
    """Number of iterations at the start in which only the critic is trained."""

    cliprange_value: float = setting(0.5, above=0, infinite=True)
    """Clip range of the value loss: a new value is clipped to within this distance of the value that the critic gave
    before the update."""

    loss_agg_mode: str | None = setting(None, choices=(None, *AGG_MODES))
    """Aggregation of token losses into one number. Null takes `actor.loss_agg_mode`."""

    grad_clip: float = setting(1.0, above=0, infinite=True)
    """Maximum gradient norm. Gradients with a larger norm are scaled down to it."""

    ppo_epochs: int | None = setting(None, at_least=1)
    """Number of passes over the rows of an iteration. Null takes `actor.ppo_epochs`."""

    ppo_mini_batch_size: int | None = setting(None, at_least=1)
    """Number of prompts per optimiser step. Null takes `actor.ppo_mini_batch_size`."""

    ppo_max_token_len_per_gpu: int | None = None
    """Maximum number of tokens in one forward pass of a rank, counted as in `actor.ppo_max_token_len_per_gpu`, which is
    also the value of null."""
