"""A thousand iterations with an instant engine: the cost of an iteration of the stream, and the growth of resources.

    python -m benchmarks.soak                              # strictly on-policy
    python -m benchmarks.soak --iterations 2000 algorithm.max_staleness=1
    python -m benchmarks.soak algorithm.filter_groups.enable=true
    python -m benchmarks.soak --chunks 2 --ranks 2         # more rows in an iteration, and more trainers
    python -m benchmarks.soak --bare                       # bare Ray Data, with stages that do nothing

Engine and trainer are stand-ins that answer at once, so an iteration's time is the time of prompts, Ray Data, rewards,
advantages, records and the policy store. The smallest iteration, of one chunk for one trainer, shows the cost of an
iteration; more chunks add the way of each, which a real engine hides while it generates the others. Memory, object
store and handles (open files and threads) of every kind of process are watched. Their growth is the slope of a line
through the second half of the run, as the median over all pairs of samples (Theil and Sen), so that neither the start
nor a single peak decides.

The exit code is 1 if an iteration costs more than `--most-ms`, or a resource grows in 1000 iterations by more than the
share `--most-growth`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import ray
from rich.console import Console
from rich.table import Table

from benchmarks import bare_stream
from benchmarks.prompt_stream import byte_tokenizer, write_prompts
from benchmarks.stand_in import InstantRollout, Sample, StandInTrainer, Watch, shard
from pipeline import stream
from pipeline.config import Config, load_config
from pipeline.run.driver import start_ray

CHUNK = 8
"""Prompts of a chunk."""
PAIRS = 200
"""Most samples for the slope over all pairs; of more samples, only some are used."""


@dataclass(frozen=True)
class Growth:
    """The course of a number in the second half of a run."""

    name: str
    unit: str
    start: float
    """Value in the middle of the run."""
    end: float
    per_1000: float
    """Slope, for 1000 iterations."""

    @property
    def share(self) -> float:
        """Growth in 1000 iterations as a share of the start."""
        return self.per_1000 / self.start if self.start else float(self.per_1000 > 0)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Compute the median slope over all pairs of points (x, y) with different x; 0 if there are none."""
    step = max(1, len(points) // PAIRS)
    pairs = combinations(points[::step], 2)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs if x1 != x0]
    return statistics.median(slopes) if slopes else 0.0


def growths(samples: Sequence[Sample], chunks_per_iteration: int) -> list[Growth]:
    """Compute the growth of all memory and handles, over the second half of the samples with chunks."""
    warm = [sample for sample in samples if sample.chunks]
    half = warm[len(warm) // 2 :]
    if len(half) < 2:
        raise ValueError(f"{len(samples)} samples are too few to see growth; run more iterations")
    kinds = sorted({kind for sample in half for kind in sample.private})

    def of(name: str, unit: str, value: Callable[[Sample], float]) -> Growth:
        values = [(sample.chunks / chunks_per_iteration, value(sample)) for sample in half]
        first, last = (statistics.median(v for _, v in part) for part in (values[: len(values) // 4 + 1], values[-3:]))
        return Growth(name, unit, first, last, 1000 * slope(values))

    return [
        of("object store", "MiB", lambda sample: sample.object_store),
        *(of(f"{kind}: memory", "MiB", lambda s, kind=kind: s.private.get(kind, 0.0)) for kind in kinds),  # type: ignore[misc]
        *(of(f"{kind}: handles", "", lambda s, kind=kind: s.handles.get(kind, 0)) for kind in kinds),  # type: ignore[misc]
    ]


def complaints(times: Sequence[float], grown: Sequence[Growth], most_ms: float, most_growth: float) -> list[str]:
    """Describe the numbers that are worse than allowed.

    Args:
        times: seconds of each iteration.
        grown: result of `growths`.
        most_ms: milliseconds that the median iteration may take.
        most_growth: share by which a number may grow in 1000 iterations; below 5 MiB or 5 handles nothing counts.
    """
    found = []
    median = 1000 * statistics.median(times)
    if median > most_ms:
        found.append(f"an iteration takes {median:.0f} ms, more than {most_ms:g} ms")
    found += [
        f"{growth.name} grows by {growth.per_1000:.1f} {growth.unit} in 1000 iterations, {growth.share:.0%} of what it "
        "was"
        for growth in grown
        if growth.per_1000 > 5 and growth.share > most_growth
    ]
    return found


def soak(
    config: Config, iterations: int, run_dir: str, every: float, bare: bool, ranks: int
) -> tuple[list[float], list[Growth]]:
    """Run; returns the seconds of each iteration after the first, in which everything starts, and the growths."""
    start_ray(config)
    build = bare_stream.build if bare else stream.build
    trainer = StandInTrainer(config, iterations, run_dir, InstantRollout, [shard()], build, ranks)
    chunks = trainer.schedule.chunks_per_iteration
    times: list[float] = []
    watch = Watch(lambda: len(times) * chunks, every)
    read = 0
    for number in range(iterations):
        begun = time.perf_counter()
        trainer.iterate()
        seconds = time.perf_counter() - begun
        read, _ = trainer.events(read)  # as the driver of a run does, so that they do not pile up
        if number:
            times.append(seconds)
    samples = watch.stop()
    trainer.close()
    ray.shutdown()
    return times, growths(samples, chunks)


def settings(folder: Path, chunks: int, overrides: Sequence[str]) -> Config:
    """Make the settings of iterations of so many chunks, and their prompts and tokenizer in `folder`."""
    byte_tokenizer().save_pretrained(folder / "model")
    write_prompts(folder / "prompts", 20_000, 2, 10_000)
    return load_config(
        [
            "experiment=countdown_cpu",
            f"model.path={folder / 'model'}",
            f"data.train_files={folder / 'prompts'}",
            "data.val_files=null",
            "data.max_prompt_length=512",
            f"data.train_batch_size={chunks * CHUNK}",
            f"rollout.chunk_prompts={CHUNK}",
            "actor.ppo_mini_batch_size=null",
            *overrides,
        ]
    )


def report(times: Sequence[float], grown: Sequence[Growth]) -> Table:
    ordered = sorted(times)
    middle, late = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
    title = f"{len(times)} iterations: {1000 * middle:.1f} ms each (median), 95 % below {1000 * late:.1f} ms"
    table = Table(title=title, title_justify="left")
    table.add_column("second half of the run")
    for name in ("middle", "end", "per 1000 iterations", "share"):
        table.add_column(name, justify="right")
    for growth in grown:
        unit = f" {growth.unit}" if growth.unit else ""
        cells = f"{growth.start:.1f}{unit}", f"{growth.end:.1f}{unit}", f"{growth.per_1000:+.1f}{unit}"
        table.add_row(growth.name, *cells, f"{growth.share:+.1%}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks at memory and handles")
    parser.add_argument("--most-ms", type=float, default=100.0, help="milliseconds that an iteration may take")
    parser.add_argument("--most-growth", type=float, default=0.05, help="share by which anything may grow")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of an iteration (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="trainers that share them (default: %(default)s)")
    parser.add_argument("--bare", action="store_true", help="Ray Data alone, in the shape of the stream")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings of the run")
    args = parser.parse_args()
    if args.chunks % args.ranks:
        parser.error(f"{args.chunks} chunks cannot be shared by {args.ranks} trainers")
    with tempfile.TemporaryDirectory() as folder:
        times, grown = soak(
            settings(Path(folder), args.chunks, args.settings),
            args.iterations,
            str(Path(folder) / "run"),
            args.every,
            args.bare,
            args.ranks,
        )
    Console().print(report(times, grown))
    found = complaints(times, grown, args.most_ms, args.most_growth)
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
