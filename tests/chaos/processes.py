"""Which process is what, by the titles that Ray gives its processes.

An actor's process is called after its class (`ray::RayTrainWorker`, with the method that runs behind it), the actors of
a stage after the stage (`ray::MapWorker(MapBatches(Rollout))`), a task's process after the task while it runs, and
`ray::IDLE` otherwise. A Ray worker that has called reward functions is the
parent of its reward workers.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

REWARD_WORKER = "pipeline.reward.program import"
EPISODE = "getattr(host, sys.argv[1])"
"""In the command of the processes of episodes: a keeper, its child the zygote, and that one's children."""
TITLES = {
    "engine": r"MapWorker\(.*MapBatches\(Rollout\)",
    "prompts": r"MapWorker\(.*MapBatches\(Prompts\)",
    "reference": r"MapWorker\(.*MapBatches\(Reference\)",
    "value": r"MapWorker\(.*MapBatches\(Value\)",
    "train worker": r"ray::RayTrainWorker",
    "store": r"ray::PolicyStore",
    "controller": r"ray::TrainController",
    "coordinator": r"ray::SplitCoordinator",
    "light task": r"ray::(?!MapWorker|.*Reward).*MapBatches\(",
    "host": r"ray::Host",
    "service": r"ray::(DatasetManager|ActorLocationTracker|_AutoscalingCoordinatorActor|_StatsActor)",
}
"""Regular expressions for the beginning of a title (`ray::` may be left out of it)."""
WORKERS = (*TITLES, "reward task", "reward worker", "zygote")


@dataclass(frozen=True)
class Found:
    """A process of the run."""

    kind: str
    pid: int
    created: float
    """Tells it from a later process with the same number."""
    title: str


def kind_of(title: str) -> str | None:
    """What the process with this title is; None for one that is nothing of its own, such as an idle worker."""
    if REWARD_WORKER in title:
        return "reward worker"
    if not title.startswith("ray::"):
        return None
    for kind, pattern in TITLES.items():
        if re.match(pattern if pattern.startswith("ray::") else f"ray::{pattern}", title):
            return kind
    return None


def workers(roots: Iterable[int]) -> list[Found]:
    """The workers of Ray that descend from the processes `roots`, and their reward workers."""
    found: list[Found] = []
    parents: dict[int, psutil.Process] = {}
    for process in (child for root in roots for child in descendants(root)):
        try:
            title = " ".join(process.cmdline()).strip()
            kind = kind_of(title)
            if kind is not None:
                found.append(Found(kind, process.pid, process.create_time(), title))
            if kind == "reward worker" and (parent := process.parent()) is not None:
                parents[parent.pid] = parent
            if EPISODE in title and _generation(process) == 2:
                found.append(Found("zygote", process.pid, process.create_time(), "zygote"))
        except psutil.Error:
            continue
    for pid, parent in parents.items():
        with contextlib.suppress(psutil.Error):
            found.append(Found("reward task", pid, parent.create_time(), " ".join(parent.cmdline()).strip()))
    return found


def _generation(process: psutil.Process) -> int:
    """How many processes of episodes there are from the keeper to this one, both included."""
    parent = process.parent()
    own = parent is not None and EPISODE in " ".join(parent.cmdline())
    return 1 + (_generation(parent) if own and parent is not None else 0)


def descendants(root: int) -> list[psutil.Process]:
    """All processes that the process `root` has started, directly or not; none where it has ended."""
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return []


def kill_tree(root: int) -> None:
    """SIGKILL to `root` and everything it has started."""
    family = descendants(root)
    with contextlib.suppress(psutil.Error):
        family.insert(0, psutil.Process(root))
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()
