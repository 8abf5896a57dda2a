"""An installed wheel, used from other folders: `python3 tests/wheel.py VENV [--train N]`. Needs the standard library.

One folder is empty, the other one has packages that are named like Slipstream's. In both, a dry run must plan a run
whose reward is a module of the folder. With `--train` the demo trains for N iterations, and in the second folder also a
model with a tool.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("pipeline", "jobs", "configs")
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str))\n"
)
SMALL = ["--template", "short", "--train", "64", "--test", "8", "--sft", "64", "--sft-test", "8"]


def main() -> None:
    """Use the command of `VENV` from both folders; raises an error of `subprocess` if one of them does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, metavar="VENV", help="environment with the wheel")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="train the demo for N iterations")
    options = parser.parse_args()
    command = str(options.venv.absolute() / "bin" / "slipstream")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "crowded"):
            here = Path(folder, name)
            here.mkdir()
            packages = NAMES if name == "crowded" else ()
            for package in packages:
                (here / package).mkdir()
                (here / package / "__init__.py").write_text("raise AssertionError(f'{__file__} was imported')\n")
            # The second user's own path leads there, too.
            environment = os.environ | {"PYTHONPATH": str(here) if packages else ""}
            use(command, here, environment)
            if options.train:
                # The second folder gets the prompts and the models of the first one.
                for made in ("data", "models") if packages else ():
                    shutil.copytree(Path(folder, "empty", made), here / made)
                steps = f"trainer.total_training_steps={options.train}"
                call([command, "demo", steps], here, environment)
                if packages:
                    play(command, here, environment, steps)


def play(command: str, here: Path, environment: dict[str, str], steps: str) -> None:
    """Train a random model in episodes with a tool, whose processes are started by the engine."""
    call([command, "prepare", "calculator", "--out", "products"], here, environment)
    call([command, "tiny", "--out", "caller", "--data", "products/sft_train.parquet"], here, environment)
    files = ["data.train_files=products/train.parquet", "data.val_files=null", "trainer.test_freq=-1"]
    call([command, "train", "experiment=calculator_cpu", "model.path=caller", *files, steps], here, environment)


def use(command: str, here: Path, environment: dict[str, str]) -> None:
    """Read a page, make prompts and a model, and plan a run with a reward of this folder."""
    call([command, "docs", "--search", "wandb"], here, environment)
    call([command, "prepare", "countdown", "--out", "small", *SMALL], here, environment)
    call([command, "tiny", "--out", "tiny", "--data", "small/sft_train.parquet"], here, environment)
    (here / "my_reward.py").write_text(REWARD)
    files = ["data.train_files=small/train.parquet", "data.val_files=small/test.parquet", "model.path=tiny"]
    reward = "reward.custom_reward_function.path=my_reward"
    plan = call([command, "train", "--dry-run", "experiment=countdown_cpu", *files, reward], here, environment)
    assert "reward of a made-up response" in plan, plan


def call(words: list[str], here: Path, environment: dict[str, str]) -> str:
    """Run a command, show its output, and return it."""
    print(f"{here.name}: {' '.join(words[1:])}", flush=True)
    done = subprocess.run(words, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    main()
