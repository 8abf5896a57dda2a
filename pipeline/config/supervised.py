"""Settings of `python -m jobs.sft` and `python -m jobs.reward_model`."""

from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.learner import FSDPConfig, OptimConfig
from pipeline.config.model import ModelConfig
from pipeline.config.trainer import logger_problems


def _optim() -> OptimConfig:
    return OptimConfig(lr=1e-5, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.05, min_lr_ratio=0.1)


@dataclass
class SupervisedDataConfig:
    """Training and validation data: files, order and limits."""

    train_files: Any = setting(None, path="files")
    """Parquet files of training rows: a path, folder, glob or URL that pyarrow or fsspec opens, or a list of them."""

    val_files: Any = setting(None, path="files")
    """Parquet files of validation rows, given like `train_files`. Null: no validation."""

    train_batch_size: int = setting(64, at_least=1)
    """Number of rows per optimiser step, over all workers."""

    max_length: int = setting(2048, at_least=2)
    """Maximum length of a conversation, in tokens. For longer conversations see `truncation`."""

    shuffle: bool = True
    """Shuffle row groups, and rows within them, in each epoch."""

    val_max_samples: int = -1
    """Number of validation rows to use, from the first on. -1: all."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's `apply_chat_template`."""


@dataclass
class SupervisedTrainerConfig:
    """Length and resources of the run."""

    project_name: str = "slipstream"
    """Name of the MLflow experiment or wandb project. The run there has the name of the folder `out`."""

    total_epochs: int = setting(1, at_least=1)
    """Number of passes over the training data."""

    total_training_steps: int | None = setting(None, at_least=1)
    """Total number of optimiser steps; if set, `total_epochs` is ignored."""

    seed: int = 1
    """Seed of the order of rows."""

    num_workers: int = setting(1, at_least=1)
    """Number of Ray Train workers (FSDP ranks). It changes the speed, not the result."""

    use_gpu: bool = False
    """Give each worker one GPU."""

    cpus_per_worker: float = setting(1.0, above=0)
    """Ray CPUs of one worker."""

    num_threads: int = setting(0, at_least=0)
    """Number of compute threads of a CPU worker. 0 takes `cpus_per_worker`."""

    ray_num_cpus: int | None = setting(None, at_least=1)
    """Number of CPUs that a local Ray reports. Null takes the machine's number, or more if the workers need more. Has
    no effect if the run joins an existing cluster."""

    max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Maximum number of tokens in one forward pass of a worker. Padding counts too, if the model cannot attend over
    packed rows."""

    grad_clip: float = setting(1.0, above=0)
    """Maximum gradient norm. Gradients with a larger norm are scaled down to it."""

    test_freq: int = -1
    """Number of optimiser steps between validations. -1: only at the end."""

    save_freq: int = setting(-1, at_least=1, or_value=-1)
    """Number of optimiser steps between checkpoints, in `out/checkpoints`. -1: only at Ctrl-C. At the end, the model
    takes their place."""

    max_ckpt_to_keep: int = setting(2, at_least=1)
    """Number of checkpoints to keep during the run, from the newest on."""

    resume: str = setting("auto", choices=("auto", "never"))
    """Start of the run. `auto`: continue an unfinished run in `out` from its newest checkpoint. `never`: end with an
    error if `out` holds a run."""

    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    """Trackers of metrics, in addition to `metrics.jsonl`: any of `console`, `mlflow`, `wandb`, `tensorboard`."""

    data_timeout: float = setting(600.0, above=0)
    """Maximum wait for the next rows, for other workers, and for the copy of a checkpoint, in seconds."""

    start_timeout: float = setting(600.0, above=0)
    """Maximum wait until all workers have started, in seconds."""


@dataclass
class SupervisedConfig:
    """Settings that the jobs `sft`, `reward_model` and `dpo` share."""

    out: str | None = setting(None, path="files")
    """Folder for the trained model and the records of the run. On a cluster, all nodes must share it."""

    model: ModelConfig = field(default_factory=ModelConfig)

    optim: OptimConfig = field(default_factory=_optim)
    """Optimiser and schedule."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)

    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        return logger_problems(self.trainer.logger)


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    """Conversations to learn from: their columns and their maximum length."""

    messages_key: str = "messages"
    """Column of the conversation: chat messages. The loss counts the assistant's messages, except messages with a
    `loss_mask` of 0."""

    tools_key: str = "tools"
    """Column of the schemas of the conversation's tools, as a list or as JSON text. The column may be missing."""

    image_key: str = "images"
    """Column of the conversation's images with `model.vision`, as in prompt files: encoded images, or structs
    `{bytes, path}`. Each `<image>` in a message of another role than the assistant stands for the next one."""

    max_image_bytes: int = setting(1_000_000, at_least=1)
    """Maximum size of the encoded images of a conversation together, in bytes."""

    enable_thinking_key: str = "enable_thinking"
    """Column of the chat template's argument `enable_thinking`: true, false or null. The column may be missing."""

    truncation: str = setting("error", choices=("error", "right"))
    """Treatment of a conversation longer than `max_length`: `error` ends the run, `right` cuts its end."""


@dataclass
class SFTTeacherConfig:
    """Teacher on the files' answers: a frozen model, sharded over the workers, from whose distributions the model
    learns ([algorithms.md](algorithms.md#teachers))."""

    path: str | None = setting(None, path="model")
    """Hugging Face model with the model's vocabulary: a folder or a hub name. Null: no teacher."""

    weight: float = setting(1.0, above=0, at_most=1)
    """Weight of the divergence from the teacher in the loss; the cross-entropy of the answers has the rest. 1: only the
    divergence."""

    distill_top_k: int = setting(64, at_least=1)
    """Number of the teacher's most likely tokens in the divergence. All others together are one more outcome."""

    distill_beta: float = setting(0.0, at_least=0, at_most=1)
    """Divergence: 0 is KL(teacher || model), 1 is KL(model || teacher), a number between them the generalised
    Jensen-Shannon divergence."""

    dtype: str | None = setting(None, choices=(None, "float32", "bfloat16", "float16"))
    """Type of the teacher's weights and computation. Null takes `fsdp.param_dtype`; if that is null too, bfloat16 on
    GPUs and `model.dtype` on CPUs."""

    offload: bool = False
    """Keep the teacher in host memory, and copy each layer to the GPU when it is used."""


@dataclass
class SFTTrainerConfig(SupervisedTrainerConfig):
    """Length and resources of the run."""

    logits_chunk_tokens: int = setting(1024, at_least=1)
    """Number of tokens whose logits are in memory at a time. It limits the memory that a large vocabulary takes."""


@dataclass
class SFTConfig(SupervisedConfig):
    """Settings of supervised fine-tuning (`python -m jobs.sft`)."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)

    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    teacher: SFTTeacherConfig = field(default_factory=SFTTeacherConfig)

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        default, teacher = SFTTeacherConfig(), self.teacher
        unread = [
            f"{{teacher.{item.name}}}"
            for item in fields(teacher)
            if getattr(teacher, item.name) != getattr(default, item.name)
        ]
        return super().problems() | {
            f"{', '.join(unread)} without a teacher; set teacher.path": bool(unread) and teacher.path is None,
        }


@dataclass
class PairDataConfig(SupervisedDataConfig):
    """Columns of preference pairs."""

    prompt_key: str | None = "prompt"
    """Column of the prompt: chat messages, or the user's text. If the column is missing, or the key is null, the
    columns `chosen_key` and `rejected_key` hold whole conversations."""

    chosen_key: str = "chosen"
    """Column of the preferred response: chat messages, or the assistant's text."""

    rejected_key: str = "rejected"
    """Column of the rejected response, in the same form as the preferred one."""


@dataclass
class PreferenceDataConfig(PairDataConfig):
    """Data of preference pairs for a reward model: files, columns and limits."""

    margin_key: str | None = None
    """Column of margins, as numbers: the amount by which the reward of the preferred response should exceed the reward
    of the rejected one. Null: all margins are 0."""

    truncation: str = setting("error", choices=("error", "left", "drop"))
    """Treatment of a conversation longer than `max_length`: `error` ends the run, `left` cuts the start of the
    conversation (the reward is read at the end), `drop` leaves the pair out and counts it."""


@dataclass
class PreferenceConfig(SupervisedConfig):
    """Settings of reward-model training (`python -m jobs.reward_model`)."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
