"""Speed of a run whose reward sleeps for ever on 1 percent of rows and raises on another 1 percent.

    python -m benchmarks.failing_rewards --model models/tiny-sft-1 --data data/countdown-1 --timeouts 1 5

Runs of `experiment=countdown_cpu`, with the Countdown rule as a custom function, follow one another: one in which it
never fails, and one with failures for each `reward.timeout_s`. The words of a row decide if it fails. So the expected
failures are counted from the recorded trajectories, and compared with the failures that the run recorded and reported.
`make demo` makes a folder for `--model` and one for `--data`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from rich.console import Console
from rich.table import Table

from jobs.train import main as train
from pipeline.reward.rules.countdown import compute_score as rule

FATES = ("sleeps", "raises")
"""Failures of the rows of the first percent and of the second one."""


def fate(solution_str: str, extra_info: Any) -> str:
    """Draw `sleeps`, `raises` or `fine`; the draw depends only on the row."""
    draw = zlib.crc32(f"{extra_info} {solution_str}".encode()) % 100
    return FATES[draw] if draw < len(FATES) else "fine"


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, fails: bool) -> Any:
    """Score by the Countdown rule; with `fails`, never return for some rows and raise for others."""
    happens = fate(solution_str, extra_info) if fails else "fine"
    if happens == "sleeps":
        time.sleep(1e9)
    if happens == "raises":
        raise ArithmeticError("this row is one of those that fail")
    return rule(solution_str, ground_truth)


def run(args: argparse.Namespace, folder: str, name: str, fails: bool, timeout_s: float) -> dict[str, Any]:
    """Make one run; returns its time, its failures, and the expected failures."""
    code = train(
        [
            "experiment=countdown_cpu",
            f"model.path={args.model}",
            f"data.train_files={args.data}/train.parquet",
            "data.val_files=null",
            "trainer.test_freq=-1",
            "reward.custom_reward_function.path=benchmarks.failing_rewards",
            f"reward.custom_reward_function.reward_kwargs={{fails: {str(fails).lower()}}}",
            f"reward.timeout_s={timeout_s}",
            f"trainer.total_training_steps={args.iterations}",
            f"trainer.default_local_dir={folder}",
            f"trainer.experiment_name={name}",
            "trainer.logger=[console]",
        ]
    )
    if code:
        sys.exit(code)
    records = [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").read_text().splitlines()]
    columns = ["response", "extra_info", "reward_error"]
    rows = ds.dataset(Path(folder) / name / "trajectories").to_table(columns=columns).to_pylist()
    wanted = Counter(fate(row["response"], json.loads(row["extra_info"])) if fails else "fine" for row in rows)
    recorded = Counter(
        "fine" if row["reward_error"] is None else "raises" if "ArithmeticError" in row["reward_error"] else "sleeps"
        for row in rows
    )
    steps = [record["timing_s/step"] for record in records if record["iteration"] > args.skip]
    share = statistics.mean(record["reward/error_rate"] for record in records if record["iteration"] > 0)
    return {
        "seconds": statistics.median(steps),
        "rows": len(rows),
        "wanted": wanted,
        "recorded": recorded,
        "share": share,
    }


def main() -> None:
    """Make the runs, and print them in one table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failing_rewards", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", required=True, help="folder with train.parquet of Countdown")
    parser.add_argument("--timeouts", type=float, nargs="+", default=[1.0, 5.0], help="values of reward.timeout_s")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--skip", type=int, default=3, help="iterations at the start that are not timed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = [("never fails", False, args.timeouts[0])]
        cases += [(f"fails, timeout_s={timeout:g}", True, timeout) for timeout in args.timeouts]
        found = {
            title: run(args, folder, f"failing-{number}", fails, timeout)
            for number, (title, fails, timeout) in enumerate(cases)
        }
    table = Table(
        "reward", "s/iteration", "of the first", "rows", "slept / recorded", "raised / recorded", "error_rate"
    )
    first = next(iter(found.values()))["seconds"]
    for title, case in found.items():
        counts = (f"{case['wanted'][fate]} / {case['recorded'][fate]}" for fate in FATES)
        times = f"{case['seconds']:.2f}", f"{case['seconds'] / first:.2f}"
        table.add_row(title, *times, str(case["rows"]), *counts, f"{case['share']:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
