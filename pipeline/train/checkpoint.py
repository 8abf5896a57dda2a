"""Checkpoints: the whole state of a rank's training, sharded, through `torch.distributed.checkpoint` and Ray Train.

Every rank writes its own shards to a local folder; Ray Train copies them to one folder in the run's storage and counts
a checkpoint only when every rank has reported it. Nothing is pickled that comes from outside: tensors and plain numbers
are all there is.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pipeline.train.actor import Actor

PROGRESS = "progress.json"


def save(actor: Actor, version: int, position: Any) -> None:
    """Save and report a checkpoint; a collective.

    Args:
        actor: policy, optimiser and schedule to save.
        version: the policy version they are at.
        position: where the prompt source goes on.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-checkpoint-") as folder:
        model, optimizer = get_state_dict(actor.policy, actor.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            progress = {"version": version, "position": position, "scheduler_steps": actor.scheduler.last_epoch}
            (Path(folder) / PROGRESS).write_text(json.dumps(progress))
        torch.save(torch.get_rng_state(), Path(folder) / f"rng_{dist.get_rank()}.pt")
        ray.train.report(
            {"version": version},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"iteration_{version:06d}",
        )


def restore(actor: Actor) -> tuple[int, Any]:
    """Load the latest checkpoint of the run into `actor`; a collective.

    Returns:
        the policy version reached and the position of the prompt source; `(0, (0, 0))` for a new run.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0, (0, 0)
    with checkpoint.as_directory() as folder:
        model, optimizer = get_state_dict(actor.policy, actor.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(actor.policy, actor.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        progress = json.loads((Path(folder) / PROGRESS).read_text())
        rng = Path(folder) / f"rng_{dist.get_rank()}.pt"
        if rng.is_file():
            torch.set_rng_state(torch.load(rng, weights_only=True))
    actor.restore_schedule(progress["scheduler_steps"])
    return progress["version"], tuple(progress["position"])
