"""What a config amounts to: chunks, rows and optimiser steps per iteration, actors, CPUs, GPUs and memory per stage.

`python -m jobs.train --dry-run` prints it and exits; a real run prints the same plan and refuses to start where the
machine cannot hold it. Everything is worked out from the settings and from files of the model's folder; torch, Ray and
vLLM are not imported.
"""

import json
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline.checks import check
from pipeline.config import Config, ConfigError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROW_BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 4
"""Ids, mask, log-probs, advantages and returns of one response token (`rows.py`)."""

SHARED_STAGE_CPUS = 1.0
"""CPUs of the prompt source and the tasks that cut its pages into chunks, which take turns."""

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Stage:
    """Ray actors or tasks of one stage, with what each of them holds."""

    name: str
    count: int
    cpus: float
    gpus: float = 0.0
    at_least: bool = False
    """Ray Data adds more tasks where CPUs are free; `count` is the fewest with which the run moves."""


@dataclass(frozen=True)
class Memory:
    """Estimate in bytes, of one process each unless said otherwise."""

    parameters: int
    """Number of parameters of the model (no bytes)."""
    train_weights: int
    train_gradients: int
    train_optimizer: int
    train_logits: int
    engine_weights: int
    engine_kv_needed: int
    """KV cache that lets `rollout.max_num_seqs` sequences of full length run at the same time."""
    rows: int
    """All response columns of one iteration in the object store."""

    @property
    def train_worker(self) -> int:
        """Bytes of one train worker without activations."""
        return self.train_weights + self.train_gradients + self.train_optimizer + self.train_logits


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run."""

    config: Config
    chunks_per_iteration: int
    chunks_per_rank: int
    rows_per_iteration: int
    rows_per_rank: int
    mini_batches: int
    optimizer_steps_per_iteration: int
    chunks_in_flight_per_engine: int
    iterations: int | None
    """Iterations of the whole run; None where the number of training prompts is not known."""
    train_rows: int | None
    stages: tuple[Stage, ...]
    memory: Memory | None
    """None where the model is not a local folder with safetensors files."""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def cpus(self) -> float:
        """Ray CPUs without which some stage would wait for ever."""
        return sum(stage.count * stage.cpus for stage in self.stages)

    @property
    def gpus(self) -> float:
        return sum(stage.count * stage.gpus for stage in self.stages)


def validate(config: Config, nodes: Iterable[Resources] | None = None, train_rows: int | None = None) -> Plan:
    """The plan of a config that can run here.

    Args:
        config: Settings of the run.
        nodes: Resources of each node of a Ray cluster, `{"CPU": 8.0, "GPU": 1.0}`; None for a local Ray.
        train_rows: Number of rows of the training files, when known.

    Raises:
        ConfigError: the config cannot be run, or does not fit the machine or cluster.
    """
    resolved = plan(config, train_rows)
    check_resources(resolved, nodes)
    return resolved


def plan(config: Config, train_rows: int | None = None) -> Plan:
    """What `config` amounts to, wherever it will run.

    Args:
        config: Settings of the run.
        train_rows: Number of rows of the training files, when known.

    Raises:
        ConfigError: the config cannot be run, or the rows do not fill one iteration.
    """
    check(config)
    data, rollout, actor, trainer = config.data, config.rollout, config.actor, config.trainer
    chunks = data.train_batch_size // rollout.chunk_prompts
    rows = data.train_batch_size * rollout.n
    mini_batches = data.train_batch_size // (actor.ppo_mini_batch_size or data.train_batch_size)
    if train_rows is not None and data.train_max_samples > 0:
        train_rows = min(train_rows, data.train_max_samples)
    notes = []
    if rollout.num_engines > chunks:
        notes.append(
            f"an iteration has {chunks} chunks for rollout.num_engines={rollout.num_engines}: "
            f"{rollout.num_engines - chunks} engines stay idle; a smaller rollout.chunk_prompts spreads the work"
        )
    if rollout.chunks_in_flight == 0 and chunks % rollout.num_engines:
        notes.append(
            f"{chunks} chunks do not divide evenly among rollout.num_engines={rollout.num_engines}; "
            "some engines have one chunk more to do"
        )
    memory = _memory(config)
    if memory and rollout.num_gpus == 0 and memory.engine_kv_needed > rollout.cpu_kvcache_space_gb << 30:
        notes.append(
            f"rollout.cpu_kvcache_space_gb={rollout.cpu_kvcache_space_gb} holds fewer than rollout.max_num_seqs="
            f"{rollout.max_num_seqs} sequences of full length ({_size(memory.engine_kv_needed)} needed); "
            "the engine queues the rest"
        )
    return Plan(
        config=config,
        chunks_per_iteration=chunks,
        chunks_per_rank=chunks // trainer.num_workers,
        rows_per_iteration=rows,
        rows_per_rank=rows // trainer.num_workers,
        mini_batches=mini_batches,
        optimizer_steps_per_iteration=mini_batches * actor.ppo_epochs,
        chunks_in_flight_per_engine=rollout.in_flight(chunks),
        iterations=_iterations(config, train_rows),
        train_rows=train_rows,
        stages=(
            Stage("prompts", 1, SHARED_STAGE_CPUS),
            Stage("rollout", rollout.num_engines, rollout.num_cpus, rollout.num_gpus),
            Stage("reward, advantage", 1, config.reward.num_cpus, at_least=True),
            Stage("train", trainer.num_workers, trainer.cpus_per_worker, float(trainer.use_gpu)),
        ),
        memory=memory,
        notes=tuple(notes),
    )


def _iterations(config: Config, train_rows: int | None) -> int | None:
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if train_rows is None:
        return None
    iterations = train_rows * trainer.total_epochs // batch
    if iterations == 0:
        raise ConfigError(
            f"{train_rows} training prompts x trainer.total_epochs={trainer.total_epochs} = "
            f"{train_rows * trainer.total_epochs} do not fill one iteration of data.train_batch_size={batch}; "
            "lower it, raise the epochs or set trainer.total_training_steps"
        )
    return iterations


def check_resources(plan: Plan, nodes: Iterable[Resources] | None = None) -> None:
    """Refuse a plan that does not fit, where Ray would wait for ever without a word.

    Args:
        plan: The plan of the run.
        nodes: Resources of each node of a Ray cluster; None for a local Ray, which has `trainer.ray_num_cpus` or the
            machine's CPUs, and the machine's GPUs.

    Raises:
        ConfigError: CPUs or GPUs are too few in all, or no node can hold one actor.
    """
    if nodes is None:
        told = plan.config.trainer.ray_num_cpus
        nodes = [{"CPU": float(told or os.cpu_count() or 1), "GPU": float(local_gpus())}]
        place = "this machine has"
        cpu_place = f"trainer.ray_num_cpus={told} gives the local Ray" if told else place
        remedy = (
            "lower one of them, or set trainer.ray_num_cpus (phases alternate, so it may exceed the machine's CPUs)"
        )
    else:
        place = cpu_place = "the cluster has"
        remedy = "lower one of them or add nodes"
    nodes = [dict(node) for node in nodes]
    have_cpus, have_gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    rollout, trainer = plan.config.rollout, plan.config.trainer
    if plan.gpus > have_gpus:
        raise ConfigError(
            f"the run needs rollout.num_engines x rollout.num_gpus + trainer.num_workers x (trainer.use_gpu) = "
            f"{rollout.num_engines} x {rollout.num_gpus:g} + {trainer.num_workers} x {int(trainer.use_gpu)} = "
            f"{plan.gpus:g} GPUs and {place} {have_gpus:g}; lower one of them or use more GPUs"
        )
    if plan.cpus > have_cpus:
        raise ConfigError(
            f"the run needs rollout.num_engines x rollout.num_cpus + trainer.num_workers x trainer.cpus_per_worker + "
            f"reward.num_cpus + {SHARED_STAGE_CPUS:g} for prompts = "
            f"{rollout.num_engines} x {rollout.num_cpus:g} + {trainer.num_workers} x {trainer.cpus_per_worker:g} + "
            f"{plan.config.reward.num_cpus:g} + {SHARED_STAGE_CPUS:g} = {plan.cpus:g} CPUs and {cpu_place} "
            f"{have_cpus:g}; {remedy}"
        )
    for stage in plan.stages:
        if not any(node.get("CPU", 0.0) >= stage.cpus and node.get("GPU", 0.0) >= stage.gpus for node in nodes):
            raise ConfigError(
                f"no node can hold one {stage.name} actor of {stage.cpus:g} CPUs and {stage.gpus:g} GPUs; "
                f"the nodes have {', '.join(_node(node) for node in nodes)}"
            )


def _node(node: Resources) -> str:
    return f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs"


def local_gpus() -> int:
    """GPUs of this machine that `CUDA_VISIBLE_DEVICES` leaves visible; 0 without a working driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _memory(config: Config) -> Memory | None:
    folder = Path(config.model.path or "")
    if not (folder / "config.json").is_file():
        return None
    parameters = count_parameters(folder)
    if parameters is None:
        return None
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    data, rollout, actor, workers = config.data, config.rollout, config.actor, config.trainer.num_workers
    tokens = data.max_prompt_length + data.max_response_length
    longest = model.get("max_position_embeddings")
    if longest is not None and tokens > longest:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + "
            f"{data.max_response_length} = {tokens} tokens, more than the {longest} of the model in {folder} "
            "(max_position_embeddings); shorten one of them"
        )
    shard = parameters * BYTES[config.model.dtype] // workers
    return Memory(
        parameters=parameters,
        train_weights=shard,
        train_gradients=shard,
        train_optimizer=2 * shard,
        # Logits, their softmax and the gradient of both, in float32.
        train_logits=3 * 4 * actor.logits_chunk_tokens * model.get("vocab_size", 0),
        engine_weights=parameters * BYTES[rollout.dtype],
        engine_kv_needed=_kv_bytes_per_token(model, BYTES[rollout.dtype]) * tokens * rollout.max_num_seqs,
        rows=data.train_batch_size
        * rollout.n
        * (data.max_prompt_length * 4 + data.max_response_length * ROW_BYTES_PER_TOKEN),
    )


def _kv_bytes_per_token(model: Mapping[str, Any], element: int) -> int:
    heads = model.get("num_attention_heads") or 1
    head_dim = model.get("head_dim") or model.get("hidden_size", 0) // heads
    return 2 * model.get("num_hidden_layers", 0) * (model.get("num_key_value_heads") or heads) * head_dim * element


def count_parameters(folder: str | Path) -> int | None:
    """Parameters of the model in `folder`, from the headers of its safetensors files; None where it has none.

    Raises:
        ConfigError: a safetensors file is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    return sum(_count(file) for file in files) if files else None


def _count(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}; save or download it again") from error
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def render(plan: Plan) -> Table:
    """The plan as a table for the terminal."""
    config, memory = plan.config, plan.memory
    table = Table(title=f"Plan of {config.trainer.experiment_name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "model", f"{config.model.path}" + (f", {_count_words(memory.parameters)} parameters" if memory else "")
    )
    table.add_row("training prompts", "not counted" if plan.train_rows is None else f"{plan.train_rows:,}")
    table.add_row("iterations", "as many as the prompts give" if plan.iterations is None else f"{plan.iterations:,}")
    table.add_row(
        "one iteration",
        f"{config.data.train_batch_size} prompts x {config.rollout.n} samples = {plan.rows_per_iteration} rows "
        f"in {plan.chunks_per_iteration} chunks of {config.rollout.chunk_prompts} prompts",
    )
    table.add_row("one train worker", f"{plan.rows_per_rank} rows in {plan.chunks_per_rank} chunks per iteration")
    table.add_row(
        "optimiser steps",
        f"{plan.mini_batches} mini-batches x {config.actor.ppo_epochs} epochs = "
        f"{plan.optimizer_steps_per_iteration} per iteration",
    )
    table.add_row("one engine", f"{plan.chunks_in_flight_per_engine} chunks in flight", end_section=True)
    for stage in plan.stages:
        many = f"{'at least ' if stage.at_least else ''}{stage.count} x {stage.cpus:g} CPU"
        table.add_row(stage.name, many + (f" + {stage.gpus:g} GPU" if stage.gpus else ""))
    table.add_row("in all", f"{plan.cpus:g} CPUs, {plan.gpus:g} GPUs", end_section=True)
    if memory is None:
        table.add_row("memory", "not estimated: the model is not a local folder with safetensors files")
    else:
        table.add_row(
            "memory of a train worker",
            f"{_size(memory.train_worker)} + activations: weights {_size(memory.train_weights)}, gradients "
            f"{_size(memory.train_gradients)}, optimiser {_size(memory.train_optimizer)}, "
            f"logits {_size(memory.train_logits)}",
        )
        limit = (
            f"{config.rollout.gpu_memory_utilization:.0%} of a GPU in all"
            if config.rollout.num_gpus
            else f"{config.rollout.cpu_kvcache_space_gb} GiB of KV cache given"
        )
        table.add_row(
            "memory of an engine",
            f"weights {_size(memory.engine_weights)}, KV cache for {config.rollout.max_num_seqs} full sequences "
            f"{_size(memory.engine_kv_needed)} ({limit})",
        )
        table.add_row("rows in the object store", f"{_size(memory.rows)} per iteration at most")
    for note in plan.notes:
        table.add_row("note", note)
    return table


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _count_words(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
