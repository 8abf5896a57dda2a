"""The commands of the pages, run one by one: `python -m tests.pages [PAGE ...] [--list] [--work FOLDER]`.

Each page has a folder of its own, with its Python files, prompts, a tiny model and a finished run of one iteration. A
command runs in this folder as the page has it, except for `STAND_INS` and these changes: `train` and `replay` only plan
(`--dry-run`), a demo trains for one iteration, and `...` becomes the settings that the page leaves to the reader.
`LEFT_OUT` has the commands that cannot run here, with the reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.demo import TASKS, Demo

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])}

LEFT_OUT = [
    (r"\$ |#SBATCH|^sbatch|^tail -f slurm", "needs Slurm"),
    (r"^kubectl", "needs Kubernetes; tests/jobs/test_kuberay.py reads the manifests"),
    (r"^ray job submit", "needs the address of a cluster; tests/jobs/test_submit.py submits jobs"),
    (r"^make |^dist/install.sh|^\. .*activate", "sets up an environment; the workflows do it"),
    (r"python -m benchmarks|pytest", "takes up to hours; tests/benchmarks runs the same modules on small sizes"),
    (r"^hf download|openenv:|s3://|http://localhost|/venvs/|reward.sandbox.url", "needs a service or the network"),
    (r"^mlflow ui|^slipstream serve|^tensorboard", "serves until it is stopped"),
    (r"^slipstream prepare (gsm8k|math|hellaswag|hh_rlhf) --input", "needs the published files; see tests/prompts"),
    (r"enable_thinking", "needs a model whose chat template reads it; tests/prompts has one"),
    (r"source_weights|rule_kwargs\.gsm8k", "needs a second data set; see tests/prompts and tests/reward"),
    (r"reward\.model\.path", "needs a trained reward model; see tests/scoring"),
    (r"wandb", "needs an account; see tests/track"),
    (r"actor\.parallel\.", "needs a model whose heads divide; tests/train trains in these layouts"),
    (r"^slipstream from_verl", "needs verl's scripts; tests/jobs/verl converts real ones"),
    (r"^slipstream from_gguf|--model smollm2", "needs a downloaded model; tests/jobs/test_from_gguf.py has small ones"),
    (r"experiment=(NAME|qwen3_8b)\b", "the experiment of a command that is left out"),
    (r"data/hh_rlhf/", "prompts of a command that is left out"),
]
"""Patterns of commands that are not run, each with the reason."""

COUNTDOWN = "data/countdown-1/train.parquet"
STAND_INS = [
    (r"Qwen/Qwen2\.5-[\w.-]+|\bMODEL\b|(?<=path=)/?models/[\w.-]+", "models/tiny-sft-1"),
    (r"model\.path=\S+ (?=.*agent\.program=jobs)", "model.path=models/tiny-sft-higher_lower-1 "),
    (r"(?<==)/(?:shared|data)/\w+/(train|test)\.parquet", r"\1.parquet"),
    (r"(?<==)my\.parquet", COUNTDOWN),
    (r"(?<=val_files=)other\.parquet", "test.parquet"),
    (r"(?<=val_files=)data/train\.parquet", "data/countdown-1/test.parquet"),
    (r"(?<==)pairs\.parquet", "data/pairs/pairs.parquet"),
    (r"'data\.train_files=\[.*?\]'", f"'data.train_files=[{COUNTDOWN},data/countdown-1/test.parquet]'"),
    (r"/code/my_reward", "my_reward"),
    (r"^(slipstream dpo .*data/pairs/train\.parquet)", r"\1 data.train_batch_size=4"),
    (r"compare runs/\S+ runs/\S+", "compare runs/NAME runs/OTHER"),
    (r"runs/(?!mlflow|OTHER)[\w-]+", "runs/NAME"),
    (r"--uid UID --sample K|--uid val-3", "--random 1"),
    (r"--iteration \d+", "--iteration 1"),
    (r"--iterations 3-10", "--iterations 1-1"),
    (r"val-core/gsm8k", "val-core/countdown"),
    (r"experiment=mine\b", "experiment=sums"),
    (r"/nfs/", "nfs/"),
]
"""Patterns of names that are a reader's own, each with a name that is here."""

REST = {
    "data.train_files": "train.parquet",
    "data.train_batch_size": "16",
    "model.path": "models/tiny-sft-1",
    "trainer.experiment_name": "page",
    "reward.custom_reward_function.path": "my_reward.py",
}
"""Settings in place of `...`, unless the command has them. Rows of a command with its own reward are Countdown's."""

DEMOS = [*(("countdown", seed) for seed in (1, 2, 3)), ("higher_lower", 1), ("calculator", 1), ("lookup", 1)]
"""Tasks and seeds of the demos that the pages run, besides those of the benchmarks."""

LINES = {
    "pairs.jsonl": {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
    "rows.jsonl": {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": "Use 3, 4. Target: 7."}],
        "reward_model": {"style": "rule", "ground_truth": [3, 4]},
    },
}
"""A row of each file of JSON lines that a page names."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    text: str
    """The command as the page has it, on one line and without its comment."""

    @property
    def left_out(self) -> str | None:
        """The reason for which the command is not run; None if it is."""
        return next((reason for pattern, reason in LEFT_OUT if re.search(pattern, self.text)), None)

    @property
    def run(self) -> str:
        """The command with stand-ins."""
        text = self.text
        for pattern, name in STAND_INS:
            text = re.sub(pattern, name, text)
        if " ..." in text:
            rest = dict(REST)
            if "reward." in text or COUNTDOWN in text:
                del rest["reward.custom_reward_function.path"]
                rest["data.train_files"] = COUNTDOWN
            if self.page == "gpus":
                rest["trainer.use_gpu"] = "true"
            given = [f"{key}={value}" for key, value in rest.items() if not re.search(rf"(?<![\w.]){key}=", text)]
            text = text.replace(" ...", f" {' '.join(given)}", 1)
        if text.startswith("slipstream demo"):
            text = f"{text} trainer.total_training_steps=1"
        if "--dry-run" not in text:
            text = re.sub(r"^slipstream (train|replay)", r"slipstream \1 --dry-run", text)
        return text


def commands(page: str) -> Iterator[Command]:
    """The commands of a page: `bash` blocks, and in blocks without a language the lines that begin with a command."""
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", PAGES[page].read_text(), re.M | re.S):
        if language not in ("bash", ""):
            continue
        if "#SBATCH" in block:
            yield Command(page, "#SBATCH " + " ".join(block.split())[:60])
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            text = re.sub(r"(^|\s+)# .*$", "", line).strip()
            if text and (language or re.match(r"(slipstream|python|ray job|kubectl) \w", line)):
                yield Command(page, text)


def files(page: str) -> dict[str, str]:
    """The files of a page by name: Python blocks with a name in the first line, and YAML after a sentence with it."""
    text, found = PAGES[page].read_text(), dict[str, str]()
    for name, block in re.findall(r"^```python\n# (?:/code/)?(\w+\.py)\b.*?\n(.*?)^```", text, re.M | re.S):
        found[name] = found.get(name, "") + block
    return found | dict(re.findall(r"`([\w/]+\.yaml)`[^`]*\n\n```yaml\n(.*?)^```", text, re.M | re.S))


def make_base(folder: Path) -> None:
    """Make what the pages take for granted: prompts, tiny models, JSON lines, and a finished run `runs/NAME`."""
    folder.mkdir(parents=True)
    for name, row in LINES.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 64)
    for task, seed in DEMOS:
        demo = Demo.here(task, seed)
        few = " --test 32" if task == "countdown" else ""
        call(f"slipstream prepare {task} --out {demo.data} --seed {seed} {TASKS[task].prepare}{few}", folder)
        call(f"slipstream tiny --out {demo.model} --data {demo.data}/sft_train.parquet {TASKS[task].tiny}", folder)
    call("slipstream prepare json --input pairs.jsonl --out data/pairs", folder)
    call("slipstream demo trainer.total_training_steps=1 trainer.experiment_name=NAME", folder)
    shutil.copytree(folder / "runs" / "NAME", folder / "runs" / "OTHER")


def folder_of(page: str, work: Path) -> Path:
    """The folder of a page, made if it does not exist. `make_*.py` of the page are run."""
    base, folder = work / "base", work / page
    if not base.exists():
        make_base(base)
    if not folder.exists():
        shutil.copytree(base, folder)
        # Every page has the files of the quickstart, but the pages on data and on rewards belong together.
        before = files("data") | files("rewards") if page in ("data", "rewards") else files("quickstart")
        for name, text in (before | files(page)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            if name.startswith("make_"):
                call(f"python {name}", folder)
    return folder


def call(text: str, folder: Path) -> int:
    """Run a command in `folder`, show its output, and return its exit code; 0 if only the machine is too small."""
    print(f"== {folder.name}: {text}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=1800,
    )  # fmt: skip
    print(done.stdout, flush=True)
    # The settings were good, and the plan was printed.
    planned = " --dry-run" in text and "\nthis machine cannot run it: " in done.stdout
    return 0 if done.returncode == 2 and planned else done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the commands, and return 1 if one of them fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="(default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--work", type=Path, help="folder for what the commands write (default: a temporary one)")
    options = parser.parse_args(arguments)
    chosen = [command for page in options.pages or PAGES for command in commands(page)]
    failed: list[Command] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        for command in chosen:
            print(f"== {command.page}: {command.text}", flush=True)
            if command.left_out:
                print(f"== left out: {command.left_out}", flush=True)
                continue
            if options.list:
                print(f"== run as: {command.run}", flush=True)
            else:
                begin = time.monotonic()
                code = call(command.run, folder_of(command.page, work))
                print(f"== exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
                if code:
                    failed.append(command)
    ran = [command for command in chosen if not command.left_out]
    print(f"{len(ran)} commands run, {len(failed)} failed, {len(chosen) - len(ran)} left out")
    for command in failed:
        print(f"failed: {command.page}: {command.text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
