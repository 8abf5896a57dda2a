"""Memory of one rank of several while a model is loaded and sharded: its own slices, against the whole model first.

    python -m benchmarks.loading                     # 826 MiB of float32 on two ranks
    python -m benchmarks.loading --ranks 4 --layers 24
    MALLOC_MMAP_THRESHOLD_=262144 python -m benchmarks.loading      # freed memory goes back to the system at once

Each rank loads a random model, shards it, writes to every weight, and runs a forward and a backward pass. The figures
are resident memory on top of the memory after the imports, at its peak and at the end, in whole models. Slices are
pages of the files until something writes to them, so the peak after the write to every weight counts. A forward pass
adds the groups of weights that it gathers, a backward pass gradients.
"""

import argparse
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

WAYS = ("whole", "slices")


def resident(field: str) -> int:
    """Read the MiB of this process: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024


def make_model(folder: Path, layers: int) -> None:
    """Save a random Qwen3; 12 layers are 826 MiB of float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def measure(rank: int, way: str, folder: str, ranks: int, store: str) -> None:
    """Measure one rank, and write the figures into a file next to `store`.

    They are `(rank, MiB at the peak after loading, after every weight was written, after a forward pass, after a
    backward pass, at the end, MiB of the whole model, seconds of loading)`.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (its memory does not count)

    from pipeline.config.learner import FSDPConfig
    from pipeline.config.model import ModelConfig
    from pipeline.models.fsdp import shard
    from pipeline.models.mesh import make_mesh
    from pipeline.models.policy import load_policy

    mesh = make_mesh("cpu")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    began = time.perf_counter()
    policy = load_policy(ModelConfig(path=folder), mesh=mesh if way == "slices" else None)
    policy = shard(policy, FSDPConfig(), "cpu", mesh)
    seconds = time.perf_counter() - began
    peaks = [resident("VmHWM") - before]
    with torch.no_grad():
        weights: Any = policy.parameters()
        for parameter in weights:
            parameter.to_local().add_(0)
    peaks.append(resident("VmHWM") - before)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        policy(ids, torch.arange(7), ids[0, 1:])
    peaks.append(resident("VmHWM") - before)
    policy(ids, torch.arange(7), ids[0, 1:])[0].sum().backward()
    peaks.append(resident("VmHWM") - before)
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters()) // 2**20
    found = (rank, *peaks, resident("VmRSS") - before, size, seconds)
    Path(f"{store}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compare(ranks: int, layers: int) -> dict[str, list[tuple[float, ...]]]:
    """Measure every rank in both ways; returns the figures of `measure` by way."""
    found: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(folder, layers)
        for way in WAYS:
            store = f"{place}/{way}"
            mp.spawn(measure, (way, str(folder), ranks, store), nprocs=ranks)
            found[way] = [tuple(json.loads(Path(f"{store}.{rank}").read_text())) for rank in range(ranks)]
    return found


def report(found: dict[str, list[tuple[float, ...]]]) -> Table:
    """Show the figures, in MiB and whole models."""
    table = Table(
        "way", "rank", "peak loading", "peak, all written", "forward pass", "backward pass", "at the end", "seconds"
    )
    for way, rows in found.items():
        for rank, *sizes, whole, seconds in rows:
            cells = [f"{size:.0f} MiB ({size / whole:.2f})" for size in sizes]
            table.add_row(way, str(rank), *cells, f"{seconds:.1f}")
    return table


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    Console().print(report(compare(arguments.ranks, arguments.layers)))


if __name__ == "__main__":
    main()
