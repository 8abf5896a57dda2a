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

    share_prompts: bool | None = None
    """Pass a prompt through the model once for all samples of it that share a forward pass, in training and scoring:
    the same numbers, up to rounding, for less work where prompts are long or many are sampled. It is done where it is
    estimated to be clearly cheaper. Null does so in models that can (full attention, with `attn_implementation` sdpa),
    true refuses others, false never does. No GPU has run it yet."""


@dataclass
class OptimConfig:
    """AdamW and its schedule (`actor.optim.*`, `critic.optim.*`)."""

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
    """How FSDP2 shards the model (`actor.fsdp.*`, `critic.fsdp.*`)."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights between forward and backward: less memory, one more gather."""

    param_dtype: str | None = None
    """Type of the gathered weights and of the computation; null computes in `model.dtype`."""

    reduce_dtype: str = "float32"
    """Type in which gradients are summed over ranks."""


@dataclass
class PolicyLossConfig:
    """Which policy loss, and the options of those that have some (`actor.policy_loss.*`)."""

    loss_mode: str = "vanilla"
    """Registered name of the policy loss, or an import path `package.module:function`."""

    clip_cov_ratio: float = 2e-4
    """`clip_cov`: share of the mini-batch's tokens that lose their gradient, at least one token."""

    clip_cov_lb: float = 1.0
    """`clip_cov`: tokens are drawn from those whose covariance lies above this."""

    clip_cov_ub: float = 5.0
    """`clip_cov`: and below this."""

    kl_cov_ratio: float = 2e-4
    """`kl_cov`: share of the mini-batch's tokens, those of highest covariance, that pay a KL penalty; at least one."""

    ppo_kl_coef: float = 0.1
    """`kl_cov`: weight of that penalty."""

    dro_beta: float | None = None
    """`dro`: weight of the squared log ratio; must be given."""

    tau_pos: float = 1.0
    """`sapo`: temperature of the gate where the advantage is positive."""

    tau_neg: float = 1.05
    """`sapo`: temperature of the gate where it is not."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of a loss of your own, which reads them from here."""


@dataclass
class ActorConfig:
    """The policy update."""

    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """The loss."""

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

    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""

    kl_loss_coef: float = 0.001
    """Weight of that KL."""

    kl_loss_type: str = "low_var_kl"
    """Estimate of that KL: `kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3); with a `+` behind it, its value with
    the gradient of k2, which is the gradient of the KL itself."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""

    ppo_epochs: int = 1
    """Passes over an iteration's rows."""

    ppo_mini_batch_size: int | None = None
    """Prompts per optimiser step; null takes `data.train_batch_size` (one step per iteration)."""

    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens (padding counted) in one forward pass of one rank; rows are grouped by length to fit."""

    old_log_probs: str = "recompute"
    """Where the old log-probs of the ratio come from: `recompute` (a pass of the trainer before the update; decoupled
    mode) or `engine` (those the engine sampled with; bypass mode)."""

    logits_chunk_tokens: int = 1024
    """Response tokens whose logits are held at a time; bounds the memory of large vocabularies."""

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass
class CriticConfig:
    """The value model and its update."""

    enable: bool | None = None
    """Train a critic; null trains one where the advantage estimator reads values (`gae`)."""

    path: str | None = None
    """Hugging Face model whose decoder the critic starts from; null takes `model.path`. The value head starts at 0."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimiser and schedule."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""

    warmup: int = 0
    """First iterations in which only the critic is trained and the policy stays as it is."""

    cliprange_value: float = 0.5
    """A value may move this far from the one in the row before its loss is held."""

    loss_agg_mode: str | None = None
    """How token losses become one number; null takes the actor's."""

    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""

    ppo_epochs: int | None = None
    """Passes over an iteration's rows; null takes the actor's."""

    ppo_mini_batch_size: int | None = None
    """Prompts per optimiser step; null takes the actor's."""

    ppo_max_token_len_per_gpu: int | None = None
    """Most tokens (padding counted) in one forward pass of one rank; null takes the actor's."""


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

    checkpoint: float = 1800.0
    """Copying a checkpoint to the run's storage, which goes on behind training and is tried again while the storage is
    away; so is reading one."""

    train_start: float = 3600.0
    """From the start of the run, or a failure of the train workers, until they have begun: covers the wait for nodes
    and the loading of models and checkpoint."""

    collective: float = 5400.0
    """A train worker's wait for the others in a collective operation. Longer than `rows` and `checkpoint`, since a rank
    may wait that long for its own rows or its own copy while the others stand ready."""

    store: float = 120.0
    """Until a policy store that died is there again."""


PLACED = ("prompts", "rollout", "reward", "train", "reward_model", "reference", "value", "policy")
"""Stages that `trainer.placement` may name; `reward` stands for all tasks without an actor of their own."""


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
    """Give each train worker a GPU."""

    gpus_per_worker: float = 1.0
    """Ray GPUs of one train worker with `use_gpu`; a part of one leaves the rest to engines or replicas."""

    cpus_per_worker: float = 1
    """Ray CPUs of one train worker."""

    num_threads: int = 0
    """Compute threads of one CPU train worker; 0 takes `cpus_per_worker`."""

    early: bool | None = None
    """Begin to train on the first chunks of an iteration while the others are still generated: the same loss and
    gradient, up to rounding. Null does so wherever it is possible; `--dry-run` says whether it is, or why not."""

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

    best_metric: str | None = None
    """Validation metric, such as `val-core/countdown/acc/mean@1`, by which the best checkpoint is kept besides the
    newest ones; null keeps the newest alone. Only versions that are both validated and saved can be the best."""

    best_metric_mode: str = "max"
    """Whether the largest (`max`) or the smallest (`min`) value of `best_metric` is the best."""

    resume: str = "auto"
    """`auto` continues the run of this name when it has a checkpoint, `never` refuses to touch an existing run. Another
    value is the folder or URL of a checkpoint, or of a run whose newest one it is: a new run begins with it, and an
    existing one continues as with `auto`."""

    storage_path: str | None = None
    """Folder or URL (`s3://bucket/folder`, or any other file system that pyarrow or fsspec knows) for the checkpoints,
    which then lie in `STORAGE_PATH/experiment_name/checkpoints`; null keeps them in the run's folder."""

    max_failures: int = 3
    """Restarts of the train workers from the newest checkpoint, in a row, without another checkpoint between them,
    before the run ends; -1 for any number. Every new checkpoint counts as progress, so a run of many days outlives many
    lost nodes, and an error that comes again ends it soon. Errors that are known to come again are not tried again at
    all: settings, model or data that fail before the first iteration, `reward.max_error_rate`,
    `trainer.max_nonfinite_steps`, `trainer.max_log_prob_gap`, weights with a wrong checksum."""

    max_nonfinite_steps: int = 10
    """Optimiser steps in a row whose gradient may be infinite or not a number. They are left out and counted
    (`actor/skipped_steps`, `critic/skipped_steps`); one more ends the run."""

    max_log_prob_gap: float | None = None
    """Largest |engine - trainer| log-prob of a token; beyond it the run ends. Null only reports the gap. All tokens of
    an iteration are compared, with `actor.old_log_probs=engine` those of its first mini-batch, and none while
    `critic.warmup` lasts."""

    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    """Where metrics go besides `metrics.jsonl`: any of `console`, `mlflow`, `wandb`, `tensorboard`."""

    log_samples: int = 8
    """Sample trajectories shown in the tracker's table per validation and per 10 iterations."""

    weight_bucket_mb: int = 512
    """MiB of weights that travel as one buffer; bounds the extra memory of an update."""

    weight_transport: str = "object_store"
    """What an engine fetches of a new policy version: `object_store`, all weights; or `delta`, those that have changed
    since the version that it holds, losslessly, which takes a copy of the weights in the host memory of every train
    worker and engine. With `nixl` and `ipc` an engine reads all weights out of the train workers' memory by itself:
    `nixl` (`pip install nixl`) between any GPUs, nodes or CPUs, `ipc` where one train worker and the engines share one
    GPU. Either keeps `algorithm.max_staleness + 2` copies of a train worker's part of the weights, in `rollout.dtype`,
    on its device. No GPU has run them yet."""

    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    """Longest waits."""

    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of all workers."""

    placement: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels of the nodes that a stage may run on, by stage: `trainer.placement.rollout.role=gpu` keeps the engines on
    nodes that were started with `ray start --labels role=gpu`. Stages: `prompts`, `rollout`, `reward` (with advantage
    and all other tasks), `train` and the pools of `scoring`. A stage without labels runs anywhere."""

    @property
    def gpus(self) -> float:
        """Ray GPUs of one train worker."""
        return self.gpus_per_worker if self.use_gpu else 0.0

    def placed(self, stage: str) -> dict[str, str] | None:
        """Labels of the nodes that the stage may run on; None for any node."""
        return self.placement.get(stage) or None
