"""Begins a new run with the policy of another one: only weights are read from its checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from pipeline.models.checkpoint_reader import load_checkpoint
from pipeline.storage.checkpoints import PROGRESS
from pipeline.train.checkpoint import frozen
from pipeline.train.learner import Learner


def take_weights(learners: Sequence[Learner], folder: Path) -> None:
    """Load the weights of those learners that the checkpoint in `folder` has; a collective.

    Raises as `load_checkpoint`.
    """
    there = json.loads((folder / PROGRESS).read_text())["scheduler_steps"]
    state = {}
    for learner in (learner for learner in learners if learner.name in there):
        weights, untrained = get_model_state_dict(learner.module), frozen(learner)
        state[learner.name] = {"model": {name: weight for name, weight in weights.items() if name not in untrained}}
    load_checkpoint(state, folder)
    for learner in learners:
        if learner.name in state:
            # The weights of a frozen base are those of its own folder.
            options = StateDictOptions(strict=not frozen(learner))
            set_model_state_dict(learner.module, state[learner.name]["model"], options=options)
