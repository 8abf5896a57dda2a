"""Time, memory and rates on a GPU or a CPU."""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.battery import Figures, Options
from benchmarks.gpu.shapes import SHAPES, peak_flops


def sync(device: Any) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def fastest(repeats: int, run: Callable[[], Any], device: Any) -> float:
    """Return the least seconds of `repeats` calls after a first one."""
    times = []
    for _ in range(repeats + 1):
        sync(device)
        begun = time.perf_counter()
        run()
        sync(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def begin(options: Options) -> Any:
    """Make this process the only rank of a process group; returns its device."""
    import torch
    import torch.distributed as dist

    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def peak_gib(device: Any) -> float:
    """Return the peak memory so far: of tensors on a GPU, of the process on a CPU."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rates(rows: Any, options: Options, seconds: float, passes: int) -> Figures:
    """Compute tokens and operations per second of work like `passes` forward passes; a backward pass counts as two.

    Work that is computed twice (checkpointing) counts once, and a prompt counts for each of its rows, shared or not.
    """
    import torch

    flops = passes * SHAPES[options.shape].flops(rows.lengths, len(rows.response_ids)) / seconds
    found: Figures = {
        "update_s": seconds,
        "tokens": sum(rows.lengths),
        "tokens_per_s": sum(rows.lengths) / seconds,
        "tflops": flops / 1e12,
    }
    peak = peak_flops(torch.cuda.get_device_name(0)) if options.device == "cuda" else None
    return found | ({"mfu": flops / peak} if peak else {})
