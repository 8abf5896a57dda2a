"""Adapters in the trainer: the KL to the base without a replica, checkpoints, and what is published."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Config
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.models.policy import load_policy
from pipeline.scoring.reference import Reference
from pipeline.train import checkpoint
from pipeline.train.actor import Actor
from pipeline.train.setup import build_actor, build_critic
from tests.models.test_lora import with_lora
from tests.train.test_checkpoint import Learners, Storage, rows, saver, storage  # noqa: F401 (a fixture)
from tests.train.updates import CPU, assert_same, assert_same_metrics, moved, table, trained, update

pytestmark = pytest.mark.usefixtures("one_rank")


def with_kl(model: Path, own: bool) -> Config:
    config = with_lora(model)
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.5
    config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 4, 2
    # A path, even of the base itself, asks for a replica.
    config.scoring.reference.path = None if own else str(model)
    return config


def test_the_reference_is_the_base_without_a_replica(tiny_model: Path) -> None:
    """Losses and weights are those with the column of a replica, also after the adapters have moved."""
    config = with_kl(tiny_model, own=False)
    scored = Reference(config.model, config.scoring.reference, config.actor, config.rollout.temperature)
    tables = [table(seed) for seed in range(3)]
    theirs = trained(config, *(scored(rows) for rows in tables))
    ours = trained(with_kl(tiny_model, own=True), *tables)
    assert ours[0].pop("timing_s/ref") > 0
    assert_same_metrics(ours[0], theirs[0])
    assert theirs[0]["actor/kl_loss"] > 1e-6
    assert_same(ours[1], theirs[1])


def test_the_reference_is_timed_and_knows_nothing_of_the_adapters(tiny_model: Path) -> None:
    actor = build_actor(with_kl(tiny_model, own=True), CPU, 10)
    batch = TrainBatch.from_table(table())
    stats = update(actor, batch)
    assert "timing_s/ref" in stats and "timing_s/old_log_prob" not in stats
    first, second = TrainBatch.from_table(table()), TrainBatch.from_table(table())
    actor.compute_reference(first)
    update(actor, table(1))
    actor.compute_reference(second)
    assert first.ref_log_probs is not None and second.ref_log_probs is not None
    assert np.array_equal(first.ref_log_probs, second.ref_log_probs) and first.ref_log_probs.any()


class Adapted(Learners):
    """Actor and critic with adapters."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        config = with_lora(model)
        self.actor, self.critic = build_actor(config, CPU, 100), build_critic(config, CPU, 100)
        self.both = [self.actor, self.critic]


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on(tiny_model: Path, storage: Storage) -> None:  # noqa: F811
    whole, stopped, restored = Adapted(tiny_model), Adapted(tiny_model), Adapted(tiny_model)
    for learners in (whole, stopped):
        for learner in learners.both:
            update(learner, rows(0))
    stopped.save(saver(storage), 1)
    restored.restore(storage.run_dir)
    for learners in (whole, restored):
        for learner in learners.both:
            update(learner, rows(1))
    assert restored.distance(whole) == 0.0 and restored.distance(stopped) > 1e-4
    names = {
        name
        for learner, state in checkpoint.training_state(whole.both).items()
        for name in (f"{learner}.{inner}" for inner in state["model"])
    }
    assert all(".lora_" in name or name.startswith("critic.head.") for name in names) and len(names) == 2 * 28 + 2


@pytest.mark.parametrize("old_log_probs", ["engine", "recompute"])
def test_an_update_of_the_adapters_moves_the_policy(tiny_model: Path, old_log_probs: str) -> None:
    config = with_lora(tiny_model)
    config.actor.old_log_probs = old_log_probs
    actor = build_actor(config, CPU, 10)
    start = full_state_dict(load_policy(config.model))
    for seed in range(2):
        update(actor, table(seed))
    assert moved(start, full_state_dict(actor.module)) > 1e-4
    assert isinstance(actor, Actor) and not any(
        torch.is_tensor(p.grad) for p in actor.module.parameters() if not p.requires_grad
    )
