"""The parts of an iteration's time, from a run's `metrics.jsonl`.

    python -m benchmarks.iteration runs/NAME [runs/OTHER ...] [--skip 1]

The parts of the upper block follow one another and nearly add up to the step: each is the slowest rank's. The parts of
the middle block lie inside them, as noted. The last block has the share of the time in which each side waits for the
other. Iterations up to `--skip` are left out: in the first one engines start. If generation runs ahead, or training
begins before an iteration is complete, "wait for rows" is the part of the generation that neither hides.
"""

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

PARTS = {
    "timing_s/gen": "wait for rows",
    "timing_s/old_log_prob": "old log-probs",
    "timing_s/update_critic": "update of the critic",
    "timing_s/update_actor": "update of the actor",
    "timing_s/publish": "publish",
}
INSIDE = {
    "rollout/generate_s/max": "generation of the slowest chunk (in: wait for rows)",
    "timing_s/reward": "reward, summed over chunks (in: wait for rows)",
    "timing_s/update_weights": "optimiser step to the engines' acknowledgement (publish, then wait for rows)",
    "timing_s/load_weights": "load of the weights in an engine (in: the line above)",
}
IDLE = {"perf/rollout_idle": "engines idle", "perf/train_idle": "trainer idle"}
STEP = "timing_s/step"


def read(run: Path, skip: int) -> list[dict[str, float]]:
    """Read the iterations of a run after iteration `skip`.

    Raises:
        ValueError: the run has no such iteration.
    """
    file = run / "metrics.jsonl" if run.is_dir() else run
    with open(file) as lines:
        found = [json.loads(line) for line in lines]
    iterations = [record for record in found if STEP in record and record["iteration"] > skip]
    if not iterations:
        raise ValueError(f"{file} holds no iteration after iteration {skip}; lower --skip or train longer")
    return iterations


def table(run: Path, iterations: list[dict[str, float]]) -> Table:
    """Show median, smallest and largest seconds of every part, and the medians' share of the step."""
    result = Table(title=f"{run}: {len(iterations)} iterations", title_justify="left")
    result.add_column("part")
    for name in ("median s", "share", "min s", "max s"):
        result.add_column(name, justify="right")
    step = statistics.median(record[STEP] for record in iterations)

    def row(label: str, values: list[float], last: bool = False) -> None:
        middle = statistics.median(values)
        cells = f"{middle:.3f}", f"{middle / step:.1%}", f"{min(values):.3f}", f"{max(values):.3f}"
        result.add_row(label, *cells, end_section=last)

    for key, label in PARTS.items():
        row(label, [record[key] for record in iterations if key in record] or [0.0])
    row("the rest", [record[STEP] - sum(record.get(key, 0.0) for key in PARTS) for record in iterations])
    row("step", [record[STEP] for record in iterations], last=True)
    for key, label in INSIDE.items():
        if values := [record[key] for record in iterations if key in record]:
            row(label, values)
    result.add_section()
    for key, label in IDLE.items():
        if values := [record[key] for record in iterations if key in record]:
            shares = statistics.median(values), min(values), max(values)
            result.add_row(label, "", *(f"{share:.1%}" for share in shares))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder or its metrics.jsonl")
    parser.add_argument("--skip", type=int, default=1, help="first iterations to leave out (default: %(default)s)")
    args = parser.parse_args()
    for run in args.runs:
        Console().print(table(run, read(run, args.skip)))


if __name__ == "__main__":
    main()
