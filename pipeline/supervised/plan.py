"""The plan of a supervised run: numbers of steps and epochs, memory, and the table of `--dry-run`."""

from dataclasses import dataclass

from rich.table import Table

from pipeline.config import Config, ConfigError
from pipeline.config.scoring import TRAIN_WORKERS
from pipeline.config.supervised import SFTConfig, SFTTeacherConfig, SupervisedConfig
from pipeline.plan.gpus import DEFAULT, GPUS, local_gpu
from pipeline.plan.host import PROCESS, RAY, machine_memory
from pipeline.plan.memory import Memory, Models, estimate, pass_tokens, shown
from pipeline.plan.models import read_model
from pipeline.plan.table import count_words, worker_parts
from pipeline.supervised.data import CheckedRows, RowGroup


@dataclass(frozen=True)
class SupervisedPlan:
    """Numbers that follow from the settings and files of a supervised run."""

    config: SupervisedConfig
    rows: int
    """Number of training rows."""
    val_rows: int
    steps: int
    """Number of optimiser steps."""
    epochs: int
    """Number of passes over the training rows, the last of them perhaps not whole."""
    memory: Memory | None
    """Memory estimates; None if the model is not a local folder with safetensors files."""
    pass_tokens: int = 0
    """Maximum number of tokens in a worker's forward pass."""

    def render(self, checked: CheckedRows, out: str) -> Table:
        """Return the plan as a table; `checked` has the first rows, and `out` is the folder."""
        config, trainer, memory = self.config, self.config.trainer, self.memory
        table = Table(title=f"Plan of {out}", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        size = f", {count_words(memory.parameters)} parameters" if memory else ""
        table.add_row("model", f"{config.model.path}{size}")
        if isinstance(config, SFTConfig) and config.teacher.path:
            taught = config.teacher
            table.add_row(
                "teacher",
                f"{taught.path}, {taught.weight:.0%} of the loss, over {taught.distill_top_k} tokens "
                f"(distill_beta={taught.distill_beta:g})",
            )
        if rank := config.model.lora.rank:
            trained = f" with {count_words(memory.adapter)} parameters" if memory else ""
            table.add_row("adapters", f"LoRA of rank {rank}{trained}")
        table.add_row("rows", f"{self.rows:,} to train on, {self.val_rows:,} for validation")
        table.add_row("steps", f"{self.steps:,} of {config.data.train_batch_size} rows, in {self.epochs} epochs")
        table.add_row("tokens", self._tokens(checked))
        table.add_row("workers", f"{trainer.num_workers} on {'GPUs' if trainer.use_gpu else 'CPUs'}")
        save = f"every {trainer.save_freq} steps, and at Ctrl-C" if trainer.save_freq > 0 else "only at Ctrl-C"
        table.add_row("checkpoints", save + (f", {shown(memory.checkpoint * trainer.num_workers)}" if memory else ""))
        table.add_row("memory of a train worker", self._memory())
        table.add_row("trackers", ", ".join(trainer.logger) or "none")
        return table

    def _tokens(self, checked: CheckedRows) -> str:
        lengths = checked.lengths
        mean = sum(lengths) / len(lengths)
        total = f"{round(mean * self.config.data.train_batch_size * self.steps):,} in all steps"
        of = "all rows" if len(lengths) == self.rows else f"the first {len(lengths)} rows"
        return f"about {total}; {mean:.0f} a row, {max(lengths):,} at most in {of}"

    def _memory(self) -> str:
        memory, trainer = self.memory, self.config.trainer
        if memory is None:
            return "not estimated (no local folder with safetensors files)"
        of = (local_gpu() or GPUS[DEFAULT]).words if trainer.use_gpu else f"this machine's {shown(machine_memory())}"
        return f"{shown(memory.train_peak)} of {of}: {worker_parts(memory, self.pass_tokens)}"

    def lacking(self) -> str | None:
        """Describe the lack of memory on this machine, or on its kind of GPU; None if there is enough."""
        if self.memory is None:
            return None
        trainer = self.config.trainer
        gpu = local_gpu() if trainer.use_gpu else None
        if trainer.use_gpu and gpu is None:
            return None
        peak = self.memory.train_peak
        on_machine = trainer.num_workers * (peak + self.memory.train_kept + PROCESS) + RAY
        needed, there = (peak, gpu.memory) if gpu else (on_machine, machine_memory())
        if needed <= there:
            return None
        return (
            f"the run needs about {shown(needed)} of memory and {gpu.name if gpu else 'this machine'} has "
            f"{shown(there)}; lower trainer.max_token_len_per_gpu={trainer.max_token_len_per_gpu}, or set "
            "model.enable_gradient_checkpointing=true"
        )


def plan(
    config: SupervisedConfig, train: list[RowGroup], val: list[RowGroup], causal: bool, sides: int
) -> SupervisedPlan:
    """Compute the plan of a run.

    Args:
        config: settings of the run.
        train: row groups of the training files.
        val: row groups of the validation files.
        causal: False if the language-model head is replaced by a head with one output.
        sides: number of conversations in a row, each of at most `data.max_length` tokens.

    Raises:
        ConfigError: there are fewer rows than one step needs.
    """
    rows, val_rows = (sum(group.rows for group in groups) for groups in (train, val))
    batch, limit = config.data.train_batch_size, config.data.val_max_samples
    steps = config.trainer.total_training_steps or rows * config.trainer.total_epochs // batch
    if steps == 0:
        raise ConfigError(
            f"data.train_files holds {rows} rows, less than one data.train_batch_size={batch}; lower it or give more."
        )
    val_rows = min(val_rows, limit) if limit >= 0 else val_rows
    alike = _alike(config, sides)
    teacher = config.teacher if isinstance(config, SFTConfig) and config.teacher.path else None
    memory, tokens = _memory(alike, causal, teacher), pass_tokens(alike)
    return SupervisedPlan(config, rows, val_rows, steps, -(-steps * batch // rows), memory, tokens)


def _alike(config: SupervisedConfig, sides: int) -> Config:
    """Return the settings of an RL run whose train workers need as much memory."""
    alike = Config(model=config.model)
    alike.data.train_batch_size, alike.rollout.n = config.data.train_batch_size, sides
    alike.data.max_prompt_length, alike.data.max_response_length = 0, config.data.max_length
    alike.actor.optim, alike.actor.fsdp = config.optim, config.fsdp
    alike.actor.ppo_max_token_len_per_gpu = config.trainer.max_token_len_per_gpu
    # A head with one output has no logits of a vocabulary.
    alike.actor.logits_chunk_tokens = getattr(config.trainer, "logits_chunk_tokens", 0)
    alike.trainer.num_workers, alike.trainer.use_gpu = config.trainer.num_workers, config.trainer.use_gpu
    return alike


def _memory(alike: Config, causal: bool, teacher: SFTTeacherConfig | None) -> Memory | None:
    model = read_model(alike.model.path)
    if model is None or not model.parameters:
        return None
    policy = model if causal else model.with_value_head()
    if teacher is not None:
        alike.teacher.path, alike.teacher.placement, alike.actor.distill_coef = teacher.path, TRAIN_WORKERS, 1.0
        alike.teacher.dtype, alike.teacher.offload = teacher.dtype, teacher.offload
    taught = {"teacher": read_model(alike.teacher.path)}
    return estimate(alike, Models(policy, critic=None, reference=policy, reward=None, teachers=taught))
