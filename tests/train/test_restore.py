"""A new run that begins with the policy of another one."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.models.fsdp import full_state_dict
from pipeline.storage.checkpoints import newest
from pipeline.store.cursor import PromptCursor
from pipeline.store.status import TrainerState
from tests.train import test_checkpoint
from tests.train.test_checkpoint import Learners, Storage, rows, saver
from tests.train.updates import moved, update

pytestmark = pytest.mark.usefixtures("one_rank")
storage = test_checkpoint.storage
BEGINNING = TrainerState(0, PromptCursor(), False)


@pytest.fixture
def trained(tiny_model: Path, storage: Storage) -> Learners:
    """Learners after three versions, whose checkpoint is in the storage."""
    made = Learners(tiny_model)
    for version in range(2):
        update(made.critic, rows(version))
        update(made.actor, rows(version))
        made.kl.update(0.2, 16)
    made.save(saver(storage), 3)
    return made


def place(storage: Storage) -> str:
    found = newest(str(storage.run_dir))
    assert found is not None
    return found.place


def test_weights_are_taken_and_all_else_begins_from_the_start(
    tiny_model: Path,
    storage: Storage,
    trained: Learners,
) -> None:
    fresh, new = Learners(tiny_model), Learners(tiny_model)
    random = torch.get_rng_state()
    assert new.restore(storage.run_dir / "new", place(storage)) == BEGINNING
    assert torch.equal(torch.get_rng_state(), random)
    assert new.distance(trained) == 0 and new.distance(fresh) > 0
    assert new.kl.coef == fresh.kl.coef != trained.kl.coef
    for learner, other in zip(new.both, fresh.both, strict=True):
        assert not learner.optimizer.state
        assert learner.scheduler.state_dict() == other.scheduler.state_dict()
    # The first step is that of a new optimiser, from the weights of the policy.
    reference = Learners(tiny_model)
    reference.actor.module.load_state_dict(copy.deepcopy(trained.actor.module.state_dict()))
    for learners in (new, reference):
        update(learners.actor, rows(5))
    assert moved(full_state_dict(new.actor.module), full_state_dict(reference.actor.module)) == 0


def test_an_own_checkpoint_comes_before_the_policy(tiny_model: Path, storage: Storage, trained: Learners) -> None:
    own, new = storage.run_dir / "own", Learners(tiny_model)
    later = own / "checkpoints" / "iteration_000005"
    shutil.copytree(place(storage), later)
    progress = json.loads((later / "progress.json").read_text())
    (later / "progress.json").write_text(json.dumps(progress | {"version": 5}))
    test_checkpoint.listed_again(later)
    assert new.restore(own, place(storage)).version == 5 and new.kl.coef == trained.kl.coef
    # One that is not whole is not read.
    (later / "complete_0").unlink()
    assert new.restore(own, place(storage)) == BEGINNING


@pytest.mark.parametrize("had_critic", [True, False])
def test_a_learner_that_only_one_run_has(
    tiny_model: Path, storage: Storage, trained: Learners, had_critic: bool
) -> None:
    new, fresh = Learners(tiny_model), Learners(tiny_model)
    if had_critic:
        new.both = [new.actor]
    else:
        trained.both = [trained.actor]
        trained.save(saver(storage), 4)
    assert new.restore(storage.run_dir / "new", place(storage)) == BEGINNING
    assert moved(full_state_dict(new.actor.module), full_state_dict(trained.actor.module)) == 0
    assert moved(full_state_dict(new.critic.module), full_state_dict(fresh.critic.module)) == 0
