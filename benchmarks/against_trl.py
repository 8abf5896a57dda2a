"""Samples per second against TRL's GRPO: the same model, prompts, batch and lengths on the same two cores.

    python -m benchmarks.against_trl --out runs/against-trl
    python -m benchmarks.against_trl --out DIR --data data/countdown-1 --model models/tiny-sft-1 --trl-python PATH
    python -m benchmarks.against_trl --out DIR --ahead algorithm.max_staleness=2 -- model.share_prompts=never
    python -m benchmarks.against_trl --out runs/against-trl-long --long

Three cases take turns, `--rounds` times, each run in processes of its own: TRL, ours strictly on-policy, and ours one
iteration ahead (`algorithm.max_staleness=1`). All train the Countdown model of `make demo` with the sizes of
`experiment=countdown_cpu`, in float32, by the clipped loss without a KL, and score answers by the same rule. Settings
after `--` hold for both of our cases, and TRL takes batch, samples, lengths, mini-batches and learning rate from them;
settings of `--ahead` hold only for the second case. Ours has one train worker. Strictly on-policy it takes turns on all
cores with engines of one core each; one iteration ahead it and the only engine have half of the cores each. A chunk has
16 prompts. Puzzles, model and an environment with TRL are made in the folder, once, unless `--data`, `--model` and
`--trl-python` name them.

With `--long` rows are 250 + about 170 tokens: 16 puzzles a step, each after 230 digits without meaning, 8 answers to
each by an untrained model of 5 million parameters, which ends them at random, and two mini-batches.

TRL runs in its fastest way without a GPU. It cannot put new weights into a CPU build of vLLM, so it generates with
`transformers`, all samples of an iteration at once. Before the rounds the `--ways` of using the cores are tried, and
the fastest is taken. An iteration is one generation and the optimiser steps on it, in wall-clock time from the end of
the iteration before. Both sides leave out the start, the first `--warmup` iterations, and the time after the last one.
Ours also leaves out the last iteration, because no generation runs during it.

Tables and `result.json` come at the end. The exit code is 1 if a run fails, or if strictly on-policy the median of the
rounds' ratios to TRL is below 1.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import iteration, trl_env
from benchmarks.command import call
from benchmarks.staleness import make_inputs
from benchmarks.trl_report import (
    AHEAD,
    NAMES,
    SYNCHRONOUS,
    TRL,
    Outcome,
    Rounds,
    as_json,
    between_steps,
    complaints,
    of_ours,
    of_trl,
    table,
    trl_parts,
    warnings,
)
from pipeline.config import Config, load_config
from pipeline.reward.rules import countdown
from pipeline.run.signals import stops
from pipeline.track.history import write_atomically

SIDE = Path(__file__).with_name("trl_side.py")
TRIED = 3
"""Iterations after the warm-up in which a way of using the cores is tried."""


@dataclass(frozen=True)
class Way:
    """A way in which TRL uses the cores."""

    processes: int
    generation: str = "generate"
    """`generate`, or `continuous` (continuous batching)."""


WAYS = {"one": Way(1), "two": Way(2), "continuous": Way(1, "continuous")}
CHUNKS = 4
"""Chunks of an iteration of ours; at most as many engines can share it."""
MICRO_BATCH = 128
"""Most rows of TRL's forward pass, all processes together; fewer were slower."""
DIGITS = 230
"""Digits before each puzzle of `--long`; a token each."""
LONG = [
    "data.train_batch_size=16",
    "data.max_prompt_length=320",
    "data.max_response_length=256",
    "actor.ppo_mini_batch_size=8",
    "rollout.chunk_prompts=4",
]
"""Settings of `--long`."""


def make_long_inputs(folder: Path) -> tuple[Path, Path]:
    """Make puzzles after many digits, and an untrained model, in folders of `folder`, unless they exist.

    Raises:
        subprocess.CalledProcessError: puzzles or model could not be made.
    """
    data, model = folder / "data", folder / "model"
    train = data / "train.parquet"
    if (model / "config.json").is_file():
        return data, model
    prepare = f"countdown --out {data} --train 2000 --test 100 --template short --seed 1"
    subprocess.run([sys.executable, "-m", "jobs.prepare", *prepare.split()], check=True)
    table, random = pq.read_table(train), np.random.default_rng(0)
    prompts = table["prompt"].to_pylist()
    for messages in prompts:
        messages[-1]["content"] = "".join(map(str, random.integers(0, 10, DIGITS))) + " " + messages[-1]["content"]
    column = table.schema.get_field_index("prompt")
    pq.write_table(table.set_column(column, table.schema.field(column), pa.array(prompts, table["prompt"].type)), train)
    tiny = f"--out {model} --data {train} --hidden 256 --layers 6 --seed 1"
    subprocess.run([sys.executable, "-m", "jobs.tiny", *tiny.split()], check=True)
    return data, model


def ours(args: argparse.Namespace, data: Path, model: Path, case: str) -> list[str]:
    """Make the settings of one of our cases."""
    # Engines and trainer take turns, or work at the same time; threads that wait for a busy core slow both down.
    half = max(1, args.cores // 2)
    # For so small a model, an engine with two threads is not faster than with one.
    engines, engine_threads, threads = min(args.cores, CHUNKS), 1, args.cores
    if case == AHEAD:
        engines, engine_threads, threads = 1, half, half
    return [
        "experiment=countdown_cpu",
        f"data.train_files={data.resolve() / 'train.parquet'}",
        "data.val_files=null",
        f"model.path={model.resolve()}",
        "actor.optim.lr_scheduler_type=constant",
        # The fastest use of two cores for so small a model: fewer processes, fewer and larger chunks.
        "trainer.num_workers=1",
        f"trainer.num_threads={threads}",
        f"rollout.num_engines={engines}",
        f"rollout.num_threads={engine_threads}",
        "rollout.chunk_prompts=16",
        *(LONG if args.long else []),
        f"trainer.total_training_steps={args.warmup + args.steps + 1}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        *args.settings,
        # The guard is for rows that the current policy generated.
        *(["algorithm.max_staleness=1", "trainer.max_log_prob_gap=null", *args.ahead] if case == AHEAD else []),
    ]


def theirs(config: Config, way: Way, cores: int, folder: Path, iterations: int, seed: int) -> dict[str, Any]:
    """Make the settings of a run of TRL with the same work as ours with `config`.

    Raises:
        ValueError: TRL's side does not support the settings.
    """
    actor, prompts, samples = (
        config.actor,
        config.data.train_batch_size,
        config.data.train_batch_size * config.rollout.n,
    )
    mini_batches = prompts // (actor.ppo_mini_batch_size or prompts)
    if actor.ppo_epochs != 1 or actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        raise ValueError("TRL's side trains with actor.ppo_epochs=1 and without a KL; leave those settings out")
    rows, left = divmod(samples, mini_batches * way.processes)
    if left:
        raise ValueError(f"{samples} samples do not make {mini_batches} mini-batches of {way.processes} processes")
    micro_batch = max(size for size in range(1, MICRO_BATCH // way.processes + 1) if rows % size == 0)
    return {
        "model": config.model.path,
        "train_file": config.data.train_files,
        "rule": countdown.__file__,
        "out": str(folder / "result.json"),
        "scratch": str(folder / "scratch"),
        "prompts": prompts,
        "n": config.rollout.n,
        "max_response_length": config.data.max_response_length,
        "temperature": config.rollout.temperature,
        "mini_batches": mini_batches,
        "micro_batch": micro_batch,
        "accumulation": rows // micro_batch,
        "lr": actor.optim.lr,
        "weight_decay": actor.optim.weight_decay,
        "max_grad_norm": actor.grad_clip,
        "epsilon": actor.clip_ratio,
        "seed": seed,
        "iterations": iterations,
        "threads": max(1, cores // way.processes),
        "generation": way.generation,
    }


def trl_command(python: Path, processes: int, settings: Path) -> list[str]:
    """Make the command that starts TRL's side, without the path of this folder, whose modules it must not import."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python"]
    side = [str(python), "-P", str(SIDE), str(settings)]
    return side if processes == 1 else [str(python), "-P", *launcher, *side]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Make the variables of a run: this process's, except variables that lead to another Ray or other modules."""
    left_out = {"RAY_ADDRESS", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | dict(more)


@dataclass(frozen=True)
class Runner:
    """The runs of both sides."""

    args: argparse.Namespace
    python: Path
    """Interpreter with TRL."""
    data: Path
    model: Path
    cores: int

    def trl(self, way: Way, name: str, seed: int, steps: int) -> Outcome:
        """Run TRL once.

        Raises:
            RuntimeError: the run failed.
        """
        warmup, folder = self.args.warmup, self._fresh(name)
        config = load_config(ours(self.args, self.data, self.model, SYNCHRONOUS))
        settings = theirs(config, way, self.cores, folder, warmup + steps, seed)
        (folder / "settings.json").write_text(json.dumps(settings, indent=1))
        variables = {
            "OMP_NUM_THREADS": str(settings["threads"]),
            "TOKENIZERS_PARALLELISM": "false",
            # Model and prompts are local files.
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.args.out.resolve() / "huggingface"),
        }
        command = trl_command(self.python, way.processes, folder / "settings.json")
        call(command, folder / "log", self.args.timeout, environment(variables))
        return of_trl(folder / "result.json", warmup, steps)

    def ours(self, case: str, name: str, seed: int) -> Outcome:
        """Run ours once.

        Raises:
            RuntimeError: the run failed.
        """
        folder = self._fresh(name)
        settings = ours(self.args, self.data, self.model, case)
        place = [f"trainer.default_local_dir={folder}", "trainer.experiment_name=run", f"trainer.seed={seed}"]
        command = [sys.executable, "-m", "jobs.train", *settings, *place]
        call(command, folder / "log", self.args.timeout, environment({}))
        return of_ours(folder / "run", self.args.warmup, self.args.steps)

    def fastest(self, names: Sequence[str]) -> tuple[str, dict[str, float]]:
        """Find the way with the quickest iterations; also returns the seconds of each way, unless there is only one."""
        if len(names) == 1:
            return names[0], {}
        taken = {}
        for name in names:
            taken[name] = statistics.mean(self.trl(WAYS[name], f"try-{name}", 0, TRIED).seconds)
            print(f"TRL, {name}: {taken[name]:.2f} s/iteration", flush=True)
        return min(taken, key=lambda name: taken[name]), taken

    def round(self, number: int, way: Way) -> dict[str, Outcome]:
        """Run each case once."""
        outcomes = {}
        for case, title in NAMES.items():
            name = f"round-{number}-{case.replace(' ', '-').lower()}"
            if case == TRL:
                outcomes[case] = self.trl(way, name, number, self.args.steps)
            else:
                outcomes[case] = self.ours(case, name, number)
            mean = statistics.mean(outcomes[case].seconds)
            print(f"round {number}, {title}: {mean:.2f} s/iteration", flush=True)
        return outcomes

    def _fresh(self, name: str) -> Path:
        """Make an empty folder for a run."""
        folder: Path = (self.args.out / "runs" / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def show(rounds: Rounds, samples: int) -> None:
    """Print the tables."""
    console = Console()
    console.print(table(rounds, samples))
    for case in (SYNCHRONOUS, AHEAD):
        records = [record for outcomes in rounds for record in outcomes[case].records]
        console.print(iteration.table(Path(NAMES[case]), records))
        console.print(f"outside of the step (metrics and their report): {between_steps(rounds, case):.3f} s")
    console.print(trl_parts(rounds))


def keep_to(cores: int) -> int:
    """Limit this process, and the runs, which inherit the limit, to so many cores; returns the number that it has."""
    kept = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, kept)
    return len(kept)


def measure(args: argparse.Namespace) -> int:
    """Make the inputs, the runs and the report; returns the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    # The settings are checked before the steps that take minutes.
    for case in (SYNCHRONOUS, AHEAD):
        config = load_config(ours(args, Path(), Path(), case))
        for name in args.ways:
            theirs(config, WAYS[name], args.cores, args.out, 1, 1)
    cores = keep_to(args.cores)
    if args.trl_python:
        trl_env.check(args.trl_python)
    # Not resolved: the interpreter of an environment is a link to another one's.
    python = Path(os.path.abspath(args.trl_python)) if args.trl_python else trl_env.make(args.out.resolve() / "trl-env")
    if args.data:
        data, model = args.data, args.model
    else:
        data, model = (make_long_inputs if args.long else make_inputs)(args.out / "inputs")
    runner = Runner(args, python, data, model, cores)
    config = load_config(ours(args, data, model, SYNCHRONOUS))
    samples = config.data.train_batch_size * config.rollout.n
    try:
        way, tried = runner.fastest(args.ways)
        rounds = [runner.round(number, WAYS[way]) for number in range(1, args.rounds + 1)]
    except RuntimeError as error:
        print(error)
        return 1
    content = {
        "versions": trl_env.versions(python),
        "cores": cores,
        "settings": {case: ours(args, data, model, case) for case in (SYNCHRONOUS, AHEAD)},
        "trl_way": way,
        "trl_ways_s_per_iteration": tried,
        **as_json(rounds, samples),
    }
    write_atomically(args.out / "result.json", json.dumps(content, indent=1).encode())
    show(rounds, samples)
    for sentence in (*(f"warning: {warning}" for warning in warnings(rounds)), *complaints(rounds, samples)):
        print(sentence)
    return 1 if complaints(rounds, samples) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_trl", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of all that is made, and of result.json")
    add("--rounds", type=int, default=3, help="runs of each case (default: %(default)s)")
    add("--steps", type=int, default=20, help="iterations of a run that count (default: %(default)s)")
    add("--warmup", type=int, default=3, help="iterations before them (default: %(default)s)")
    add("--cores", type=int, default=2, help="of this machine, that all runs share (default: %(default)s)")
    add("--timeout", type=float, default=1200.0, help="seconds that a run may take (default: %(default)s)")
    add("--ways", nargs="+", choices=WAYS, default=["one", "two"],
        help="how TRL may use the cores: one process with all, one each for two processes, or continuous batching, "
        "whose generation took 25 times as long (default: one two)")  # fmt: skip
    add("--trl-python", type=Path, metavar="PATH", help="Python of an environment with TRL, instead of making it")
    add("--data", type=Path, metavar="DIR", help="train.parquet of Countdown, instead of making it")
    add("--model", type=Path, metavar="DIR", help="warm-started model, instead of making it")
    add("--long", action="store_true", help="rows of 250 + about 170 tokens")
    add("--ahead", nargs="+", default=[], metavar="key=value", help="settings of ours, one step off-policy, alone")
    add("settings", nargs="*", metavar="key=value", help="settings of both of ours; write -- before them")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.steps < 1 or args.warmup < 1:
        parser.error("--rounds, --steps and --warmup must be at least 1: in the first iteration everything starts")
    if (args.model is None) != (args.data is None):
        parser.error("--data and --model belong together: the model must know the puzzles' wording")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        with stops():
            return measure(args)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
