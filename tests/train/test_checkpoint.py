"""Checkpoints of actor and critic, with a folder in the place of Ray Train's storage."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray.train
import torch.distributed as dist

from pipeline.advantage.kl import AdaptiveKL
from pipeline.config import Config
from pipeline.rows import flat
from pipeline.train import checkpoint
from pipeline.train.actor import Actor
from pipeline.train.critic import Critic
from pipeline.train.fsdp import full_state_dict
from pipeline.train.packing import Rows
from tests.train.updates import CPU, make_config, moved, table, with_column


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the last checkpoint is."""
    folder = tmp_path / "last"

    def report(metrics: dict[str, Any], checkpoint: ray.train.Checkpoint, checkpoint_dir_name: str) -> None:
        shutil.copytree(checkpoint.path, folder)

    def get_checkpoint() -> ray.train.Checkpoint | None:
        return ray.train.Checkpoint.from_directory(str(folder)) if folder.exists() else None

    monkeypatch.setattr(checkpoint.ray, "train", SimpleNamespace(**vars(ray.train)))
    monkeypatch.setattr(checkpoint.ray.train, "report", report)
    monkeypatch.setattr(checkpoint.ray.train, "get_checkpoint", get_checkpoint)
    return folder


def config(model: Path) -> Config:
    settings = make_config(model)
    for part in (settings.actor, settings.critic):
        part.optim.lr, part.optim.eps, part.optim.lr_warmup_steps = 1e-2, 1e-2, 10
    return settings


def rows(seed: int) -> Rows:
    count = len(flat(table(seed), "response_ids")[0])
    drawn = np.random.default_rng(seed).normal(size=(2, count))
    return Rows.from_table(with_column(with_column(table(seed), "values", drawn[0]), "returns", drawn[1]))


class Learners:
    """An actor and a critic, with the controller of the KL."""

    def __init__(self, model: Path):
        self.actor, self.critic = Actor(config(model), CPU, 100), Critic(config(model), CPU, 100)
        self.both, self.kl = [self.actor, self.critic], AdaptiveKL(0.3, 0.1, 1000)

    def distance(self, other: "Learners") -> float:
        pairs = zip(self.both, other.both, strict=True)
        return max(moved(full_state_dict(a.module), full_state_dict(b.module)) for a, b in pairs)


@pytest.mark.parametrize("warmup", [0, 2], ids=["both stepped", "critic alone"])
def test_goes_on_as_if_it_had_not_stopped(tiny_model: Path, storage: Path, warmup: int) -> None:
    """Also where the policy has not stepped yet, and neither saving nor restoring shows."""
    whole, saved, restored = Learners(tiny_model), Learners(tiny_model), Learners(tiny_model)
    for version in range(2):
        for learners in (whole, saved):
            learners.critic.update(rows(version))
            learners.kl.update(0.2, 16)
            if version >= warmup:
                learners.actor.update(rows(version))
    checkpoint.save(saved.both, saved.kl, 2, (1, 7))
    assert checkpoint.restore(restored.both, restored.kl) == (2, (1, 7))
    assert restored.kl.coef == whole.kl.coef != 0.3
    for learners in (whole, saved, restored):
        learners.actor.update(rows(2))
        learners.critic.update(rows(2))
    assert whole.distance(saved) == 0 and whole.distance(restored) == 0
    for learners in (whole, saved, restored):
        assert learners.actor.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (4 - warmup) / 10)


def test_a_run_without_a_checkpoint_starts_anew(tiny_model: Path, storage: Path) -> None:
    learners, untouched = Learners(tiny_model), Learners(tiny_model)
    assert checkpoint.restore(learners.both, learners.kl) == (0, (0, 0))
    assert learners.distance(untouched) == 0 and learners.kl.coef == 0.3
