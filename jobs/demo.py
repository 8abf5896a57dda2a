"""The demo: `python -m jobs.demo [--task TASK | --model MODEL] [--seed N] [--algorithm NAME] [key=value ...]`.

The demo writes prompts, makes a tiny model, trains it on the answer format by supervised training, and then trains it
by reinforcement learning, on two CPU cores. With `--model` it trains a pretrained model on sums instead, without
supervised training. Files go to `data/`, `models/` and `runs/` in the current folder. Steps are skipped if their files
exist.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.command import CONTINUES, called, exit_code, new_parser
from jobs.entry import command
from jobs.smollm2 import fetch
from pipeline.config import CONFIG_DIR, load_config
from pipeline.config.paths import without_scheme
from pipeline.plan.host import multiplies_bfloat16
from pipeline.run.versions import check_versions

GGUF = ".gguf"
COMMAND = Path(__file__).resolve().parents[1] / "slipstream.py"


@dataclass(frozen=True)
class Task:
    """A task of the demo for a tiny model: options of the jobs that make its prompts and the model."""

    sft_steps: int
    """Number of steps of supervised training."""

    prepare: str = ""
    """Options for `jobs.prepare`."""

    tiny: str = ""
    """Options for `jobs.tiny`."""

    sft: str = ""
    """Further settings of supervised training."""


TASKS = {
    "countdown": Task(
        400,
        "--template short --numbers 3 --max-number 30 --min-target 1 --max-target 60 --train 10000 --test 1000 "
        "--sft 23000 --sft-test 400 --sft-solution answer",
    ),
    "higher_lower": Task(2500, tiny="--digits 2 --hidden 128 --layers 3"),
    "calculator": Task(600),
    "lookup": Task(400),
    "blocks": Task(
        100,
        tiny="--vision qwen2_5_vl --hidden 96 --layers 3",
        sft="model.vision=trained data.train_batch_size=32 optim.lr=1e-3 data.max_length=96",
    ),
}
SUMS, SMOLLM2 = "sums", "smollm2"
"""The task of pretrained models, and the name of the model that the demo downloads."""
SFT = (
    "data.train_batch_size=64 trainer.num_workers=2 optim.lr=2e-3 optim.min_lr_ratio=0 optim.weight_decay=0.1 "
    "optim.betas=[0.9,0.98]"
)
"""Settings of supervised training, for all tasks."""

EPILOG = """\
settings:
  key=value pairs as of python -m jobs.train, laid over the demo's; the experiment of a task is TASK_cpu (sums_cpu
  with --model).

examples:
  python -m jobs.demo
  python -m jobs.demo --model smollm2
  python -m jobs.demo --seed 2 --algorithm ppo
  python -m jobs.demo --task higher_lower trainer.total_training_steps=20

the same command continues a demo that was interrupted.
"""


class StepFailed(RuntimeError):
    """A step of the demo failed and has printed the reason. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a step ended with exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Demo:
    """Task, seed, model and folders of one demo."""

    task: str
    seed: int
    tag: str
    """Word for the model in names of folders and of the run."""
    model: str
    """Folder of the model that is trained, or its name on the Hub."""
    source: str | None = None
    """Source of a pretrained model: `smollm2`, a GGUF file, or `model` itself; None for a tiny model."""

    @classmethod
    def here(cls, task: str, seed: int, source: str | None = None) -> "Demo":
        """Return a demo with folders in the current folder. `source` None makes a tiny model for `task`."""
        if source is None:
            tag = f"{seed}" if task == "countdown" else f"{task}-{seed}"
            return cls(task, seed, tag, f"models/tiny-sft-{tag}")
        tag = Path(source).name.removesuffix(GGUF)
        made = source == SMOLLM2 or source.endswith(GGUF)
        return cls(SUMS, seed, tag, f"models/{tag}" if made else source, source)

    @property
    def data(self) -> Path:
        """Folder of the prompts."""
        return Path(f"data/{self.task}-{self.seed}")

    def make_model(self) -> None:
        """Make the prompts and the model, unless their files exist.

        Raises:
            StepFailed: a step has failed.
            OSError: SmolLM2 could not be downloaded.
        """
        if self.source is None:
            self._make_tiny()
            return
        if not (self.data / "train.parquet").is_file():
            step("prepare", self.task, "--out", self.data, "--seed", self.seed)
        if self.model != self.source and not (Path(self.model) / "config.json").is_file():
            file = fetch(Path("models")) if self.source == SMOLLM2 else self.source
            step("from_gguf", file, "--out", self.model)

    def _make_tiny(self) -> None:
        """Make prompts, random model and warm model."""
        task, sft_data, tiny = TASKS[self.task], self.data / "sft_train.parquet", Path(f"models/tiny-{self.tag}")
        if not sft_data.is_file():
            step("prepare", self.task, "--out", self.data, *task.prepare.split(), "--seed", self.seed)
        if not (tiny / "config.json").is_file():
            step("tiny", "--out", tiny, "--data", sft_data, "--seed", self.seed, *task.tiny.split())
        if not (Path(self.model) / "config.json").is_file():
            files = (f"data.train_files={sft_data}", f"data.val_files={self.data}/sft_test.parquet")
            steps = f"trainer.total_training_steps={task.sft_steps}"
            model = (f"out={self.model}", f"model.path={tiny}")
            step("sft", *model, *files, f"trainer.seed={self.seed}", steps, *SFT.split(), *task.sft.split())

    def settings(self, algorithm: str | None) -> list[str]:
        """Return the settings of `jobs.train` for this demo. `algorithm` None takes the task's own algorithm."""
        own = f"{self.task}_cpu_{algorithm}"
        if (CONFIG_DIR / "experiment" / f"{own}.yaml").is_file():
            # Some algorithms have their own experiment file; others are merged over the demo's experiment.
            experiment = [f"experiment={own}"]
        else:
            experiment = [f"experiment={self.task}_cpu", *([f"algorithm={algorithm}"] if algorithm else [])]
        kind = "cpu" if self.source is None else self.tag
        name = "-".join([self.task.replace("_", "-"), kind, str(self.seed), *([algorithm] if algorithm else [])])
        return [
            *experiment,
            f"trainer.seed={self.seed}",
            f"trainer.experiment_name={name}",
            f"data.train_files={self.data}/train.parquet",
            f"data.val_files={self.data}/test.parquet",
            f"model.path={self.model}",
            # Without these instructions, products in bfloat16 are slower than in float32.
            *([] if self.source is None or multiplies_bfloat16() else ["actor.fsdp.param_dtype=float32"]),
        ]


def step(job: str, *arguments: object) -> None:
    """Run a job in a child process, and wait for its end, also if a signal interrupts this process.

    Raises:
        StepFailed: the exit code of the job is not 0.
        KeyboardInterrupt: this process was interrupted.
    """
    words = [str(argument) for argument in arguments]
    print(f"demo: {' '.join([*called(job), *words])}", flush=True)
    process = subprocess.Popen([sys.executable, str(COMMAND), job, *words])
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            # Ctrl-C in a terminal has also interrupted the job, which treats two signals at once as one.
            interrupted = True
            process.terminate()
    if interrupted:
        raise KeyboardInterrupt
    if code:
        raise StepFailed(code if code > 0 else 128 - code)


def show(run_dir: Path) -> None:
    """Print the figures of a run and five answers, both before and after the training."""
    from rich.console import Console

    from pipeline.track.before_after import answers, figures
    from pipeline.track.trajectories import recorded_iterations

    console = Console(highlight=False)
    console.print(*figures(run_dir), sep="\n")
    if validated := recorded_iterations(str(run_dir), "val"):
        console.print(answers(run_dir, validated[0], validated[-1]))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code of the first job that fails, else 0."""
    parser = new_parser("demo", "Train a small model on two CPU cores, from an empty folder.", EPILOG)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--task", choices=TASKS, default="countdown", help="of a tiny model (default: %(default)s)")
    text = "pretrained chat model to train on sums: smollm2 (94 MiB to download), a folder, a .gguf file, a Hub name"
    which.add_argument("--model", metavar="MODEL", type=lambda text: str(without_scheme(text)), help=text)
    parser.add_argument("--seed", type=int, default=1, help="of prompts, model and training (default: %(default)s)")
    parser.add_argument("--algorithm", metavar="NAME", help="such as ppo, dapo or lora (default: grpo)")
    parser.add_argument("--only-model", action="store_true", help="stop before the training by reinforcement learning")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, see below")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        check_versions()
        demo = Demo.here(options.task, options.seed, options.model)
        settings = [*demo.settings(options.algorithm), *options.settings]
        # Wrong settings are refused before the model is made, which takes minutes.
        trainer = load_config(settings).trainer
        try:
            demo.make_model()
            if not options.only_model:
                step("train", *settings)
                show(Path(trainer.default_local_dir, trainer.experiment_name))
        except StepFailed as failure:
            return failure.code
        return 0

    return exit_code(run, interrupted=CONTINUES)


if __name__ == "__main__":
    sys.exit(main())
