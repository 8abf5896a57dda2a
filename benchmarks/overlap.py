"""Time saved by overlap: iterations of a stream whose engine and trainer take fixed times on separate resources.

    python -m benchmarks.overlap                        # engine 2 s, trainer 1.5 s an iteration
    python -m benchmarks.overlap --rollout 1 --train 3 --iterations 20 --cases 0 1

Stream, policy store and schedule are a run's. The engine takes `r` seconds for the chunks of an iteration, one after
the other, like an engine that is busy throughout; the trainer takes `t` seconds for its rows. Both sleep, so that
neither slows the other down on any machine. These results are expected:

- strictly on-policy (`0`): they take turns, at most 1.05 (r + t) an iteration;
- the same with early training (`early`): clearly less;
- one iteration ahead (`1`): the slower one is never idle, at most 1.05 max(r, t).

Iterations in which workers start are left out. The exit code is 1 if an iteration takes longer than its bound.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.prompt_stream import byte_tokenizer, write_prompts
from benchmarks.stand_in import RANKS, InstantRollout, StandInTrainer, shard
from pipeline.config import Config, load_config
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.run.driver import start_ray

CHUNKS, CHUNK_PROMPTS = 8, 2
STARTING = 3
"""First iterations, in which workers start."""
SECONDS = "seconds_per_chunk"
TOLERANCE = 1.05
CLEARLY = 0.85
"""Early training should take less than this share of r + t."""


@dataclass(frozen=True)
class Case:
    """One way to run."""

    name: str
    max_staleness: int
    early: bool = False

    def bound(self, rollout: float, train: float) -> float:
        """Return the most seconds that an iteration may take if the two sides take these."""
        if self.max_staleness:
            return TOLERANCE * max(rollout, train)
        return (CLEARLY if self.early else TOLERANCE) * (rollout + train)


CASES = {
    case.name: case
    for case in (
        Case("0", 0),
        Case("early", 0, early=True),
        Case("1", 1),
        Case("1 early", 1, early=True),
        Case("2", 2),
    )
}


class TimedRollout(InstantRollout):
    """An engine of a fixed speed: every chunk takes the same time, one after the other."""

    def __init__(self, data: DataConfig, model: ModelConfig, rollout: RolloutConfig, *args: Any):
        super().__init__(data, model, rollout, *args)
        self._seconds = rollout.engine_kwargs[SECONDS]
        self._engine = asyncio.Lock()

    async def __call__(self, table: pa.Table) -> pa.Table:
        made = await super().__call__(table)
        async with self._engine:
            await asyncio.sleep(self._seconds)
        return made


def measure(case: Case, folder: Path, rollout: float, train: float, iterations: int) -> list[float]:
    """Measure the seconds of each iteration after the first ones; Ray must be running."""
    config = settings(folder, case.max_staleness)
    config.rollout.engine_kwargs = {SECONDS: rollout / CHUNKS}
    shards = [shard(rank) for rank in range(RANKS)]
    run_dir = tempfile.mkdtemp(dir=folder)
    trainer = StandInTrainer(config, STARTING + iterations, run_dir, TimedRollout, shards)
    ends = []
    for _ in range(STARTING + iterations):
        trainer.iterate(train, case.early)
        ends.append(time.perf_counter())
    trainer.finish()
    return [end - begin for begin, end in zip(ends[STARTING - 1 :], ends[STARTING:], strict=False)]


def settings(folder: Path, max_staleness: int) -> Config:
    """Make the settings of iterations with 8 chunks of 2 prompts with 2 responses."""
    return load_config(
        [
            f"model.path={folder / 'model'}",
            f"data.train_files={folder / 'prompts'}",
            f"data.train_batch_size={CHUNKS * CHUNK_PROMPTS}",
            "data.max_prompt_length=512",
            f"rollout.chunk_prompts={CHUNK_PROMPTS}",
            "rollout.n=2",
            "rollout.num_cpus=0.2",
            "reward.num_cpus=0.5",
            "trainer.total_training_steps=1000",
            "trainer.ray_num_cpus=4",
            f"algorithm.max_staleness={max_staleness}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollout", type=float, default=2.0, help="seconds the engine takes for an iteration")
    parser.add_argument("--train", type=float, default=1.5, help="seconds the trainer takes for an iteration")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    result = Table(title=f"engine {args.rollout:g} s, trainer {args.train:g} s an iteration", title_justify="left")
    for name in ("max_staleness", "trains", "s/iteration", "slowest", "bound", ""):
        result.add_column(name, justify="right")
    passed = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        byte_tokenizer().save_pretrained(folder / "model")
        write_prompts(folder / "prompts", 2000, 1, 500)
        start_ray(settings(folder, 0))
        for name in args.cases:
            case = CASES[name]
            taken = measure(case, folder, args.rollout, args.train, args.iterations)
            mean, bound = statistics.mean(taken), case.bound(args.rollout, args.train)
            passed &= mean <= bound
            when = "chunk by chunk" if case.early else "when all rows are there"
            numbers = f"{mean:.3f}", f"{max(taken):.3f}", f"{bound:.3f}"
            result.add_row(str(case.max_staleness), when, *numbers, "" if mean <= bound else "too slow")
            Console().print(f"{name}: {mean:.3f} s an iteration, at most {bound:.3f}")
        ray.shutdown()
    Console().print(result)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
