"""Place the actors and tasks of a run on the nodes of a cluster, and check that they fit.

Ray takes an actor's CPUs from one node and its fraction of a GPU from one GPU, so it is not enough to compare sums:
three workers with 0.6 GPU each do not fit on two GPUs. The search is greedy like Ray's, in a few orders.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pipeline.config import ConfigError

Resources = Mapping[str, float]
"""Resources of a node or an actor: numbers of CPUs and GPUs, such as `{"CPU": 8.0, "GPU": 1.0}`."""
SHARED_STAGE_CPUS = 1.0
"""Number of CPUs that the prompt source shares with the tasks that cut blocks of prompts into chunks; they run in
turns."""
EPSILON = 1e-6
"""Tolerance in comparisons of resources; Ray counts them in units of 0.0001."""


@dataclass(frozen=True)
class Stage:
    """The Ray actors or tasks of one stage: their number (`count`), and `cpus` and `gpus` of each."""

    name: str
    count: int
    cpus: float
    gpus: float = 0.0
    keys: tuple[str, str, str] = ("", "", "")
    """Names of the settings of `count`, `cpus` and `gpus`, for error texts; empty without a setting."""
    at_least: bool = False
    """True for tasks: `count` is the minimum with which the run advances, and Ray Data runs more on free CPUs."""
    most: int = 0
    """Maximum number of actors if it may grow during the run; 0 if it is fixed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""

    @property
    def needs(self) -> Resources:
        """Resources of one actor or task."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def where(self) -> str:
        """The required labels as text, such as ` on nodes labelled role=gpu`; empty without labels."""
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        return f" on nodes labelled {labels}" if labels else ""


@dataclass
class Node:
    """One node during placement, with its free resources."""

    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = field(init=False)
    gpus: list[float] = field(init=False)
    """Free fraction of each GPU."""
    on_gpu: list[list[str]] = field(init=False)
    """For each GPU, the stages of the actors on it, as name and number of GPUs (`train 0.6`)."""
    without_gpu: list[str] = field(default_factory=list)
    """Name of the stage of each actor on this node that has no GPU."""

    def __post_init__(self) -> None:
        count = int(self.resources.get("GPU", 0.0))
        self.cpus = self.resources.get("CPU", 0.0)
        self.gpus = [1.0] * count
        self.on_gpu = [[] for _ in range(count)]

    def take(self, stage: Stage) -> bool:
        """Place one actor of `stage` on this node if it fits. Returns True if it was placed."""
        if stage.cpus > self.cpus + EPSILON or not stage.labels.items() <= self.labels.items():
            return False
        if stage.gpus > 0:
            share = min(stage.gpus, 1.0)
            fitting = [number for number, left in enumerate(self.gpus) if left + EPSILON >= share]
            needed = max(1, round(stage.gpus))
            if len(fitting) < needed:
                return False
            # Take the GPUs with the least free fraction first, so that free GPUs stay free.
            for number in sorted(fitting, key=lambda number: self.gpus[number])[:needed]:
                self.gpus[number] -= share
                self.on_gpu[number].append(f"{stage.name} {stage.gpus:g}")
        else:
            self.without_gpu.append(stage.name)
        self.cpus -= stage.cpus
        return True

    def __str__(self) -> str:
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items() if not key.startswith("ray.io/"))
        parts = []
        for names, numbered in groupby(enumerate(self.on_gpu), key=lambda item: " + ".join(item[1])):
            numbers = [number for number, _ in numbered]
            span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            parts.append(f"GPU {span}: {names or 'free'}")
        for name, count in sorted(Counter(self.without_gpu).items()):
            parts.append(f"{count} x {name}" if count > 1 else name)
        return f"{describe(self.resources)}{f' ({labels})' if labels else ''}: {'; '.join(parts) or 'empty'}"


def place(stages: Iterable[Stage], nodes: Sequence[Node]) -> list[Node]:
    """Place all actors of `stages` on copies of `nodes`. Returns the copies, or an empty list if no placement is
    found."""
    stages = list(stages)
    orders = (
        lambda stage: (not stage.labels, -stage.gpus, -stage.cpus),
        lambda stage: (not stage.labels, -stage.cpus, -stage.gpus),
        lambda stage: (-stage.gpus, -stage.cpus),
    )
    for order in orders:
        placed = [Node(node.resources, node.labels) for node in nodes]
        actors = (stage for stage in sorted(stages, key=order) for _ in range(stage.count))
        if all(any(node.take(stage) for node in placed) for stage in actors):
            return placed
    return []


def lines(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield one line of text per node, or per group of equal nodes."""
    for text, count in sorted(Counter(map(str, nodes)).items()):
        yield f"{count} nodes of {text}" if count > 1 else text


def check_resources(stages: Sequence[Stage], num_cpus: int | None = None, nodes: Sequence[Node] | None = None) -> None:
    """Refuse stages that do not fit: Ray would wait forever without a message.

    Args:
        stages: stages of the plan.
        num_cpus: `trainer.ray_num_cpus`, the number of CPUs of a local Ray; None takes the machine's number.
        nodes: empty nodes of a Ray cluster; None for a local Ray on this machine.

    Raises:
        ConfigError: the nodes have too few CPUs or GPUs in total; or no placement is found that respects nodes and
            labels; or engines that an elastic pool adds later would take the CPUs that tasks need.
    """
    holder = cpu_holder = "the cluster has" if nodes is not None else "this machine has"
    remedy = "lower one of them or add nodes"
    if nodes is None:
        nodes = [local_node(num_cpus)]
        cpu_holder = f"trainer.ray_num_cpus={num_cpus} gives the local Ray" if num_cpus else holder
        remedy = "lower one of them, or raise trainer.ray_num_cpus (phases alternate, so it may exceed the CPUs)"
    for kind, has, advice in (
        ("GPU", holder, "lower one of them or use more GPUs"),
        ("CPU", cpu_holder, remedy),
    ):
        have = sum(node.resources.get(kind, 0.0) for node in nodes)
        need = sum(stage.count * stage.needs[kind] for stage in stages)
        if need > have + EPSILON:
            words, numbers = _sum(stages, kind)
            if kind == "CPU" and any(stage.name == "prompts" for stage in stages):
                words, numbers = f"{words} + {SHARED_STAGE_CPUS:g} for prompts", f"{numbers} + {SHARED_STAGE_CPUS:g}"
            raise ConfigError(f"the run needs {words} = {numbers} = {need:g} {kind}s and {has} {have:g}; {advice}")
    if not place(stages, nodes):
        wanted = ", ".join(f"{stage.count} x {stage.name} of {describe(stage.needs)}{stage.where}" for stage in stages)
        there = ", ".join(map(str, nodes))
        raise ConfigError(
            f"the nodes have enough CPUs and GPUs in all, but no placement was found for {wanted}: an actor takes its "
            "CPUs from one node and its part of a GPU from one GPU, on a node with the labels of trainer.placement; "
            f"the nodes have {there}"
        )
    _check_growth(stages, nodes)


def _check_growth(stages: Sequence[Stage], nodes: Sequence[Node]) -> None:
    """Raise ConfigError if a pool of engines or hosts, when it grows, would take the CPUs that tasks need."""
    actors = [stage for stage in stages if not stage.at_least]
    words = {"rollout": ("rollout.max_engines", "engines"), "agent": ("agent.hosts", "hosts of environments")}
    for stage in actors:
        for count in range(stage.count + 1, stage.most + 1):
            grown = replace(stage, count=count)
            if not place([grown if other is stage else other for other in actors], nodes):
                # More actors need more nodes.
                break
            if not place([grown if other is stage else other for other in stages], nodes):
                tasks = " and ".join(task.name for task in stages if task.at_least)
                key, what = words[stage.name]
                raise ConfigError(
                    f"{key}={stage.most}: {count} {what} would take the CPUs of the tasks of {tasks}, which would wait "
                    f"forever; at most {count - 1} fit with them"
                )


def local_node(num_cpus: int | None) -> Node:
    """Return this machine as a node of a local Ray, with `num_cpus` CPUs; None takes the machine's number."""
    return Node({"CPU": float(num_cpus or os.cpu_count() or 1), "GPU": float(local_gpus())})


def local_gpus() -> int:
    """Return the number of this machine's GPUs that `CUDA_VISIBLE_DEVICES` makes visible; 0 without a working
    driver."""
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


def describe(resources: Resources) -> str:
    """Return resources as text, such as `8 CPUs and 1 GPUs`."""
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _sum(stages: Iterable[Stage], kind: str) -> tuple[str, str]:
    """Return the sum of the CPUs or GPUs (`kind`) that stages need, as text of settings and as text of numbers.

    Stages without a setting are left out.
    """
    words, numbers = [], []
    for stage in stages:
        each, key = stage.needs[kind], stage.keys[2 if kind == "GPU" else 1]
        if each and key:
            words.append(f"{stage.keys[0]} x {key}" if stage.keys[0] else key)
            numbers.append(f"{stage.count} x {each:g}" if stage.keys[0] else f"{each:g}")
    return " + ".join(words), " + ".join(numbers)
