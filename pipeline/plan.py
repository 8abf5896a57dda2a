"""What a config amounts to: chunks, rows and optimiser steps per iteration, actors, CPUs, GPUs and memory per stage.

`python -m jobs.train --dry-run` prints it and exits; a real run prints the same plan and refuses to start where the
machine cannot hold it. Everything is worked out from the settings and from files of the models' folders; torch, Ray and
vLLM are not imported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.checks import check
from pipeline.config import Config, ConfigError
from pipeline.memory import Memory, estimate
from pipeline.notes import notes
from pipeline.placement import Resources, Seats, Stage, local_node, node_words, place
from pipeline.replay import REPLAY_CPUS
from pipeline.stages import (
    begun_prompts,
    scorers,
    uses_baselines,
    uses_critic,
    uses_engines,
    uses_filter,
)
from pipeline.train.config import ActorConfig, CriticConfig

SHARED_STAGE_CPUS = 1.0
"""CPUs of the prompt source and the tasks that cut its pages into chunks, which take turns."""
FILTER_CPUS = 0.1
"""Ray CPUs of the filter stage, which mostly waits."""


@dataclass(frozen=True)
class Updates:
    """How a learner goes over an iteration's rows."""

    mini_batches: int
    epochs: int

    @property
    def steps(self) -> int:
        """Optimiser steps per iteration."""
        return self.mini_batches * self.epochs


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run."""

    config: Config
    chunks_per_iteration: int
    chunks_per_rank: int
    rows_per_iteration: int
    rows_per_rank: int
    greedy_rows_per_iteration: int
    """Rows generated for the baselines of the estimator, which do not reach the trainer."""
    actor: Updates
    critic: Updates | None
    """None without a critic."""
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
    data, rollout, trainer = config.data, config.rollout, config.trainer
    chunks = data.train_batch_size // rollout.chunk_prompts
    rows = data.train_batch_size * rollout.n
    if train_rows is not None and data.train_max_samples > 0:
        train_rows = min(train_rows, data.train_max_samples)
    memory = estimate(config)
    return Plan(
        config=config,
        chunks_per_iteration=chunks,
        chunks_per_rank=chunks // trainer.num_workers,
        rows_per_iteration=rows,
        rows_per_rank=rows // trainer.num_workers,
        greedy_rows_per_iteration=data.train_batch_size * (uses_baselines(config) and uses_engines(config)),
        actor=_updates(config, config.actor),
        critic=_updates(config, config.critic) if uses_critic(config) else None,
        chunks_in_flight_per_engine=rollout.in_flight(chunks),
        iterations=_iterations(config, train_rows),
        train_rows=train_rows,
        stages=tuple(
            replace(stage, labels=trainer.placed(stage.name.split(",")[0]) or {}) for stage in _stages(config)
        ),
        memory=memory,
        notes=tuple(notes(config, chunks, memory)),
    )


def _updates(config: Config, learner: ActorConfig | CriticConfig) -> Updates:
    batch = config.data.train_batch_size
    mini = learner.ppo_mini_batch_size or config.actor.ppo_mini_batch_size or batch
    return Updates(batch // mini, learner.ppo_epochs or config.actor.ppo_epochs)


def _stages(config: Config) -> Iterator[Stage]:
    rollout, trainer = config.rollout, config.trainer
    yield Stage("prompts", 1, SHARED_STAGE_CPUS)
    if uses_engines(config):
        fewest = "rollout.num_engines" if rollout.min_engines is None else "rollout.min_engines"
        split = rollout.tensor_parallel_size > 1
        keys = (fewest, "rollout.num_cpus", "rollout.tensor_parallel_size" if split else "rollout.num_gpus")
        most = rollout.most if rollout.elastic else 0
        yield Stage("rollout", rollout.fewest, rollout.num_cpus, rollout.gpus, keys, most=most)
    else:
        yield Stage("replay", 1, REPLAY_CPUS, keys=("", "the replay stage", ""))
    yield Stage("reward, advantage", 1, config.reward.num_cpus, keys=("", "reward.num_cpus", ""), at_least=True)
    if uses_filter(config):
        yield Stage("filter", 1, FILTER_CPUS, keys=("", "the filter stage", ""))
    for name, pool in scorers(config).items():
        keys = (f"scoring.{name}.num_workers", f"scoring.{name}.num_cpus", f"scoring.{name}.num_gpus")
        yield Stage(name, pool.num_workers, pool.num_cpus, pool.num_gpus, keys)
    keys = ("trainer.num_workers", "trainer.cpus_per_worker", "trainer.gpus_per_worker")
    yield Stage("train", trainer.num_workers, trainer.cpus_per_worker, trainer.gpus, keys)


def _iterations(config: Config, train_rows: int | None) -> int | None:
    trainer, batch, warmup = config.trainer, config.data.train_batch_size, config.critic.warmup
    chunk, begun = config.rollout.chunk_prompts, begun_prompts(config)
    needed = batch // chunk * begun
    iterations = trainer.total_training_steps
    if iterations is None:
        if train_rows is None:
            return None
        iterations = train_rows * trainer.total_epochs // needed
    if iterations == 0:
        assert train_rows is not None
        more = f", which begins with {needed} (rollout.oversample)" if needed > batch else ""
        raise ConfigError(
            f"{train_rows} training prompts x trainer.total_epochs={trainer.total_epochs} = "
            f"{train_rows * trainer.total_epochs} do not fill one iteration of data.train_batch_size={batch}{more}; "
            "lower it, raise the epochs or set trainer.total_training_steps"
        )
    if warmup >= iterations:
        raise ConfigError(
            f"critic.warmup={warmup} leaves {iterations} - {warmup} = {iterations - warmup} iterations in which the "
            "policy is trained; lower it or train longer"
        )
    return iterations


def check_resources(
    plan: Plan, nodes: Iterable[Resources] | None = None, labels: Sequence[Mapping[str, str]] | None = None
) -> None:
    """Refuse a plan that does not fit, where Ray would wait for ever without a word.

    Args:
        plan: The plan of the run.
        nodes: Resources of each node of a Ray cluster; None for a local Ray, which has `trainer.ray_num_cpus` or the
            machine's CPUs, and the machine's GPUs.
        labels: Labels of each node; None where no node has any.

    Raises:
        ConfigError: CPUs or GPUs are too few in all or on the nodes with the labels that `trainer.placement` asks for,
            or no node can hold one actor, or the nodes cannot hold all actors together, or engines that are added
            would take the CPUs of tasks.
    """
    if nodes is None:
        told = plan.config.trainer.ray_num_cpus
        nodes = [local_node(told)]
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
    if plan.gpus > have_gpus:
        words, numbers = _sum((stage.count, stage.gpus, stage.keys[0], stage.keys[2]) for stage in plan.stages)
        raise ConfigError(
            f"the run needs {words} = {numbers} = {plan.gpus:g} GPUs and {place} {have_gpus:g}; lower one of them or "
            "use more GPUs"
        )
    if plan.cpus > have_cpus:
        words, numbers = _sum((stage.count, stage.cpus, stage.keys[0], stage.keys[1]) for stage in plan.stages)
        raise ConfigError(
            f"the run needs {words} + {SHARED_STAGE_CPUS:g} for prompts = {numbers} + {SHARED_STAGE_CPUS:g} = "
            f"{plan.cpus:g} CPUs and {cpu_place} {have_cpus:g}; {remedy}"
        )
    for stage in plan.stages:
        fitting = _labelled(plan, stage, nodes, labels or [{}] * len(nodes))
        if not any(node.get("CPU", 0.0) >= stage.cpus and node.get("GPU", 0.0) >= stage.gpus for node in fitting):
            raise ConfigError(
                f"no node can hold one {stage.name} actor of {stage.cpus:g} CPUs and {stage.gpus:g} GPUs; "
                f"the nodes have {', '.join(node_words(node) for node in fitting)}"
            )
    _check_seats(plan, nodes, labels or [{}] * len(nodes))


def _check_seats(plan: Plan, nodes: Sequence[Resources], labels: Sequence[Mapping[str, str]]) -> None:
    """Refuse what fits in sum and has no seats, and a pool that would grow at the expense of tasks."""
    if place(plan.stages, nodes, labels) is None:
        wanted = ", ".join(
            f"{stage.count} x {stage.name} of {stage.cpus:g} CPUs and {stage.gpus:g} GPUs" for stage in plan.stages
        )
        raise ConfigError(
            f"the nodes have enough in all, but not together for {wanted}: an actor has its CPUs from one node and its "
            f"part of a GPU from one GPU; the nodes have {', '.join(map(node_words, nodes))}"
        )
    tasks = [stage for stage in plan.stages if stage.at_least]
    for stage in plan.stages:
        for count in range(stage.count + 1, stage.most + 1):
            grown = [replace(other, count=count) if other is stage else other for other in plan.stages]
            if place((other for other in grown if other not in tasks), nodes, labels) is None:
                # More find room on further nodes alone.
                break
            if place(grown, nodes, labels) is None:
                raise ConfigError(
                    f"rollout.max_engines={stage.most}: {count} engines would take the CPUs of the tasks of "
                    f"{' and '.join(task.name for task in tasks)}, which would wait for ever; at most {count - 1} fit "
                    "beside them"
                )


def _labelled(
    plan: Plan, stage: Stage, nodes: Iterable[Resources], labels: Sequence[Mapping[str, str]]
) -> list[Resources]:
    """The nodes that the stage may run on.

    Raises:
        ConfigError: together they hold less than the stages that may run nowhere else need.
    """
    fitting = [node for node, own in zip(nodes, labels, strict=True) if stage.labels.items() <= own.items()]
    if not stage.labels:
        return fitting
    bound = [other for other in plan.stages if other.labels == stage.labels]
    for kind, need in (("GPU", sum(s.count * s.gpus for s in bound)), ("CPU", sum(s.count * s.cpus for s in bound))):
        have = sum(node.get(kind, 0.0) for node in fitting)
        if need > have:
            named = ",".join(f"{key}={value}" for key, value in stage.labels.items())
            raise ConfigError(
                f"{' + '.join(other.name for other in bound)} need {need:g} {kind}s on nodes labelled {named} "
                f"(trainer.placement) and those have {have:g}; add nodes (ray start --labels {named}) or change the "
                "placement"
            )
    return fitting


def _sum(terms: Iterable[tuple[int, float, str, str]]) -> tuple[str, str]:
    """The terms (count, each, and the keys of both) that have keys and are not 0, in words and in numbers."""
    named = [term for term in terms if term[1] and term[3]]
    words = (" x ".join(filter(None, (key, of_each))) for _, _, key, of_each in named)
    numbers = (f"{count} x {each:g}" if key else f"{each:g}" for count, each, key, _ in named)
    return " + ".join(words), " + ".join(numbers)


def seats(
    plan: Plan, nodes: Sequence[Resources] | None = None, labels: Sequence[Mapping[str, str]] | None = None
) -> list[Seats]:
    """Who would sit where; the arguments are those of `check_resources`. Empty where not everybody has a seat."""
    nodes = [local_node(plan.config.trainer.ray_num_cpus)] if nodes is None else nodes
    return place(plan.stages, nodes, labels or [{}] * len(nodes)) or []
