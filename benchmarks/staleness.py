"""The effect on learning of rows that are older than the policy they train: Countdown at several staleness bounds.

    python -m benchmarks.staleness --out runs/staleness
    python -m benchmarks.staleness --out runs/staleness --data data/countdown-1 --model models/tiny-sft-1
    python -m benchmarks.staleness --out runs/staleness --seeds 1 --staleness 0 4 -- actor.optim.lr=4e-4

Runs of `experiment=countdown_cpu` follow one another: for each seed and each `algorithm.max_staleness` one with the
default correction, and above 0 one without. All begin with the same model and are validated on the same puzzles. A
complete run is not made again by a second command; without `--data` and `--model` the demo's puzzles and model are made
in the folder, once. Table, figure and `result.json` are rewritten after each run.

All cases differ from the demo in the same way:

1. `actor.old_log_probs=recompute` (decoupled loss), as by default. With the demo's `engine` the loss has the ratio of
   the current policy to the engine's, which is itself a correction that cannot be switched off.
2. One train worker and one compute thread for the engine, so that on two cores each side has its own. Engines are as
   far ahead as they may be if training is the slower side; the table shows the real age of the rows.
3. Smaller iterations, of 32 puzzles in two chunks and two optimiser steps, with twice the learning rate: many policy
   versions in little time.

The exit code is 1 in three cases. With correction, the mean accuracy is below the synchronous one by more than two
standard errors of the difference and more than `--floor`. The synchronous runs do not gain more than such a difference,
so that nothing could be seen. A run fails, which ends the series.
"""

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.command import call, exit_code
from benchmarks.staleness_report import Case, Outcome, as_json, complaints, notes, read_run, save, summaries, table
from jobs.demo import Demo, StepFailed
from pipeline.config import load_config
from pipeline.track.history import write_atomically

INPUT_SEED = 1
VALIDATIONS = 8
"""Validations of a run, in addition to the one before training."""


def grid(staleness: Sequence[int], seeds: Sequence[int], without: Sequence[int] | None) -> list[tuple[int, Case]]:
    """List seeds and cases in the order of the runs: all cases of a seed, then the next seed.

    Args:
        staleness: bounds; all of them run with the correction.
        seeds: seeds of the runs.
        without: bounds that also run without the correction; None takes all above 0.
    """
    bare = {bound for bound in staleness if bound > 0 and (without is None or bound in without)}
    cases = [
        Case(bound, corrected) for bound in sorted(set(staleness)) for corrected in (True, False)[: 1 + (bound in bare)]
    ]
    return [(seed, case) for seed in dict.fromkeys(seeds) for case in cases]


def common(data: Path, model: Path, iterations: int, further: Sequence[str]) -> list[str]:
    """Make the settings of all runs."""
    return [
        "experiment=countdown_cpu",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"model.path={model}",
        "data.train_batch_size=32",
        "rollout.chunk_prompts=16",
        "rollout.num_threads=1",
        "actor.old_log_probs=recompute",
        "actor.optim.lr=2e-4",
        f"trainer.total_training_steps={iterations}",
        f"trainer.test_freq={max(1, iterations // VALIDATIONS)}",
        "trainer.num_workers=1",
        "trainer.save_freq=-1",
        # A guard of strictly on-policy runs; here the gap is a result.
        "trainer.max_log_prob_gap=null",
        "trainer.logger=[console]",
        *further,
    ]


def settings(shared: Sequence[str], case: Case, seed: int, folder: Path) -> list[str]:
    """Make the settings of one run, in `folder`."""
    return [
        *shared,
        f"algorithm.max_staleness={case.max_staleness}",
        *([] if case.corrected else ["algorithm.rollout_correction.rollout_is=none"]),
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder.parent}",
        f"trainer.experiment_name={folder.name}",
    ]


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """Make puzzles and a model that knows their wording, in folders of `folder`, unless they exist.

    Raises:
        StepFailed: puzzles or model could not be made.
    """
    demo = Demo.here("countdown", INPUT_SEED)
    folder.mkdir(parents=True, exist_ok=True)
    # The demo's folders are in the current folder.
    with contextlib.chdir(folder):
        demo.make_model()
    return folder / demo.data, folder / demo.model


def claim(out: Path, shared: Sequence[str]) -> None:
    """Write the common settings of the runs in `out` into that folder.

    Raises:
        ValueError: the folder has runs with other settings.
    """
    file = out / "settings.json"
    if file.is_file() and (there := json.loads(file.read_text())) != list(shared):
        other = sorted(set(there) ^ set(shared))
        raise ValueError(f"{out} holds runs with other settings ({', '.join(other)}); choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(list(shared), indent=1).encode())


def run(arguments: Sequence[str], folder: Path, log: Path, timeout_s: float) -> None:
    """Run `jobs.train` in a process of its own.

    Raises:
        RuntimeError: the run failed, or took longer than `timeout_s`; the message names its log.
    """
    # Rows of a continued run begin with another age, so only whole runs are compared.
    shutil.rmtree(folder, ignore_errors=True)
    call([sys.executable, "-m", "jobs.train", *arguments], log, timeout_s, name=folder.name)


def noise(accuracy: float, puzzles: int) -> float:
    """Compute the standard deviation of one validation's accuracy by the draw of its puzzles (binomial)."""
    return math.sqrt(accuracy * (1 - accuracy) / puzzles)


def report(out: Path, outcomes: Sequence[Outcome], shared: Sequence[str], puzzles: int, floor: float) -> list[str]:
    """Write `table.txt`, `curves.png` and `result.json` into `out`; returns the complaints."""
    found = summaries(outcomes)
    problems, remarks = complaints(found, floor), notes(found)
    # A fixed width, so that the file does not depend on the terminal.
    with open(out / "table.txt", "w") as file:
        Console(file=file, width=150).print(table(found))
    save(found, out / "curves.png")
    content = {
        "settings": list(shared),
        "puzzles": puzzles,
        "noise_of_a_validation": noise(found[0].final, puzzles),
        "floor": floor,
        "complaints": problems,
        "notes": remarks,
        "cases": as_json(found),
    }
    write_atomically(out / "result.json", json.dumps(content, indent=1).encode())
    return problems


def measure(args: argparse.Namespace) -> int:
    """Make the missing runs, and report; returns the exit code."""
    out: Path = args.out
    data, model = (args.data, args.model) if args.data else make_inputs(out / "inputs")
    shared = common(data.resolve(), model.resolve(), args.iterations, args.settings)
    config = load_config(shared)
    limit, rows = config.data.val_max_samples, pq.read_metadata(data / "test.parquet").num_rows
    puzzles = rows if limit < 0 else min(limit, rows)
    claim(out, shared)
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    failed: list[str] = []
    order = grid(args.staleness, args.seeds, args.without)
    for number, (seed, case) in enumerate(order, start=1):
        folder = (out / "runs" / f"{case.name}-seed-{seed}").resolve()
        outcome = read_run(folder, case, seed, args.iterations)
        if outcome is None:
            print(f"{number}/{len(order)} {folder.name}", end="", flush=True)
            begun = time.monotonic()
            try:
                run(settings(shared, case, seed, folder), folder, out / "logs" / f"{folder.name}.log", args.timeout)
                outcome = read_run(folder, case, seed, args.iterations)
            except RuntimeError as error:
                failed = [str(error)]
            if outcome is None:
                failed = failed or [f"{folder} ended before its last validation"]
                break
            print(f": accuracy {outcome.final:.3f}, rows {outcome.age:.2f} versions old", end="")
            print(f", {time.monotonic() - begun:.0f} s", flush=True)
        outcomes.append(outcome)
        wrong = report(out, outcomes, shared, puzzles, args.floor)
    if not outcomes:
        print(f"\n{failed[0]}")
        return 1
    Console().print(table(summaries(outcomes)))
    one = noise(outcomes[0].final, puzzles)
    print(f"a single validation of {puzzles:,} puzzles is exact to ± {one:.3f}; all runs answer the same ones")
    for note in notes(summaries(outcomes)):
        print(f"note: {note}")
    for complaint in (*wrong, *failed):
        print(complaint)
    return 1 if wrong or failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs, logs, table, figure and result.json")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add(
        "--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="values of algorithm.max_staleness, 0 among them"
    )
    add(
        "--without",
        type=int,
        nargs="+",
        help="those of them that run without correction as well (default: all above 0)",
    )
    add("--iterations", type=int, default=40, help="of each run (default: %(default)s)")
    add("--floor", type=float, default=0.02, help="accuracy that a case may lose, however small the standard error is; "
        "about the noise of one validation (default: %(default)s)")  # fmt: skip
    add("--timeout", type=float, default=1200.0, help="seconds that a run may take (default: %(default)s)")
    add("--data", type=Path, metavar="DIR", help="train.parquet and test.parquet of Countdown, instead of making them")
    add("--model", type=Path, metavar="DIR", help="warm-started model, instead of making it")
    add("settings", nargs="*", metavar="key=value", help="further settings of all runs; write -- before them")
    args = parser.parse_args(arguments)
    if 0 not in args.staleness or min(args.staleness) < 0:
        parser.error("--staleness needs 0, which the others are compared with, and nothing below")
    if args.iterations < VALIDATIONS:
        parser.error(f"--iterations must be at least {VALIDATIONS}, the number of validations")
    if (args.model is None) != (args.data is None):
        parser.error("--data and --model belong together: the model must know the puzzles' wording")
    return exit_code(lambda: measure(args), ValueError, StepFailed)


if __name__ == "__main__":
    sys.exit(main())
