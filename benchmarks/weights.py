"""One weight update of a model of about 100 million parameters, step by step, against a plain copy of the same bytes.

    python -m benchmarks.weights                           # two engines on this machine, float32
    python -m benchmarks.weights --dtype bfloat16 --engines 4 --repeats 10
    python -m benchmarks.weights --engines 0               # without vLLM: only the trainer's parts

    publish  a train rank copies its weights into buckets, with checksums, and puts them into Ray's object store
    crc      only the checksums of publish
    get      an engine gets all buckets; buckets of its node are mapped into its memory, not copied
    join     parts of load: the checksums, and the joining of parameters whose parts are on several ranks
    load     vLLM loads them: checksums, whole parameters, its own packing
    path     publish and load: from the optimiser's step to the acknowledgement

Each part is timed in the process and the environment of a run, in turns with a plain copy of as many bytes there; the
first time is left out. Then the engines hold the buckets at the same time, and their private memory and the object
store show that a node has one copy.
"""

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.prompt_stream import byte_tokenizer
from pipeline.config import Config, load_config
from pipeline.config.trainer import TrainerConfig
from pipeline.models.precision import torch_dtype
from pipeline.run.driver import start_ray
from pipeline.stream import engine_env
from pipeline.weights.checksum import crc
from pipeline.weights.load import Shard, parameters
from pipeline.weights.publish import WeightPublisher

WAIT_S = 600.0
MIB = 2**20


def model(layers: int, width: int, vocabulary: int) -> Any:
    """Make a random Llama; 10 layers of width 768 with 32,000 tokens are 95 million parameters."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )


@dataclass(frozen=True)
class Times:
    """Seconds of a part, and of a plain copy in the same process, in turns: the machine's speed changes meanwhile."""

    part: list[float]
    copy: list[float]


def in_turns(repeats: int, run: Callable[[], Any], nbytes: int) -> Times:
    """Time each call but the first, in turns with a copy of `nbytes`."""
    # The source has memory like parameters; numpy would take huge pages.
    source, target = torch.ones(nbytes, dtype=torch.uint8).numpy(), np.ones(nbytes, np.uint8)
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for one, call in zip(times, (run, lambda: np.copyto(target, source)), strict=True):
            begun = time.perf_counter()
            call()
            one.append(time.perf_counter() - begun)
    return Times(times[0][1:], times[1][1:])


def trainer_side(publisher: WeightPublisher, module: Any, repeats: int) -> tuple[dict[str, Times], Shard]:
    """Time publish and crc; also returns the shard that was published last."""
    # As in a run, a version lives until the next one is published.
    published = deque([publisher.pack(module, 0)], maxlen=1)
    nbytes = publisher.bytes
    times = {"publish": in_turns(repeats, lambda: published.append(publisher.pack(module, 0)), nbytes)}
    data = np.ones(nbytes, np.uint8)
    times["crc"] = in_turns(repeats, lambda: crc(data), nbytes)
    return times, published[-1]


def private_mib() -> float:
    """Return the memory of this process that no other process shares."""
    return psutil.Process().memory_full_info().uss / MIB


class Receiver:
    """The receiving side: one engine."""

    def __init__(self, config: Config):
        from pipeline.rollout import engines

        self._engine = engines.build(config.model, config.rollout, 512, config.trainer.seed)
        self._held: list[Any] = []

    def get(self, shard: Shard, repeats: int) -> Times:
        return in_turns(repeats, lambda: ray.get(shard.buckets, timeout=WAIT_S), size(shard))

    def load(self, shard: Shard, repeats: int) -> Times:
        return in_turns(repeats, lambda: self.take(shard), size(shard))

    def take(self, shard: Shard) -> None:
        self._engine.load([shard], WAIT_S, 1)

    def hold(self, shard: Shard) -> tuple[float, float]:
        """Hold all buckets, and read every byte; returns the private MiB before and after."""
        before = private_mib()
        self._held = ray.get(shard.buckets, timeout=WAIT_S)
        for buffer in self._held:
            int(np.frombuffer(buffer, np.uint8).sum())
        return before, private_mib()


def engine_config(folder: Path, dtype: str) -> Config:
    return load_config(
        [
            "experiment=countdown_cpu",
            f"model.path={folder}",
            f"rollout.dtype={dtype}",
            "rollout.num_threads=1",
            "rollout.max_num_seqs=8",
        ]
    )


def engine_side(
    config: Config, shard: Shard, engines: int, repeats: int, publish: Callable[[], Shard]
) -> tuple[dict[str, Times], str]:
    """Time get, load and the whole path in the first engine; also returns a sentence on the memory of all."""
    actor = ray.remote(Receiver).options(num_cpus=1, runtime_env={"env_vars": engine_env(config)})
    receivers: list[Any] = [actor.remote(config) for _ in range(engines)]
    first = receivers[0]
    times = {name: ray.get(getattr(first, name).remote(shard, repeats), timeout=WAIT_S * 3) for name in ("get", "load")}
    times["path"] = in_turns(repeats, lambda: ray.get(first.take.remote(publish()), timeout=WAIT_S), size(shard))
    before = object_store_mib()
    held = ray.get([receiver.hold.remote(shard) for receiver in receivers], timeout=WAIT_S)
    grown = ", ".join(f"{after - earlier:+.1f}" for earlier, after in held)
    return times, (
        f"{engines} engines hold all buckets at the same time: their private memory changes by {grown} MiB, the object "
        f"store from {before:.0f} to {object_store_mib():.0f} MiB"
    )


def object_store_mib() -> float:
    total = ray.cluster_resources().get("object_store_memory", 0.0)
    return (total - ray.available_resources().get("object_store_memory", 0.0)) / MIB


def size(shard: Shard) -> int:
    """Sum the bytes of all buckets."""
    return sum(piece.nbytes for piece in shard.pieces)


def join(shard: Shard, repeats: int) -> Times:
    """Time the checks and the joining of the parameters, without an engine that loads them."""
    fetch = (lambda refs: ray.get(refs, timeout=WAIT_S)) if ray.is_initialized() else (lambda refs: refs)
    return in_turns(repeats, lambda: sum(1 for _ in parameters([shard], fetch)), size(shard))


def report(times: dict[str, Times], mib: float) -> Table:
    """Show median, smallest and largest seconds of every part, and the ratio of medians to its plain copy."""
    table = Table(title=f"{mib:.0f} MiB of weights", title_justify="left")
    table.add_column("part")
    for name in ("median s", "min s", "max s", "copy s", "of a plain copy"):
        table.add_column(name, justify="right")
    for name in ("publish", "crc", "get", "join", "load", "path"):
        if name in times:
            middle, copy = (statistics.median(values) for values in (times[name].part, times[name].copy))
            cells = (middle, min(times[name].part), max(times[name].part), copy)
            table.add_row(name, *(f"{cell:.4f}" for cell in cells), f"{middle / copy:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="the engine's")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=TrainerConfig().weight_bucket_mb)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32000)
    args = parser.parse_args()
    module = model(args.layers, args.width, args.vocabulary)
    dtype, limit = torch_dtype(args.dtype, "--dtype"), args.bucket_mb * MIB
    memory = ""
    with tempfile.TemporaryDirectory() as name:
        if args.engines:
            folder = Path(name)
            module.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            config = engine_config(folder, args.dtype)
            start_ray(config)
        publisher = WeightPublisher(0, dtype, limit, ray.put if args.engines else np.copy)
        times, shard = trainer_side(publisher, module, args.repeats)
        times["join"] = join(shard, args.repeats)
        if args.engines:
            more, memory = engine_side(config, shard, args.engines, args.repeats, lambda: publisher.pack(module, 0))
            times |= more
            ray.shutdown()
    Console().print(report(times, size(shard) / MIB))
    print(memory)


if __name__ == "__main__":
    main()
