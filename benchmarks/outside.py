"""Two protocols of other projects with SmolLM2-135M-Instruct: supervised steps, then reinforcement learning.

    python -m benchmarks.outside reverse_text --model models/smollm2 --out runs/reverse-text --seeds 1 2
    python -m benchmarks.outside guess_number --model models/smollm2 --out runs/guess-number

`reverse_text` is prime-rl's example of this name, and `guess_number` is from tinker's cookbook (`multiplayer_rl`). Data
are made by `jobs.prepare`, and the settings of the training are the experiments `CHECK_cpu`. The same command
continues: finished steps are not run again. The exit code is 1 if the sampled reward on the held-out rows rises by less
than 0.2 from the first to the last validation, or if the mean mismatch KL of the last three iterations
(`rollout_corr/k3_kl`) is 0.01 or more.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import call, exit_code
from pipeline.config import load_config
from pipeline.track.history import read_history

RISE, MISMATCH = 0.2, 0.01
KL = "rollout_corr/k3_kl"
LAST = 3
"""Iterations at the end whose mean mismatch KL counts."""


@dataclass(frozen=True)
class Check:
    """Data and supervised steps of a protocol; its experiment has the settings of the training."""

    prepare: str
    """Arguments of `jobs.prepare`."""
    sft: str
    """Settings of `jobs.sft`."""


CHECKS = {
    "reverse_text": Check("--train 4000 --test 200 --sft 1600", "data.max_length=96 trainer.total_training_steps=100"),
    "guess_number": Check(
        "--highest 63 --turns 6 --train 2000 --test 64 --sft 800",
        "data.max_length=256 trainer.total_training_steps=50",
    ),
}
SFT = "data.train_batch_size=16 optim.lr=2e-5 trainer.max_token_len_per_gpu=2048 trainer.num_threads=2"
"""Supervised settings of both; batch and rate are prime-rl's."""


@dataclass(frozen=True)
class Outcome:
    """The results of one seed."""

    seed: int
    iterations: int
    reward: tuple[float, float]
    """Mean reward of the first and of the last validation."""
    accuracy: tuple[float, float]
    """Share of right answers in them."""
    mismatch: float
    """Mean of `KL` over the last iterations, in nats."""
    minutes: float
    """Time of the training."""

    @property
    def problems(self) -> list[str]:
        """Sentences on the conditions that are not met."""
        found, (first, last) = [], self.reward
        if last - first < RISE:
            found.append(f"seed {self.seed}: the reward rose from {first:.3f} to {last:.3f}, by less than {RISE}")
        if not self.mismatch < MISMATCH:
            found.append(f"seed {self.seed}: the mismatch KL is {self.mismatch:.1e}, not below {MISMATCH}")
        return found


def outcome(source: str, seed: int, records: Sequence[Mapping[str, Any]]) -> Outcome:
    """Read the results from the lines of `metrics.jsonl`.

    Raises:
        ValueError: the run has fewer than two validations, or no mismatch KL.
    """
    reward, accuracy = f"val-aux/{source}/reward/mean@1", f"val-core/{source}/acc/mean@1"
    validations = [record for record in records if record.get(reward) is not None]
    gaps = [record[KL] for record in records if record.get(KL) is not None]
    if len(validations) < 2 or not gaps:
        raise ValueError(
            f"the run of seed {seed} has {len(validations)} validations with {reward} and {len(gaps)} iterations with "
            f"{KL}; at least 2 and 1 are needed"
        )
    first, last = validations[0], validations[-1]
    return Outcome(
        seed,
        records[-1]["iteration"],
        (first[reward], last[reward]),
        (first.get(accuracy, 0.0), last.get(accuracy, 0.0)),
        statistics.fmean(gaps[-LAST:]),
        records[-1]["elapsed_s"] / 60,
    )


def training(name: str, model: Path, data: Path, seed: int, folder: Path, further: Sequence[str]) -> list[str]:
    """Make the settings of the training in `folder`."""
    return [
        f"experiment={name}_cpu",
        f"model.path={model}",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"trainer.seed={seed}",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={folder.parent}",
        f"trainer.experiment_name={folder.name}",
        *further,
    ]


def run(name: str, args: argparse.Namespace, seed: int) -> Outcome:
    """Make data and model, train, and read the results.

    Raises:
        RuntimeError: a job failed, or took longer than `--timeout`.
    """
    check, out = CHECKS[name], args.out.resolve()
    data, warm, folder = out / f"data-{seed}", out / f"sft-{seed}", out / f"run-{seed}"
    settings = training(name, warm, data, seed, folder, args.settings)
    iterations = load_config(settings).trainer.total_training_steps

    def job(module: str, *words: str) -> None:
        log = out / "logs" / f"{module}-{seed}.log"
        call([sys.executable, "-m", f"jobs.{module}", *words], log, args.timeout, name=f"{module} of seed {seed}")

    if not (data / "train.parquet").is_file():
        job("prepare", name, "--out", str(data), "--seed", str(seed), *check.prepare.split())
    if not (warm / "config.json").is_file():
        files = (f"data.train_files={data / 'sft_train.parquet'}", f"data.val_files={data / 'sft_test.parquet'}")
        words = (*SFT.split(), *check.sft.split(), *args.sft)
        job("sft", f"out={warm}", f"model.path={args.model.resolve()}", *files, f"trainer.seed={seed}", *words)
    records = read_history(folder / "metrics.jsonl")
    if not records or records[-1]["iteration"] < iterations:
        job("train", *settings)
        records = read_history(folder / "metrics.jsonl")
    return outcome(name, seed, records)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Make the table of all seeds."""
    made = Table("seed", "iterations", "reward", "right", "mismatch KL", "min")
    for one in outcomes:
        spans = [f"{first:.3f} to {last:.3f}" for first, last in (one.reward, one.accuracy)]
        made.add_row(str(one.seed), str(one.iterations), *spans, f"{one.mismatch:.1e}", f"{one.minutes:.1f}")
    return made


def measure(args: argparse.Namespace) -> int:
    """Run the check with each seed; returns 1 if a condition is not met, else 0."""
    outcomes = []
    for seed in args.seeds:
        outcomes.append(run(args.check, args, seed))
        Console().print(table(outcomes))
    problems = [problem for one in outcomes for problem in one.problems]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def main(arguments: list[str] | None = None) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside", description=about)
    add = parser.add_argument
    add("check", choices=CHECKS)
    add("--model", type=Path, required=True, metavar="DIR", help="folder of SmolLM2-135M-Instruct")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of data, models, runs and logs")
    add("--seeds", type=int, nargs="+", default=[1], help="(default: 1)")
    add("--timeout", type=float, default=3600.0, help="seconds that a job may take (default: %(default)s)")
    add("--sft", nargs="*", default=[], metavar="key=value", help="further settings of the supervised steps")
    add("settings", nargs="*", metavar="key=value", help="further settings of the training; write -- before them")
    # Settings may follow the options.
    args = parser.parse_intermixed_args(arguments)
    return exit_code(lambda: measure(args), ValueError, RuntimeError)


if __name__ == "__main__":
    sys.exit(main())
