"""Communication among the ranks of a run, its train workers. All functions but `backend`, `rank` and `count` are
collectives."""

from typing import Any

import torch
import torch.distributed as dist

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def backend(use_gpu: bool) -> str:
    """Return the backends of the run's process group, by device, in torch's form.

    With GPUs, objects and barriers still use gloo on CPUs: over NCCL they would be copied to the GPU, and wait for its
    queue.
    """
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def rank() -> int:
    """Return the rank of this train worker, from 0."""
    return dist.get_rank()


def count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


def barrier() -> None:
    """Wait until every rank has called this."""
    dist.barrier()


def all_reduce(values: list[float], device: torch.device, op: Any = SUM) -> list[float]:
    """Return each of `values` summed, or reduced by `op`, over all ranks. `device` is this rank's device."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def all_gather(value: Any) -> list[Any]:
    """Return every rank's `value`, in the order of ranks."""
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Return the `value` of rank 0."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
