"""What the run is: its settings, and a model and puzzles for it where none are given."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BATCH, SAMPLES, CHUNKS = 16, 2, 2
EPISODE_WAITS = {"reset": 0.1, "step": 0.05, "episode": 0.14}
"""Share of the script's patience; an episode may have to wait until its host is there again."""
NODE_LABEL = "host=second"
"""Of the second node, on which the engine and the reward tasks are then placed."""
REWARD = '''"""The share of digits. Countdown's rule would give a model with random weights 0 each time."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(c in "0123456789" for c in solution_str) / max(1, len(solution_str))}
'''

ENVIRONMENT = '''"""Asks three times; an answer earns its share of digits. Replies take a moment, for kills."""

import time

from pipeline.agent import Environment, Observation


class Digits(Environment):
    def reset(self, row, seed):
        self.left = 3

    def step(self, message):
        time.sleep(0.1)
        self.left -= 1
        digits = sum(c in "0123456789" for c in message.text) / max(1, len(message.text))
        return Observation("3", done=not self.left, reward=digits / 3)
'''


@dataclass(frozen=True)
class Inputs:
    """Model, prompts and, where the model cannot do Countdown yet, another reward."""

    model: Path
    train: Path
    val: Path
    reward: Path | None = None
    environment: Path | None = None
    """Where the rows are episodes of several turns."""


def make_inputs(folder: Path, seed: int, episodes: bool) -> Inputs:
    """Puzzles and a tiny model with random weights in `folder`; what is there already is taken.

    With `episodes`, an environment rewards the answers, and not a reward function.

    Raises:
        subprocess.CalledProcessError: they could not be made.
    """
    code = folder / ("environment.py" if episodes else "reward.py")
    rewarded = {"environment" if episodes else "reward": code}
    made = Inputs(folder / "model", folder / "train.parquet", folder / "test.parquet", **rewarded)
    folder.mkdir(parents=True, exist_ok=True)
    code.write_text(ENVIRONMENT if episodes else REWARD)
    python = [sys.executable, "-m"]
    if not made.val.is_file():
        options = ["--template", "short", "--numbers", "3", "--train", "4000", "--test", "64", "--seed", str(seed)]
        subprocess.run([*python, "jobs.prepare", "countdown", "--out", str(folder), *options], check=True)
    if not (made.model / "config.json").is_file():
        options = ["--vocab", "320", "--hidden", "64", "--layers", "2", "--seed", str(seed)]
        data = ["--data", str(made.train)]
        subprocess.run([*python, "jobs.tiny", "--out", str(made.model), *data, *options], check=True)
    return made


def settings(
    inputs: Inputs, folder: Path, name: str, *, iterations: int, seed: int, patience_s: float, mlflow: bool, nodes: int
) -> list[str]:
    """Command line of a run with all parties: PPO with a critic and the KL to a reference.

    Args:
        inputs: model, prompts and reward.
        folder: of all runs.
        name: of the run.
        iterations: how many.
        seed: of everything random in the run.
        patience_s: seconds without an iteration after which the script gives up; the run's own deadlines are shorter,
            so that it is the run that says what it waits for.
        mlflow: report to the tracking server.
        nodes: 2 places the engine and the reward tasks on the second node.
    """
    deadlines = {
        **dict.fromkeys(("admission", "publish", "checkpoint", "store"), 0.3),
        **{"engine_start": 0.35, "chunk": 0.15, "rows": 0.55, "collective": 0.7, "train_start": 0.8},
    }
    # A model that is warm already would be spoilt by steps as large as one with random weights wants.
    lr = "1e-3" if inputs.reward or inputs.environment else "1e-4"
    episodes = [
        f"agent.environment={inputs.environment}:Digits",
        "agent.max_turn_tokens=8",
        "agent.hosts=1",
        *(f"agent.{wait}_timeout_s={share * patience_s:g}" for wait, share in EPISODE_WAITS.items()),
    ]
    placed = [f"trainer.placement.{stage}.{NODE_LABEL}" for stage in ("rollout", "reward")] if nodes > 1 else []
    return [
        "algorithm=ppo",
        f"data.train_files={inputs.train}",
        f"data.val_files={inputs.val}",
        "data.val_max_samples=256",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=64",
        f"data.max_response_length={96 if inputs.environment else 32}",
        f"model.path={inputs.model}",
        *([f"reward.custom_reward_function.path={inputs.reward}"] if inputs.reward else []),
        *(episodes if inputs.environment else []),
        f"rollout.n={SAMPLES}",
        f"rollout.chunk_prompts={BATCH // CHUNKS}",
        "rollout.dtype=float32",
        "rollout.enforce_eager=true",
        "rollout.max_num_seqs=64",
        f"actor.optim.lr={lr}",
        "critic.optim.lr=1e-3",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "algorithm.kl_ctrl.target_kl=0.05",
        "algorithm.kl_ctrl.horizon=1000",
        "trainer.num_workers=2",
        "trainer.ray_num_cpus=8",
        f"trainer.total_training_steps={iterations}",
        f"trainer.seed={seed}",
        "trainer.val_before_train=false",
        "trainer.test_freq=10",
        "trainer.save_freq=1",
        "trainer.max_failures=-1",
        "trainer.max_log_prob_gap=1e-2",
        f"trainer.logger=[{'console,mlflow' if mlflow else 'console'}]",
        *(f"trainer.deadlines.{wait}={share * patience_s:g}" for wait, share in deadlines.items()),
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        *placed,
    ]
