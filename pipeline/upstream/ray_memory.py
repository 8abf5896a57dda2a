"""Reads from Ray which processes its memory monitor has killed.

Ray (2.60) lists dead processes only in the state API, which needs the dashboard. So their table is read here, with the
accessor of `ray._private.state`. If another version of Ray lacks it, kills are not named. We know of no upstream issue.
"""

import re
from dataclasses import dataclass

import ray

try:
    from ray._private.state import state
    from ray.core.generated.common_pb2 import NODE_OUT_OF_MEMORY  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]
except ImportError:
    state = None  # type: ignore[assignment]

GIB = 2**30
NODE = re.compile(r"Memory on the node \(IP: ([^,)]+)[^)]*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
"""Pattern of the sentence on the node in Ray's message. Its limit is the node's memory."""
THRESHOLD = re.compile(r"exceeded threshold of \d+B \(([\d.]+%)")
"""Pattern of the fraction of the node's memory that may be used."""


@dataclass(frozen=True)
class Killed:
    """A process that Ray's memory monitor has killed."""

    worker: str
    """Ray's id of the process."""
    pid: int
    task: str
    """Name of its actor's method or of its task; empty if Ray's message does not have it."""
    used: int
    """Bytes of memory that the process used; 0 if unknown."""
    reason: str
    """Clause on the memory of the node."""


def reason(message: str) -> str | None:
    """Translate Ray's message on a killed process into a clause; None if it is not such a message."""
    found = NODE.search(message)
    if found is None:
        return None
    node, used, memory = found.groups()
    limit = THRESHOLD.search(message)
    most = f"{limit[1]} of {memory} GB" if limit else f"{memory} GB"
    return f"Ray's memory monitor killed it when node {node} used {used} GB of memory (limit {most})"


def killed(job: str) -> list[Killed]:
    """Return the processes of the Ray job with the id `job` that Ray's memory monitor has killed so far."""
    read = getattr(state, "_connect_and_get_accessor", None)
    if read is None:
        return []
    table = (WorkerTableData.FromString(entry) for entry in read().get_worker_table())
    # A process that has had no task yet belongs to no job.
    dead = [worker for worker in table if worker.exit_type == NODE_OUT_OF_MEMORY and worker.job_id.hex() in ("", job)]
    return [
        Killed(
            worker.worker_address.worker_id.hex(),
            worker.pid,
            _task(worker.exit_detail, worker.pid),
            worker.memory_used_bytes_at_death,
            reason(worker.exit_detail) or "Ray's memory monitor killed it",
        )
        for worker in dead
    ]


def own_job() -> str:
    """Return the id of this driver's Ray job."""
    return ray.get_runtime_context().get_job_id()


def _task(message: str, pid: int) -> str:
    found = re.search(rf"task name=([^,\n]+),[^\n]*pid={pid},", message)
    return found[1] if found else ""
