"""Who sits where: the actors and tasks of a plan, put on the nodes of a cluster one by one.

Ray gives an actor a part of one GPU, never parts of two, and everything of one node. Sums say too little, therefore:
three workers of 0.6 of a GPU have no place on two GPUs. The search is greedy, as Ray's is, in a few orders.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

Resources = Mapping[str, float]
EPSILON = 1e-6
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True)
class Stage:
    """Ray actors or tasks of one stage, with what each of them holds."""

    name: str
    count: int
    cpus: float
    gpus: float = 0.0
    keys: tuple[str, str, str] = ("", "", "")
    """The keys of the three numbers above; empty where there is none."""
    at_least: bool = False
    """Tasks, of which Ray Data adds more where CPUs are free; `count` is the fewest with which the run moves."""
    most: int = 0
    """Actors that the stage may grow to; 0 where their number stays."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that it may run on."""


@dataclass
class Seats:
    """One node and who sits there."""

    node: Resources
    labels: Mapping[str, str]
    cpus: float = 0.0
    """CPUs that are left."""
    gpus: list[float] = field(default_factory=list)
    """What is left of each GPU."""
    without_gpu: list[str] = field(default_factory=list)
    on_gpu: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, node: Resources, labels: Mapping[str, str]) -> "Seats":
        count = int(node.get("GPU", 0.0))
        return cls(node, labels, node.get("CPU", 0.0), [1.0] * count, [], [[] for _ in range(count)])

    def take(self, stage: Stage) -> bool:
        """Seat one actor of the stage, if there is room."""
        if stage.cpus > self.cpus + EPSILON or not stage.labels.items() <= self.labels.items():
            return False
        if stage.gpus > 0:
            fitting = [number for number, left in enumerate(self.gpus) if left + EPSILON >= min(stage.gpus, 1.0)]
            needed = max(1, round(stage.gpus))
            if len(fitting) < needed:
                return False
            # The fullest first, so that whole GPUs stay whole.
            for number in sorted(fitting, key=lambda number: self.gpus[number])[:needed]:
                self.gpus[number] -= min(stage.gpus, 1.0)
                self.on_gpu[number].append(f"{stage.name} {stage.gpus:g}")
        else:
            self.without_gpu.append(stage.name)
        self.cpus -= stage.cpus
        return True

    def __str__(self) -> str:
        named = ", ".join(f"{key}={value}" for key, value in self.labels.items() if not key.startswith("ray.io/"))
        parts = [" + ".join(who) for who in self.on_gpu]
        seated = [f"{_count(same)} {who}".strip() for who, same in groupby(sorted(self.without_gpu))]
        numbered = [f"GPU {_range(numbers)}: {who or 'free'}" for who, numbers in _runs(parts)]
        return f"{node_words(self.node)}{f' ({named})' if named else ''}: {'; '.join([*numbered, *seated]) or 'nobody'}"


def place(
    stages: Iterable[Stage], nodes: Sequence[Resources], labels: Sequence[Mapping[str, str]]
) -> list[Seats] | None:
    """A seat for every actor of the stages; None where none was found.

    Args:
        stages: their `count` actors are seated.
        nodes: resources of each node, `{"CPU": 8.0, "GPU": 1.0}`.
        labels: labels of each node.
    """
    stages = list(stages)
    orders = (
        lambda stage: (not stage.labels, -stage.gpus, -stage.cpus),
        lambda stage: (not stage.labels, -stage.cpus, -stage.gpus),
        lambda stage: (-stage.gpus, -stage.cpus),
    )
    for order in orders:
        seats = [Seats.of(node, own) for node, own in zip(nodes, labels, strict=True)]
        actors = (stage for stage in sorted(stages, key=order) for _ in range(stage.count))
        if all(any(node.take(stage) for node in seats) for stage in actors):
            return seats
    return None


def lines(seats: Sequence[Seats]) -> Iterator[str]:
    """One line for each node, or for several that are alike."""
    for text, same in groupby(sorted(map(str, seats))):
        count = len(list(same))
        yield f"{count} nodes of {text}" if count > 1 else text


def local_node(num_cpus: int | None) -> Resources:
    """The node of a Ray on this machine, with the machine's GPUs and `num_cpus` or its CPUs."""
    return {"CPU": float(num_cpus or os.cpu_count() or 1), "GPU": float(local_gpus())}


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


def node_words(node: Resources) -> str:
    """What a node has, in words."""
    return f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs"


def _count(same: Iterable[str]) -> str:
    count = len(list(same))
    return f"{count} x" if count > 1 else ""


def _runs(parts: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Equal neighbours, with their numbers."""
    for who, numbered in groupby(enumerate(parts), key=lambda item: item[1]):
        yield who, [number for number, _ in numbered]


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
