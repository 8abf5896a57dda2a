"""Checkpoints: the whole state of a rank's training, sharded, through `torch.distributed.checkpoint` and Ray Train.

Every rank writes its own shards to a local folder; Ray Train copies them to one folder in the run's storage and counts
a checkpoint only when every rank has reported it. Nothing is pickled that comes from outside: tensors and plain numbers
are all there is.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pipeline.advantage.kl import KLController
from pipeline.train.learner import Learner

PROGRESS = "progress.json"


def save(learners: Sequence[Learner], kl: KLController, version: int, position: Any) -> None:
    """Save and report a checkpoint; a collective.

    Args:
        learners: actor and critic: models, optimisers and schedules to save.
        kl: its coefficient is saved.
        version: the policy version they are at.
        position: where the prompt source goes on.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-checkpoint-") as folder:
        dcp.save(_state(learners), checkpoint_id=folder)
        if dist.get_rank() == 0:
            progress = {
                "version": version,
                "position": position,
                "kl_coef": kl.coef,
                "scheduler_steps": {learner.name: learner.scheduler.last_epoch for learner in learners},
            }
            (Path(folder) / PROGRESS).write_text(json.dumps(progress))
        torch.save(torch.get_rng_state(), Path(folder) / f"rng_{dist.get_rank()}.pt")
        ray.train.report(
            {"version": version},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"iteration_{version:06d}",
        )


def restore(learners: Sequence[Learner], kl: KLController) -> tuple[int, Any]:
    """Load the latest checkpoint of the run into `learners` and `kl`; a collective.

    Returns:
        the policy version reached and the position of the prompt source; `(0, (0, 0))` for a new run.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0, (0, 0)
    with checkpoint.as_directory() as folder:
        state = _state(learners)
        dcp.load(state, checkpoint_id=folder)
        for learner in learners:
            part = state[learner.name]
            set_state_dict(
                learner.module,
                learner.optimizer,
                model_state_dict=part["model"],
                optim_state_dict=part["optimizer"],
            )
        progress = json.loads((Path(folder) / PROGRESS).read_text())
        rng = Path(folder) / f"rng_{dist.get_rank()}.pt"
        if rng.is_file():
            torch.set_rng_state(torch.load(rng, weights_only=True))
    kl.coef = progress["kl_coef"]
    for learner in learners:
        learner.restore_schedule(progress["scheduler_steps"][learner.name])
    return progress["version"], tuple(progress["position"])


def _state(learners: Sequence[Learner]) -> dict[str, dict[str, Any]]:
    """Models and optimiser states by the learner's name, as tensors that `dcp` saves from or loads into."""
    state = {}
    for learner in learners:
        unused = not learner.optimizer.state
        model, optimizer = get_state_dict(learner.module, learner.optimizer)
        if unused:
            # torch fills the state with a step of no length, which AdamW would count when it corrects its moments.
            for moments in learner.optimizer.state.values():
                moments["step"].zero_()
        state[learner.name] = {"model": model, "optimizer": optimizer}
    return state
