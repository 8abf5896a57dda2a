"""A check of algorithms on prompts that can all be learned: the model already solves each of them now and then.

    python -m benchmarks.perfectible --out runs/perfectible
    python -m benchmarks.perfectible --out runs/perfectible --rows grpo "grpo_passk actor.optim.lr=1e-4" ppo
    python -m benchmarks.perfectible --out runs/guess --experiment higher_lower_cpu --chunk 4 \\
        --model models/tiny-sft-higher_lower-1 --prompts data/higher_lower-1/test.parquet \\
        --rows "turn_grpo algorithm.turn_gamma=0.5 algorithm.norm_adv_by_std_in_grpo=false"

The protocol is prime-rl's (`examples/hendrycks_sanity`), after Qi et al. 2025, arXiv 2510.26788:

1. `jobs.evaluate` samples `--samples` responses to each prompt, and the prompts with a sampled accuracy from 0.2 to 0.8
   are kept (`--least`, `--most`).
2. Each row of the table is a training run on these prompts. All of them are in each batch, unless the settings set
   `data.train_batch_size`.
3. `jobs.evaluate` samples again from the trained model. A sound algorithm passes a sampled accuracy of 0.95.

A row is an algorithm and further settings in one word. The same command continues: finished rows are not run again.
Without `--model` and `--prompts` the Countdown demo's are made in the folder. The exit code is 1 if no row passes.
"""

import argparse
import hashlib
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.command import call, exit_code
from benchmarks.staleness import claim, make_inputs
from jobs.demo import StepFailed
from pipeline.evaluate.summary import COLUMNS
from pipeline.track.history import read_history, write_atomically
from pipeline.track.validation import prompt_scores, right

PASSED = 0.95
"""Sampled accuracy that a sound algorithm passes."""
ROWS = ["grpo", "dr_grpo", "rloo", "ppo", "reinforce_pp", "gspo", "cispo", "dapo"]
GAP = "training/rollout_log_probs_diff_max"
JOB = [sys.executable, "-m"]


@dataclass(frozen=True)
class Outcome:
    """The results of one row."""

    row: str
    accuracy: float
    """Mean over the prompts of the share of right samples."""
    lost: int
    """Prompts that no sample solves."""
    always: int
    """Prompts that each sample solves."""
    iterations: int
    seconds: float
    """Wall time of the training."""
    gap: float | None
    """Largest gap of a token's log-prob between engine and trainer in the last iteration, in nats."""


def accuracies(folder: Path) -> dict[int, float]:
    """Read the sampled accuracy of each prompt from the folder of an evaluation, by the prompt's row in its file.

    Raises:
        ValueError: the folder has no responses, or the reward of a response failed.
    """
    files = sorted((folder / "responses").glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{folder} has no responses; delete it, and the same command evaluates again")
    rows = pa.concat_tables([pq.read_table(file, columns=list(COLUMNS), partitioning=None) for file in files])
    found = {}
    for prompt in prompt_scores(rows):
        if len(prompt.scores) < prompt.responses:
            raise ValueError(f"{folder}: the reward failed for a response to prompt {prompt.uid}; see its reward_error")
        judged = any(acc is not None for acc in prompt.accuracies)
        values = right(prompt.accuracies) if judged else prompt.scores
        found[int(prompt.uid.removeprefix("val-"))] = statistics.fmean(values)
    return dict(sorted(found.items()))


def chosen(solved: dict[int, float], least: float, most: float, limit: int, multiple: int) -> list[int]:
    """Choose the prompts that are solved in `least` to `most` of their samples.

    Args:
        solved: sampled accuracy by the number of the prompt.
        least, most: bounds, both included.
        limit: largest number of prompts.
        multiple: the number of prompts is a multiple of it, so that all of them fit a batch.

    Raises:
        ValueError: fewer than `multiple` prompts lie between the bounds.
    """
    # Floating point must not decide about 8 of 40 samples.
    kept = [number for number, accuracy in solved.items() if least - 1e-9 <= accuracy <= most + 1e-9][:limit]
    if len(kept) < multiple:
        raise ValueError(
            f"{len(kept)} of {len(solved)} prompts are solved in {least:.0%} to {most:.0%} of the samples, but at "
            f"least {multiple} are needed; score more prompts (--limit), or take another model"
        )
    return kept[: len(kept) // multiple * multiple]


def folder_name(row: str) -> str:
    """Return the name of a row's folder: its algorithm, and a hash if it has settings."""
    algorithm, *settings = row.split()
    return "-".join([algorithm, *([hashlib.blake2b(row.encode(), digest_size=3).hexdigest()] if settings else [])])


def training(args: argparse.Namespace, model: Path, prompts: Path, row: str, folder: Path) -> list[str]:
    """Make the settings of a row's run in `folder`."""
    algorithm, *further = row.split()
    count = pq.read_metadata(prompts).num_rows
    return [
        f"experiment={args.experiment}",
        f"algorithm={algorithm}",
        f"model.path={model}",
        f"data.train_files={prompts}",
        "data.val_files=null",
        f"data.train_batch_size={count}",
        f"rollout.chunk_prompts={args.chunk}",
        f"actor.ppo_mini_batch_size={count // 2}",
        f"trainer.total_training_steps={args.iterations}",
        "trainer.test_freq=-1",
        "trainer.save_freq=20",
        f"trainer.seed={args.seed}",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={folder.parent}",
        f"trainer.experiment_name={folder.name}",
        *args.settings,
        *further,
    ]


def evaluation(args: argparse.Namespace, model: Path, prompts: Path, out: Path, *further: str) -> list[str]:
    """Make the arguments of `jobs.evaluate` for samples of `model`."""
    return [
        f"experiment={args.experiment}",
        f"model.path={model}",
        f"data.val_files={prompts}",
        f"rollout.chunk_prompts={args.chunk}",
        f"rollout.val_kwargs.n={args.samples}",
        "rollout.val_kwargs.temperature=1",
        "trainer.logger=[console]",
        *args.evaluation,
        *further,
        "--k",
        "1",
        "--out",
        str(out),
    ]


def select(args: argparse.Namespace, model: Path, prompts: Path) -> tuple[Path, float]:
    """Write the chosen prompts to `perfectible.parquet`; returns the file and the mean of their sampled accuracies."""
    scored, file = args.out / "scored", args.out / "perfectible.parquet"
    if not file.is_file():
        words = evaluation(args, model, prompts, scored, f"data.val_max_samples={args.limit}")
        log = args.out / "logs" / "scored.log"
        call([*JOB, "jobs.evaluate", *words], log, args.timeout, name="the evaluation of the model")
    solved = accuracies(scored)
    kept = chosen(solved, args.least, args.most, args.prompts_at_most, 4 * args.chunk)
    pq.write_table(pq.read_table(prompts, partitioning=None).take(kept), file)
    return file, statistics.fmean(solved[number] for number in kept)


def run_row(args: argparse.Namespace, model: Path, prompts: Path, row: str) -> Outcome:
    """Train and evaluate one row, unless its result is there.

    Raises:
        RuntimeError: a job failed, or took longer than `--timeout`.
    """
    folder = (args.out / "runs" / folder_name(row)).resolve()
    result = args.out / "results" / f"{folder.name}.json"
    if result.is_file():
        return Outcome(**json.loads(result.read_text()))
    logs = args.out / "logs"
    scored = args.out / "evaluations" / folder.name
    shutil.rmtree(scored, ignore_errors=True)
    call([*JOB, "jobs.train", *training(args, model, prompts, row, folder)], logs / f"{folder.name}.log", args.timeout,
         name=row)  # fmt: skip
    call([*JOB, "jobs.evaluate", *evaluation(args, folder / "model", prompts, scored)],
         logs / f"{folder.name}-evaluation.log", args.timeout, name=f"the evaluation of {row}")  # fmt: skip
    last = read_history(folder / "metrics.jsonl")[-1]
    outcome = outcome_of(row, accuracies(scored), last["iteration"], last["elapsed_s"], last.get(GAP))
    result.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(result, json.dumps(asdict(outcome), indent=1).encode())
    # A checkpoint of each row would fill the disk.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return outcome


def outcome_of(row: str, solved: dict[int, float], iterations: int, seconds: float, gap: float | None) -> Outcome:
    """Summarise the sampled accuracies of a trained model."""
    values = list(solved.values())
    lost, always = sum(value == 0 for value in values), sum(math.isclose(value, 1) for value in values)
    return Outcome(row, statistics.fmean(values), lost, always, iterations, seconds, gap)


def table(outcomes: Sequence[Outcome], before: float, prompts: int) -> Table:
    """Make the table of all rows so far."""
    made = Table("row", "iterations", "before", "after", "lost", "always", "gap", "min", title=f"{prompts} prompts")
    for one in outcomes:
        mark = " *" if one.accuracy >= PASSED else ""
        gap = "-" if one.gap is None else f"{one.gap:.1e}"
        made.add_row(one.row, str(one.iterations), f"{before:.3f}", f"{one.accuracy:.3f}{mark}", str(one.lost),
                     str(one.always), gap, f"{one.seconds / 60:.1f}")  # fmt: skip
    return made


def measure(args: argparse.Namespace) -> int:
    """Run the missing rows; returns the exit code."""
    out: Path = args.out
    if args.model is None:
        data, model = make_inputs(out / "inputs")
        prompts = data / "test.parquet"
    else:
        prompts, model = args.prompts, args.model
    prompts, model = prompts.resolve(), model.resolve()
    kept = {name: str(value) for name, value in sorted(vars(args).items()) if name not in ("rows", "timeout", "out")}
    claim(out, [f"{name}={value}" for name, value in kept.items()])
    file, before = select(args, model, prompts)
    count = pq.read_metadata(file).num_rows
    print(f"{count} prompts are solved in {args.least:.0%} to {args.most:.0%} of the samples; {before:.3f} on average")
    outcomes: list[Outcome] = []
    for number, row in enumerate(args.rows, start=1):
        outcomes.append(run_row(args, model, file.resolve(), row))
        one = outcomes[-1]
        print(f"{number}/{len(args.rows)} {row}: {one.accuracy:.3f}, {one.lost} lost, {one.always} always", flush=True)
        with open(out / "table.txt", "w") as written:
            Console(file=written, width=150).print(table(outcomes, before, count))
    Console().print(table(outcomes, before, count))
    return 0 if any(one.accuracy >= PASSED for one in outcomes) else 1


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perfectible", description=about)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs, logs and table.txt")
    add("--rows", nargs="+", default=ROWS, metavar="ROW", help=f"algorithms, each with settings (default: {ROWS})")
    add("--model", type=Path, metavar="DIR", help="model to begin with, instead of making the demo's")
    add("--prompts", type=Path, metavar="FILE", help="parquet file of prompts, instead of making the demo's")
    add("--experiment", default="countdown_cpu", metavar="NAME", help="(default: %(default)s)")
    add("--limit", type=int, default=400, help="prompts of the file that are scored (default: %(default)s)")
    add("--prompts-at-most", type=int, default=64, help="prompts to train on (default: %(default)s)")
    add("--samples", type=int, default=40, help="of each prompt (default: %(default)s)")
    add("--least", type=float, default=0.2, help="lower bound of the sampled accuracy (default: %(default)s)")
    add("--most", type=float, default=0.8, help="upper bound (default: %(default)s)")
    add("--chunk", type=int, default=8, help="rollout.chunk_prompts (default: %(default)s)")
    add("--iterations", type=int, default=120, help="of each run (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the runs (default: %(default)s)")
    add("--timeout", type=float, default=3600.0, help="seconds that a job may take (default: %(default)s)")
    add("--evaluation", nargs="*", default=[], metavar="key=value", help="further settings of the evaluations")
    add("settings", nargs="*", metavar="key=value", help="further settings of all runs; write -- before them")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser()
    args = parser.parse_args(arguments)
    if (args.model is None) != (args.prompts is None):
        parser.error("--model and --prompts belong together: the model must know the prompts' wording")
    return exit_code(lambda: measure(args), ValueError, RuntimeError, StepFailed)


if __name__ == "__main__":
    sys.exit(main())
