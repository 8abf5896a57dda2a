"""The reference as a second model in the train workers: the numbers of a replica, and nothing of it is trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from pipeline.config import Config
from pipeline.models import fsdp
from pipeline.models.batch import TrainBatch
from pipeline.rows import flat
from pipeline.scoring.reference import Reference
from pipeline.train import checkpoint
from pipeline.train.actor import Actor
from pipeline.train.setup import build_actor
from tests.models.test_lora import with_lora
from tests.models.test_sharing import SIZES
from tests.scoring.test_reference import other_model
from tests.train import test_online_dpo
from tests.train.test_checkpoint import Learners, Storage, rows, saver, storage  # noqa: F401 (a fixture)
from tests.train.updates import CPU, assert_same, assert_same_metrics, make_config, table, trained, update

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape with the policy's vocabulary."""
    return other_model(tmp_path_factory.mktemp("other"), 320)


def with_reference(config: Config, path: Path | None, placement: str = "train_workers") -> Config:
    config.scoring.reference.path = path and str(path)
    config.scoring.reference.placement = placement
    return config


def with_kl(model: Path) -> Config:
    return make_config(model, use_kl_loss=True, kl_loss_coef=0.5, ppo_mini_batch_size=4, ppo_epochs=2)


def adapted(model: Path) -> Config:
    config = with_lora(model)
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.5
    return config


def replica(config: Config) -> Reference:
    return Reference(config.model, config.scoring.reference, config.actor, config.rollout.temperature)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("make", [with_kl, adapted, test_online_dpo.make_config])
def test_updates_are_those_with_the_column_of_a_replica(make, tiny_model: Path, other: Path, dtype: str | None) -> None:
    configs = [with_reference(make(tiny_model), other, placement) for placement in ("replicas", "train_workers")]
    for config in configs:
        config.scoring.reference.dtype, config.rollout.temperature = dtype, 0.7
        config.actor.ppo_max_token_len_per_gpu = 40
    tables = [test_online_dpo.marked(seed).drop_columns("ref_log_probs") for seed in range(2)]
    scored = [replica(configs[0])(rows) for rows in tables]
    batch = TrainBatch.from_table(tables[0])
    actor = build_actor(configs[1], CPU, 10)
    actor.compute_reference(batch)
    column = flat(scored[0], "ref_log_probs")[0]
    np.testing.assert_allclose(batch.ref_log_probs, np.where(batch.mask > 0, column, 0), rtol=0, atol=2e-6)

    theirs, ours = trained(configs[0], *scored), trained(configs[1], *tables)
    assert ours[0].pop("timing_s/ref") > 0
    assert_same_metrics(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    # The reference matters: with the policy's own start the update is another one.
    start = trained(with_reference(make(tiny_model), None), *tables)
    assert start[0]["actor/loss"] != pytest.approx(ours[0]["actor/loss"], rel=1e-2)


def test_rows_are_padded_for_a_reference_that_cannot_attend_over_packed_ones(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    Gemma2ForCausalLM(Gemma2Config(**SIZES | {"vocab_size": 320})).save_pretrained(tmp_path)
    config = with_reference(with_kl(tiny_model), tmp_path)
    rows, actor = TrainBatch.from_table(table()), build_actor(config, CPU, 10)
    assert actor.reference is not None
    assert actor.shares_prompts and not actor.reference.passes.packed
    actor.compute_reference(rows)
    column = flat(replica(config)(table()), "ref_log_probs")[0]
    np.testing.assert_allclose(rows.ref_log_probs, np.where(rows.mask > 0, column, 0), rtol=0, atol=2e-6)


def test_the_reference_is_frozen_sharded_and_in_the_type_of_its_computation(tiny_model: Path) -> None:
    config = with_reference(with_kl(tiny_model), None)
    config.actor.fsdp.param_dtype = "bfloat16"
    config.model.enable_gradient_checkpointing = True
    actor = build_actor(config, CPU, 10)
    assert actor.reference is not None
    module = actor.reference.module
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    assert len(parts) == 3, "two layers and the root"
    parameters = dict(module.named_parameters())
    update(actor, table())
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name], f"{name} was left gathered"
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.bfloat16
        assert not parameter.requires_grad and parameter.grad is None
    assert not module.training and not module.lm.is_gradient_checkpointing
    assert next(actor.module.parameters()).dtype == torch.float32


def test_weights_in_host_memory_give_the_same_numbers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's own way through host memory; without a GPU nothing can be pinned there."""
    plain, offloaded = TrainBatch.from_table(table()), TrainBatch.from_table(table())
    build_actor(with_reference(with_kl(tiny_model), None), CPU, 10).compute_reference(plain)
    made: list[CPUOffloadPolicy] = []

    def policy() -> CPUOffloadPolicy:
        made.append(CPUOffloadPolicy(pin_memory=False))
        return made[-1]

    monkeypatch.setattr(fsdp, "CPUOffloadPolicy", policy)
    config = with_reference(with_kl(tiny_model), None)
    config.scoring.reference.offload = True
    actor = build_actor(config, CPU, 10)
    assert len(made) == 1, "the policy's own weights stay"
    actor.compute_reference(offloaded)
    assert plain.ref_log_probs is not None and plain.ref_log_probs.any()
    np.testing.assert_array_equal(plain.ref_log_probs, offloaded.ref_log_probs)


class Beside(Learners):
    """Actor and critic, with the start model as the reference."""

    actor: Actor

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.actor = build_actor(with_reference(with_kl(model), None), CPU, 100)
        self.both = [self.actor, self.critic]

    def reference(self) -> np.ndarray:
        batch = rows(0)
        self.actor.compute_reference(batch)
        assert batch.ref_log_probs is not None
        return batch.ref_log_probs


def test_a_run_goes_on_with_the_same_reference(tiny_model: Path, storage: Storage) -> None:  # noqa: F811
    """It is read from its own folder again, and is no part of a checkpoint."""
    whole, stopped, restored = Beside(tiny_model), Beside(tiny_model), Beside(tiny_model)
    start = whole.reference()
    for learners in (whole, stopped):
        for learner in learners.both:
            update(learner, rows(0))
    stopped.save(saver(storage), 1)
    restored.restore(storage.run_dir)
    assert restored.distance(stopped) == 0.0
    np.testing.assert_array_equal(restored.reference(), start)
    for learners in (whole, restored):
        for learner in learners.both:
            update(learner, rows(1))
    assert restored.distance(whole) == 0.0
    names = {name for name, _ in whole.actor.module.named_parameters(remove_duplicate=False)}
    assert checkpoint.training_state(whole.both)["actor"]["model"].keys() == names
