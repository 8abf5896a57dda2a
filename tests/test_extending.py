"""The custom algorithm of `docs/algorithms.md`, as a user follows it: its file, its parts, and its command."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.advantage.estimators import EstimatorInput, get_adv_estimator
from pipeline.config import load_config
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.learner import ActorConfig
from pipeline.losses import LossInput, get_policy_loss

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("\n## Custom algorithm")[1]


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with the page's file."""
    folder = tmp_path_factory.mktemp("extending")
    name = re.match(r"# (\S+)", block("python"))
    assert name
    (folder / name[1]).write_text(block("python"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def crowded(folder: Path, tmp_path: Path) -> Path:
    """Another folder with the page's file, and with packages that are named like Slipstream's."""
    shutil.copytree(folder, tmp_path / "crowded")
    for name in ("pipeline", "jobs", "configs"):
        (tmp_path / "crowded" / name).mkdir()
        (tmp_path / "crowded" / name / "__init__.py").write_text("raise AssertionError(__file__)")
    return tmp_path / "crowded"


def arguments() -> list[str]:
    """Of the page's command."""
    words = block("bash").replace("\\\n", " ").split()
    assert words[:2] == ["slipstream", "train"]
    return words[2:]


def test_the_estimator_computes_what_the_page_says(folder: Path) -> None:
    config = load_config(arguments()).algorithm
    estimator = get_adv_estimator(config.adv_estimator)
    assert (estimator.name, estimator.scope, estimator.needs) == ("median_baseline", "group", ())
    offsets = np.array([0, 2, 3, 5])
    data: dict[str, Any] = {"rewards": np.array([0.0, 0.1, 1.0]), "group": np.zeros(3, np.int64), "offsets": offsets}
    mask = np.array([True, True, True, False, True])
    data |= {"mask": mask, "token_rewards": np.zeros(5), "log_probs": np.zeros(5)}
    estimate = estimator.function(EstimatorInput(**data), config)
    assert estimate.advantages.tolist() == pytest.approx([-0.1, -0.1, 0, 0, 0.5])  # 0.9, held at the limit
    free = estimator.function(EstimatorInput(**data), AlgorithmConfig())
    assert free.advantages[-1] == pytest.approx(0.9)


def test_the_loss_computes_what_the_page_says(folder: Path) -> None:
    config = load_config(arguments()).actor
    loss = get_policy_loss(config.policy_loss.loss_mode)
    assert loss.zero_without_advantage
    log_probs = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    data = LossInput(
        log_probs,
        torch.tensor([-1.0, -1.0, float("nan")]),
        torch.tensor([2.0, 1.0, 3.0]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([0, 0, 1]),
        2,
    )
    per_token, sums = loss.function(data, config)
    assert per_token.tolist() == pytest.approx([0, 0.3 * np.tanh(1 / 0.3), 0])
    per_token.sum().backward()
    assert log_probs.grad is not None and log_probs.grad[0] == pytest.approx(-2) and log_probs.grad[2] == 0
    assert [int(number) for number in sums["pg_clipfrac"]] == [1, 2]
    assert not torch.equal(loss.function(data, ActorConfig())[0], per_token)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_command_trains_with_both(crowded: Path, tiny_model: Path, prompt_files: Any) -> None:
    environment = os.environ | {"PYTHONPATH": str(crowded)}
    small = [
        f"model.path={tiny_model}",
        f"data.train_files={prompt_files.train}",
        "data.val_files=null",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "trainer.test_freq=-1",
        "trainer.num_workers=1",
        "trainer.total_training_steps=1",
        "trainer.logger=[console]",
    ]
    command = [sys.executable, str(ROOT / "slipstream.py"), "train", *arguments(), *small]
    done = subprocess.run(command, cwd=crowded, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"to continue +slipstream train experiment=", done.stdout), done.stdout
    metrics = (crowded / "runs" / "countdown-cpu" / "metrics.jsonl").read_text()
    assert '"actor/pg_clipfrac"' in metrics and '"actor/ppo_kl"' not in metrics


def test_a_function_that_is_not_there_is_refused_before_anything_starts(crowded: Path, tiny_model: Path) -> None:
    start = f"import sys; sys.path.append({str(ROOT)!r}); from slipstream import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "train", "--dry-run", *arguments(), f"model.path={tiny_model}"]
    command += ["algorithm.adv_estimator=my_algorithms:mean_baseline"]
    environment = os.environ | {"PYTHONPATH": str(crowded)}
    done = subprocess.run(command, cwd=crowded, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "module 'my_algorithms' has no function 'mean_baseline'" in " ".join((done.stdout + done.stderr).split())
