"""Compute the plan of a run: chunks, rows and optimiser steps per iteration; actors, CPUs, GPUs and memory per stage.

`slipstream train --dry-run` prints the plan and exits. The plan follows from the settings and the files of the models;
torch, Ray and vLLM are not imported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pipeline.config import Config, ConfigError
from pipeline.config.learner import OptimConfig
from pipeline.derived import (
    UpdateShape,
    chunk_prompts,
    scorer_key,
    scorers,
    uses_agent,
    uses_baselines,
    uses_critic,
    uses_engines,
    uses_filter,
)
from pipeline.plan import host
from pipeline.plan.fit import too_large
from pipeline.plan.gpus import Gpu
from pipeline.plan.memory import Memory, estimate, read_models
from pipeline.plan.placement import SHARED_STAGE_CPUS, Stage
from pipeline.plan.warnings import notes

FILTER_CPUS = 0.1
"""Ray CPUs of the filter stage, which mostly waits."""


@dataclass(frozen=True)
class Plan:
    """Numbers that follow from the settings of a run."""

    config: Config
    chunk_prompts: int
    """Number of prompts in a chunk."""
    chunks_per_iteration: int
    chunks_per_rank: int
    rows_per_iteration: int
    rows_per_rank: int
    greedy_rows_per_iteration: int
    """Number of greedy responses per iteration that the advantage estimator needs as baselines. They do not reach the
    trainer."""
    actor: UpdateShape
    critic: UpdateShape | None
    """Update of the critic; None without a critic."""
    chunks_in_flight_per_engine: int
    episodes_per_engine: int
    """Maximum number of training episodes that one engine runs at the same time, each in its own process; 0 without
    episodes."""
    iterations: int | None
    """Number of iterations of the run; None if the number of training prompts is not known."""
    train_rows: int | None
    """Number of training prompts, after `data.train_max_samples`; None if not known."""
    stages: tuple[Stage, ...]
    memory: Memory | None
    """Memory estimates; None if the model is not a local folder with safetensors files."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    gpu: Gpu | None = None
    """Kind of GPU that the memory estimates are compared with; None: no comparison."""
    too_large: tuple[str, ...] = field(default_factory=tuple)
    """Sentences on parts of the run that do not fit the GPUs."""
    lacks_memory: str | None = None
    """Sentence on the memory that a run on CPUs needs, if the machine has less."""

    @property
    def cpus(self) -> float:
        """Minimum number of Ray CPUs; with fewer, a stage would wait forever."""
        return sum(stage.count * stage.cpus for stage in self.stages)

    @property
    def schedules(self) -> dict[str, tuple[OptimConfig, int]]:
        """(Optimiser settings, total number of optimiser steps) by learner (`actor`, `critic`).

        `iterations` must be known.
        """
        assert self.iterations is not None
        config, length = self.config, self.iterations
        learners = {"actor": (config.actor.optim, (length - config.critic.warmup) * self.actor.steps)}
        if self.critic:
            learners["critic"] = (config.critic.optim, length * self.critic.steps)
        return learners

    @property
    def gpus(self) -> float:
        return sum(stage.count * stage.gpus for stage in self.stages)


def plan(config: Config, train_rows: int | None = None, gpu: Gpu | None = None, host_memory: int | None = None) -> Plan:
    """Compute the plan of `config`, on any machine.

    Args:
        config: settings of the run that have passed `checks.check`.
        train_rows: number of rows of the training files; None if unknown.
        gpu: kind of GPU that the memory estimates are compared with; None: no comparison.
        host_memory: bytes of memory of the machine that runs everything; None: no comparison.

    Raises:
        ConfigError: there are fewer prompts than one iteration needs, or all iterations are the critic's warm-up.
    """
    data, rollout, trainer = config.data, config.rollout, config.trainer
    prompts = chunk_prompts(config)
    chunks = data.train_batch_size // prompts
    rows = data.train_batch_size * rollout.n
    if train_rows is not None and data.train_max_samples > 0:
        train_rows = min(train_rows, data.train_max_samples)
    iterations = _iterations(config, train_rows)
    models = read_models(config)
    memory = estimate(config, models) if models else None
    return Plan(
        config=config,
        chunk_prompts=prompts,
        chunks_per_iteration=chunks,
        chunks_per_rank=chunks // trainer.num_workers,
        rows_per_iteration=rows,
        rows_per_rank=rows // trainer.num_workers,
        greedy_rows_per_iteration=data.train_batch_size * (uses_baselines(config) and uses_engines(config)),
        actor=UpdateShape.of(config, config.actor),
        critic=UpdateShape.of(config, config.critic) if uses_critic(config) else None,
        chunks_in_flight_per_engine=rollout.in_flight(chunks, prompts),
        episodes_per_engine=episodes_at_once(config),
        iterations=iterations,
        train_rows=train_rows,
        stages=tuple(
            replace(stage, labels=stage.labels or trainer.placed(re.split("[,.]", stage.name)[0]) or {})
            for stage in _stages(config)
        ),
        memory=memory,
        notes=tuple(notes(config, chunks, memory, episodes_at_once(config), iterations)),
        gpu=gpu,
        too_large=tuple(too_large(config, memory, gpu)) if memory and gpu else (),
        lacks_memory=host.too_large(config, models, host_memory) if models and host_memory else None,
    )


def episodes_at_once(config: Config) -> int:
    """Return the maximum number of training episodes that one engine runs at the same time; 0 without episodes."""
    rollout, prompts = config.rollout, chunk_prompts(config)
    chunks = config.data.train_batch_size // prompts
    admitted = -(-chunks * (1 + config.algorithm.max_staleness) // rollout.num_engines)
    episodes = min(admitted, rollout.in_flight(chunks, prompts)) * prompts * rollout.n
    return episodes if uses_agent(config) and uses_engines(config) else 0


def _stages(config: Config) -> Iterator[Stage]:
    rollout, trainer = config.rollout, config.trainer
    with_prompts = trainer.placed("prompts") or {}
    if uses_engines(config):
        yield Stage("prompts", 1, SHARED_STAGE_CPUS)
        fewest = "rollout.num_engines" if rollout.min_engines is None else "rollout.min_engines"
        split = rollout.tensor_parallel_size > 1
        keys = (fewest, "rollout.num_cpus", "rollout.tensor_parallel_size" if split else "rollout.num_gpus")
        most = rollout.most if rollout.elastic else 0
        yield Stage("rollout", rollout.fewest, rollout.num_cpus, rollout.gpus, keys, most=most)
        if config.agent.hosts:
            agent = config.agent
            fewest = "agent.hosts" if agent.min_hosts is None else "agent.min_hosts"
            most = 0 if agent.min_hosts is None else agent.hosts
            yield Stage("agent", agent.fewest_hosts, agent.host_cpus, keys=(fewest, "agent.host_cpus", ""), most=most)
    else:
        keys = ("", "the replay stage", "")
        yield Stage("replay", 1, SHARED_STAGE_CPUS, keys=keys, labels=with_prompts)
    yield Stage("reward, advantage", 1, config.reward.num_cpus, keys=("", "reward.num_cpus", ""), at_least=True)
    if uses_filter(config):
        yield Stage("filter", 1, FILTER_CPUS, keys=("", "the filter stage", ""), labels=with_prompts)
    for name, pool in scorers(config).items():
        key = scorer_key(name)
        keys = (f"{key}.num_workers", f"{key}.num_cpus", f"{key}.num_gpus")
        yield Stage(name, pool.num_workers, pool.num_cpus, pool.num_gpus, keys)
    keys = ("trainer.num_workers", "trainer.cpus_per_worker", "trainer.gpus_per_worker")
    yield Stage("train", trainer.num_workers, trainer.cpus_per_worker, trainer.gpus, keys)


def _iterations(config: Config, train_rows: int | None) -> int | None:
    trainer, batch, warmup = config.trainer, config.data.train_batch_size, config.critic.warmup
    iterations = trainer.total_training_steps
    if iterations is None:
        if train_rows is None:
            return None
        visits = train_rows * trainer.total_epochs
        iterations = visits // batch
        if iterations == 0:
            raise ConfigError(
                f"{train_rows} training prompts x trainer.total_epochs={trainer.total_epochs} = {visits} do not fill "
                f"one iteration of data.train_batch_size={batch}; lower it, raise the epochs or set "
                "trainer.total_training_steps"
            )
    if warmup >= iterations:
        raise ConfigError(
            f"critic.warmup={warmup} leaves {iterations} - {warmup} = {iterations - warmup} iterations in which the "
            "policy is trained; lower it or train longer"
        )
    return iterations
