"""An update of the actor against bare torch loops that compute the same, and against TRL's update.

    python -m benchmarks.train                          # every shape, five rounds
    python -m benchmarks.train --shapes long --repeats 3 --threads 2
    python -m benchmarks.train --trl runs/trl-env       # with TRL, from an environment that is made there once
    python -m benchmarks.train --shapes sums --threads 2 --model models/smollm2 --sides packed slipstream
    python -m benchmarks.train --freed                  # the cost of freed memory that goes back to the system

    long     4 prompts of 256 tokens x 4 answers of 64 to 1,024
    mix      16 rows of 64 to 2,048 tokens, each with a prompt of its own
    shared   64 prompts of about 17 tokens x 8 answers of about 11, in four mini-batches
    context  2 prompts of 1,536 tokens x 8 answers of about 128
    sums     16 prompts of about 44 tokens x 8 answers of 4 to 16

All sides have the same model, rows, token budget, loss (PPO's clip) and AdamW. `packed` is a loop over rows that stand
end to end, with one causal attention for each; `padded` has them sorted by length and padded on the right. Both keep
the logits of a pass, and compute no entropy and no metrics. TRL pads rows in their order, as many in a pass as the
budget allows, but at most 128, beyond which it is slower. With `--freed`, the only sides are updates that keep freed
memory, that give it back after each update (as train workers with a critic do), and that give it back at once
(`MALLOC_MMAP_THRESHOLD_`).

Each side is a process of its own, and they take turns. The fewest CPU seconds of each side count, because other
processes of the machine disturb them least. The peak is the memory of the update on top of the process without a model.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import trl_env
from benchmarks.taking_turns import Side
from benchmarks.train_sides import FREED, SHAPES, SIDES, Shape, model, rows_of
from pipeline.models.batch import TrainBatch

TRL_ROWS = 128
"""Most rows of TRL's pass."""
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def trl_settings(shape: Shape, threads: int, folder: Path) -> Path:
    """Write the settings of TRL's side, with model and rows, into `folder`; returns their path."""
    rows = TrainBatch.from_table(rows_of(shape))
    model(shape).save_pretrained(folder / "model")
    names = ("prompt_ids", "prompt_offsets", "response_ids", "response_offsets", "old_log_probs", "advantages")
    np.savez(folder / "rows.npz", **{name: getattr(rows, name) for name in names})
    most, mini_batch = min(TRL_ROWS, shape.budget // max(rows.lengths)), len(rows) // shape.mini_batches
    settings = {
        "model": str(folder / "model"),
        "rows": str(folder / "rows.npz"),
        "samples": max(shape.samples, 2),
        "mini_batches": shape.mini_batches,
        "rows_per_pass": max(size for size in range(1, most + 1) if mini_batch % size == 0),
        "threads": threads,
        "out": str(folder / "out"),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    return path


def command(side: str, shape: str, threads: int, model: str | None) -> list[str]:
    """Return program and arguments of a side's process."""
    variables = ["env", f"{THRESHOLD}=262144"] if side.endswith(THRESHOLD) else []
    options = ["--threads", str(threads), *(["--model", model] if model else [])]
    return [*variables, sys.executable, "-m", "benchmarks.train_sides", side, shape, *options]


def measure(
    name: str, sides: Iterable[str], repeats: int, threads: int, model: str | None, trl: Path | None, timeout_s: float
) -> dict[str, tuple[float, float]]:
    """CPU seconds of an update of each side, the fewest of `repeats` in turns, and the highest peak in MiB; the first
    round is left out."""
    commands = {side: command(side, name, threads, model) for side in sides}
    with ExitStack() as stack:
        if trl is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            script = Path(__file__).with_name("trl_step_side.py")
            commands["TRL"] = [str(trl), "-P", str(script), str(trl_settings(SHAPES[name].of(model), threads, folder))]
        running = {side: stack.enter_context(Side(side, words, timeout_s)) for side, words in commands.items()}
        turns = [{side: process.turn() for side, process in running.items()} for _ in range(repeats + 1)][1:]
    return {
        side: (min(turn[side]["cpu_s"] for turn in turns), max(turn[side]["peak_mib"] for turn in turns))
        for side in commands
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", metavar="FOLDER", help="a model in place of each shape's random one")
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="measure TRL, too, in an environment in this folder")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="each holds a model in memory")
    parser.add_argument("--freed", action="store_true", help="measure what it costs to give freed memory back")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of an update")
    args = parser.parse_args(arguments)
    trl = None if args.trl is None else trl_env.make(args.trl)
    sides = ["slipstream", *FREED] if args.freed else args.sides
    for name in args.shapes:
        found = measure(name, sides, args.repeats, args.threads, args.model, trl, args.timeout)
        others = [side for side in ("packed", "padded", "slipstream") if side in found]
        table = Table(name, "CPU seconds of an update", *(f"of {other}" for other in others), "peak MiB")
        for side, (seconds, peak) in found.items():
            ratios = (f"{seconds / found[other][0]:.2f}" for other in others)
            table.add_row(side, f"{seconds:.3f}", *ratios, f"{peak:.0f}")
        Console().print(table)


if __name__ == "__main__":
    main()
