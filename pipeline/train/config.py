"""Settings of the model, the actor and the training run (`model.*`, `actor.*`, `trainer.*`)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The language model that is trained."""

    path: str | None = None
    """Hugging Face model: a local folder or a hub name."""

    tokenizer_path: str | None = None
    """Tokenizer folder or hub name; null takes it from `path`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave it off unless you have read that code."""

    dtype: str = "float32"
    """Type of the trained (master) weights and of the optimiser state."""

    attn_implementation: str = "sdpa"
    """Attention of the trained model, as `transformers` names it."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


@dataclass
class OptimConfig:
    """AdamW and its schedule (`actor.optim.*`)."""

    lr: float = 1e-6
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moving-average factors."""

    eps: float = 1e-8
    """AdamW's denominator term."""

    weight_decay: float = 0.01
    """Decoupled weight decay of matrices (vectors such as norms and biases are not decayed)."""

    lr_scheduler_type: str = "constant"
    """Schedule after warm-up: `constant`, `cosine` or `linear`."""

    lr_warmup_steps: int = -1
    """Optimiser steps of linear warm-up; -1 uses `lr_warmup_steps_ratio`."""

    lr_warmup_steps_ratio: float = 0.0
    """Share of all optimiser steps spent in warm-up."""

    min_lr_ratio: float = 0.0
    """Share of the peak learning rate at which `cosine` and `linear` end."""


@dataclass
class FSDPConfig:
    """How FSDP2 shards the model (`actor.fsdp.*`)."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward: less memory, one more gather."""

    param_dtype: str | None = None
    """Type of the gathered weights and of the computation; null computes in `model.dtype`."""

    reduce_dtype: str = "float32"
    """Type in which gradients are summed over ranks."""


@dataclass
class ActorConfig:
    """The policy update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and schedule."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""

    clip_ratio: float = 0.2
    """PPO clip range: the probability ratio is held in [1 - clip_ratio_low, 1 + clip_ratio_high]."""

    clip_ratio_low: float | None = None
    """Lower clip range; null takes `clip_ratio`."""

    clip_ratio_high: float | None = None
    """Upper clip range; null takes `clip_ratio`. Larger than the lower one is DAPO's clip-higher."""

    clip_ratio_c: float = 3.0
    """Dual clip: bound on the ratio where the advantage is negative; above 1."""

    loss_agg_mode: str = "token-mean"
    """How token losses become one number: `token-mean`, `token-sum`, `seq-mean-token-sum`,
    `seq-mean-token-sum-norm` or `seq-mean-token-mean`, each over the whole global mini-batch."""

    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`; null takes `data.max_response_length`."""

    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""

    ppo_epochs: int = 1
    """Passes over an iteration's rows."""

    ppo_mini_batch_size: int | None = None
    """Prompts per optimiser step; null takes `data.train_batch_size` (one step per iteration)."""

    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens (padding counted) in one forward pass of one rank; rows are grouped by length to fit."""

    old_log_probs: str = "recompute"
    """Where the old log-probs of the ratio come from: `recompute` (a pass of the trainer before the update) or
    `engine` (those the engine sampled with)."""

    logits_chunk_tokens: int = 1024
    """Response tokens whose logits are held at a time; bounds the memory of large vocabularies."""


@dataclass
class DeadlineConfig:
    """Longest waits in seconds (`trainer.deadlines.*`); a wait beyond them ends the run with a sentence."""

    engine_start: float = 900.0
    """From the start of the stream until an engine has loaded its model."""

    admission: float = 1800.0
    """A chunk's wait for the policy version that may generate it; covers one update of the trainer."""

    chunk: float = 1800.0
    """The generation of one chunk."""

    rows: float = 3600.0
    """The trainer's wait for the next chunk of rows; covers engine start, admission and generation."""

    publish: float = 600.0
    """From a rank's publication of its weights until all ranks have published."""


@dataclass
class TrainerConfig:
    """The run: how long, how wide, what is kept."""

    project_name: str = "slipstream"
    """MLflow experiment (wandb project)."""

    experiment_name: str = "run"
    """Name of the run; its folder is `default_local_dir/experiment_name`."""

    default_local_dir: str = "runs"
    """Folder of all runs."""

    seed: int = 1
    """Seed of prompt order, sampling and everything else that is random."""

    total_epochs: int = 1
    """Passes over the training prompts."""

    total_training_steps: int | None = None
    """Iterations in all; overrides `total_epochs` when set."""

    num_workers: int = 1
    """Ray Train workers (FSDP ranks)."""

    use_gpu: bool = False
    """Give each train worker one GPU."""

    cpus_per_worker: float = 1
    """Ray CPUs of one train worker."""

    num_threads: int = 0
    """Compute threads of one CPU train worker; 0 takes `cpus_per_worker`."""

    ray_num_cpus: int | None = None
    """CPUs a local Ray is told it has; null takes the machine's. Phases of an on-policy run alternate, so a small
    machine may be told more than it has. Ignored when a cluster is joined."""

    object_store_gb: float | None = None
    """GiB of the object store of a local Ray; null leaves it to Ray. Ignored when a cluster is joined."""

    val_before_train: bool = True
    """Validate the initial policy."""

    test_freq: int = -1
    """Iterations between validations; the last policy is validated whenever there are validation files. -1: only
    before and after."""

    save_freq: int = -1
    """Iterations between checkpoints; -1: only at the end and on Ctrl-C."""

    max_ckpt_to_keep: int = 2
    """Newest checkpoints kept."""

    resume: str = "auto"
    """`auto` continues the run of this name when it has a checkpoint, `never` refuses to touch an existing run."""

    max_failures: int = 0
    """Restarts of the train workers after a failure before the run ends."""

    max_log_prob_gap: float | None = None
    """Largest |engine - trainer| log-prob of any token; beyond it the run ends. Null only reports the gap."""

    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    """Where metrics go besides `metrics.jsonl`: any of `console`, `mlflow`, `wandb`, `tensorboard`."""

    log_samples: int = 8
    """Sample trajectories shown in the tracker's table per validation and per 10 iterations."""

    weight_bucket_mb: int = 512
    """MiB of weights that travel as one buffer; bounds the extra memory of an update."""

    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    """Longest waits."""

    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all workers."""
