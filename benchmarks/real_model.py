"""Each kind of run with a real model, SmolLM2-135M-Instruct: two to four steps, their time, and their peak of memory.

    python -m benchmarks.real_model --model models/smollm2 --out runs/real-model
    python -m benchmarks.real_model --model models/smollm2 --out runs/real-model --cases dpo ppo

The cases learn sums ("What is 17 + 25?"), except the two episodes. Memory is the sum over all processes of the command,
Ray's included; shared pages count once (PSS). Each case is checked: it exits with 0, writes its model, and its metrics
are finite and have the size that the case expects. `tests/test_real_model.py` runs the same cases.
"""

import argparse
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.command import call, exit_code
from pipeline.track.history import read_history, write_atomically

GAP = "training/rollout_log_probs_diff_max"
MAX_GAP = 1e-3
"""Largest gap of a token's log-prob between engine and trainer, both in float32, in nats."""
EVERY_S = 2.0
SHORT = "data.val_files=null data.train_batch_size=8 trainer.total_training_steps=2 trainer.test_freq=-1"
TRAIN = f"experiment=reverse_text_cpu {SHORT} rollout.n=8 data.max_response_length=16"
GAME = f"experiment=guess_number_cpu {SHORT} rollout.n=4 actor.ppo_mini_batch_size=8"
LORA = f"{TRAIN} model.lora.rank=8 actor.optim.lr=1e-4"
SUPERVISED = (
    "data.train_batch_size=8 data.max_length=96 trainer.total_training_steps=4 trainer.max_token_len_per_gpu=2048 "
    "trainer.num_threads=2"
)
ROWS = 64


@dataclass(frozen=True)
class Case:
    """A kind of run."""

    job: str
    settings: str
    data: str
    """File of `make_data` to train on."""
    metrics: tuple[str, ...] = ()
    """Metrics that the last iteration must have, finite."""
    files: tuple[str, ...] = ()
    """Files of the model's folder, in addition to `config.json`."""


CASES = {
    "grpo": Case("train", TRAIN, "sums", ("actor/grad_norm", GAP)),
    "lora_merged": Case("train", LORA, "sums", ("actor/grad_norm", GAP), ("adapter/adapter_config.json",)),
    "lora_adapter": Case(
        "train", f"{LORA} model.lora.weight_sync=adapter", "sums", (GAP,), ("adapter/adapter_config.json",)
    ),
    "ppo": Case(
        "train",
        f"{TRAIN} algorithm=ppo rollout.n=1 data.train_batch_size=64 actor.ppo_mini_batch_size=64 "
        "critic.ppo_max_token_len_per_gpu=2048",
        "sums",
        ("critic/vf_loss", "critic/vf_explained_var", GAP),
    ),
    "environment": Case("train", GAME, "game", ("agent/turns/mean", GAP)),
    "openai_client": Case(
        "train",
        f"{GAME} agent.environment=null ~agent.kwargs.highest ~agent.kwargs.turns agent.episodes_per_process=1 "
        "agent.program=jobs.examples.agents.higher_lower_client:play",
        "client",
        ("agent/turns/mean", GAP),
    ),
    "sft": Case("sft", f"{SUPERVISED} optim.lr=1e-5", "answers"),
    "dpo": Case("dpo", f"{SUPERVISED} optim.lr=1e-6", "pairs"),
    "reward_model": Case("reward_model", f"{SUPERVISED} optim.lr=1e-5", "pairs"),
}


@dataclass(frozen=True)
class Outcome:
    """The results of one case."""

    case: str
    seconds: float
    """Wall time of the command, with its start."""
    memory_gib: float
    """Peak of the memory of all its processes."""
    metrics: dict[str, float]
    """Metrics of the last iteration that the case names."""


def make_data(folder: Path) -> dict[str, Path]:
    """Write the small files that the cases train on, by name."""
    draw = random.Random(1)
    sums = [(draw.randint(2, 49), draw.randint(2, 49)) for _ in range(ROWS)]
    prompts = [_user(f"What is {a} + {b}? Answer with the number only.") for a, b in sums]
    right = [[{"role": "assistant", "content": str(a + b)}] for a, b in sums]
    wrong = [[{"role": "assistant", "content": f"The number is {a} and {b}."}] for a, b in sums]
    game = _user("Guess a whole number from 0 to 63. Write only your guess in this form: Guess: 7")
    numbers = [str(draw.randint(1, 63)) for _ in range(ROWS)]
    tables = {
        "sums": _prompts("openai/gsm8k", prompts, [str(a + b) for a, b in sums]),
        "game": _prompts("guess_number", [game] * ROWS, numbers),
        "client": _prompts("higher_lower", [game] * ROWS, numbers),
        "answers": {"messages": [prompt + answer for prompt, answer in zip(prompts, right, strict=True)]},
        "pairs": {"prompt": prompts, "chosen": right, "rejected": wrong},
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.parquet" for name in tables}
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), files[name])
    return files


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _prompts(source: str, prompts: Sequence[Any], truths: Sequence[str]) -> dict[str, Any]:
    truth = [{"style": "rule", "ground_truth": text} for text in truths]
    return {"data_source": [source] * len(truths), "prompt": prompts, "reward_model": truth}


class Memory(threading.Thread):
    """A thread that measures the processes that this process has started since the thread began.

    Attributes:
        peak: the largest sum of their memory so far, in bytes.
    """

    def __init__(self) -> None:
        super().__init__(name="memory", daemon=True)
        self.peak, self._began, self._done = 0, time.time() - 1, threading.Event()

    def run(self) -> None:
        """Measure until `stop` is called."""
        while not self._done.wait(EVERY_S):
            self.peak = max(
                self.peak, sum(self._bytes(process) for process in psutil.Process().children(recursive=True))
            )

    def _bytes(self, process: psutil.Process) -> int:
        try:
            return process.memory_full_info().pss if process.create_time() >= self._began else 0
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            return 0  # The process has ended.

    def stop(self) -> None:
        """Stop measuring."""
        self._done.set()
        self.join()


def settings(name: str, model: Path, data: Mapping[str, Path], folder: Path) -> list[str]:
    """Make the settings of a case whose results go to `folder`."""
    case = CASES[name]
    files = (f"model.path={model}", f"data.train_files={data[case.data]}")
    given = [*case.settings.split(), *files, "trainer.logger=[console]"]
    if case.job != "train":
        return [*given, f"out={folder / 'model'}"]
    place = (f"trainer.default_local_dir={folder.parent}", f"trainer.experiment_name={folder.name}")
    return [*given, *place]


def run_case(name: str, model: Path, out: Path, timeout_s: float) -> Outcome:
    """Run a case in the folder `out`, check its results, and measure it.

    Raises:
        RuntimeError: the command failed or took too long, or its results are not as they should be.
    """
    case, folder, log = CASES[name], (out / name).resolve(), out / "logs" / f"{name}.log"
    words = settings(name, model.resolve(), make_data(out.resolve() / "data"), folder)
    memory, begun = Memory(), time.monotonic()
    memory.start()
    try:
        call([sys.executable, "-m", f"jobs.{case.job}", *words], log, timeout_s, {**os.environ}, name=name)
    finally:
        memory.stop()
    seconds = time.monotonic() - begun
    missing = [
        file for file in ("config.json", "model.safetensors", *case.files) if not (folder / "model" / file).is_file()
    ]
    if missing:
        raise RuntimeError(f"{name} wrote no {', '.join(missing)} in {folder / 'model'}; see {log}")
    records = read_history(folder / "metrics.jsonl")
    last = records[-1] if records else {}
    found = {metric: last.get(metric) for metric in case.metrics}
    unsound = [metric for metric, value in found.items() if value is None or not math.isfinite(value)]
    if unsound:
        raise RuntimeError(f"{name} has no finite {', '.join(unsound)} in its last iteration; see {folder}")
    if (found.get(GAP) or 0) > MAX_GAP:
        raise RuntimeError(f"{name}: engine and trainer are {found[GAP]} nats apart, more than {MAX_GAP}; see {folder}")
    return Outcome(
        name, seconds, memory.peak / 2**30, {metric: value for metric, value in found.items() if value is not None}
    )


def table(outcomes: Sequence[Outcome]) -> Table:
    """Make the table of all cases so far."""
    made = Table("case", "s", "peak, GiB", "gap, nats")
    for one in outcomes:
        gap = f"{one.metrics[GAP]:.1e}" if GAP in one.metrics else "-"
        made.add_row(one.case, f"{one.seconds:.0f}", f"{one.memory_gib:.1f}", gap)
    return made


def measure(args: argparse.Namespace) -> int:
    """Run the missing cases; returns the exit code."""
    outcomes, failed = [], []
    for name in args.cases:
        result = args.out / f"{name}.json"
        if not result.is_file():
            try:
                one = run_case(name, args.model, args.out, args.timeout)
            except RuntimeError as error:
                failed.append(str(error))
                continue
            write_atomically(result, json.dumps(asdict(one), indent=1).encode())
        outcomes.append(Outcome(**json.loads(result.read_text())))
        print(f"{name}: {outcomes[-1].seconds:.0f} s, {outcomes[-1].memory_gib:.1f} GiB", flush=True)
    Console().print(table(outcomes))
    print(*failed, sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=about)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="folder of SmolLM2-135M-Instruct")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs, logs and results")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=f"(default: {' '.join(CASES)})")
    add("--timeout", type=float, default=1800.0, help="seconds that a case may take (default: %(default)s)")
    args = parser.parse_args(arguments)
    return exit_code(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
