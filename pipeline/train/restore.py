"""Loads the newest undamaged checkpoint of a run into its learners.

    for each checkpoint, the newest first:
        check that all files are there, with the right lengths     rank 0
        check their checksums, an equal part on each rank          all ranks
        damaged: try the next older one
        whole: rename and report the newer, damaged ones; load     all ranks

No tensor is loaded before a checkpoint has passed these checks. Rank 0 decides which checkpoints are tried, because
other ranks might see other files.
"""

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ray.train import Checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from pipeline.advantage.kl_controller import KLController
from pipeline.errors import FinalError, short_reason
from pipeline.models.checkpoint_reader import load_checkpoint
from pipeline.storage.checkpoints import (
    PROGRESS,
    Damaged,
    Saved,
    none_is_whole,
    places,
    read,
    set_aside,
)
from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.manifest import wrong_content
from pipeline.store.cursor import PromptCursor
from pipeline.store.status import TrainerState
from pipeline.train import ranks
from pipeline.train.checkpoint import DEADLINE, Trained, frozen, retry, training_state
from pipeline.train.optim import LOW, set_steps
from pipeline.train.own_state import own_state, strategy_of


def restore(
    learners: Sequence[Trained],
    kl: KLController,
    root: str,
    policy: str | None = None,
    patience: float = 0.0,
    say: Callable[[str], None] = print,
) -> TrainerState:
    """Load the newest undamaged checkpoint of an RL run into `learners` and `kl`; a collective.

    Args:
        learners: actor and critic, sharded over any number of ranks.
        kl: the KL controller.
        root: folder or URL that holds the run's folder of checkpoints.
        policy: folder or URL of another run's checkpoint. Only its weights are loaded, and only if this run has no
            checkpoint yet.
        patience: seconds for which a storage that does not answer is tried again.
        say: called with a sentence about a retry or about damage.

    Returns:
        the restored state; version 0 for a new run.

    Raises as `restore_own` does.
    """
    progress = restore_own(learners, root, patience, say)
    if progress is not None:
        kl.coef = progress["kl_coef"]
        return TrainerState(progress["version"], PromptCursor.from_json(progress["cursor"]), progress["validated"])
    if policy is not None:
        with _opened(policy, patience, say) as (folder, problem):
            if folder is None:
                raise FinalError(
                    f"trainer.resume: {problem or f'{policy} is not a complete checkpoint'}; name another one"
                )
            _take_weights(folder, policy, learners)
    return TrainerState(0, PromptCursor(), False)


def restore_own(
    learners: Sequence[Trained], root: str, patience: float, say: Callable[[str], None], key: str = DEADLINE
) -> dict[str, Any] | None:
    """Load the newest undamaged checkpoint in `root` into `learners`; a collective.

    The files in the storage are searched, not Ray Train's list of checkpoints, which is updated later.

    Args:
        learners: the models, sharded over any number of ranks.
        root: folder or URL that holds the run's folder of checkpoints.
        patience: seconds for which a storage that does not answer is tried again.
        say: called with a sentence about a retry or about damage.
        key: name of the setting `patience`, for errors.

    Returns:
        the content of its `progress.json`; None without a checkpoint.

    Raises:
        OSError: the storage did not answer.
        FinalError: all checkpoints are damaged, or the checkpoint cannot be loaded.
    """
    found = retry(lambda: places(root), patience, root, "read", say, key=key) if ranks.rank() == 0 else None
    problems: list[Damaged] = []
    for place in ranks.broadcast(found):
        with _opened(place, patience, say, key) as (folder, problem):
            if problem is not None:
                problems.append(problem)
            elif folder is not None:
                _keep_aside(problems, place, say)
                return _load(folder, place, learners)
    if problems:
        raise FinalError(none_is_whole(problems))
    return None


@contextlib.contextmanager
def _opened(
    place: str, patience: float, say: Callable[[str], None], key: str = DEADLINE
) -> Iterator[tuple[Path | None, Damaged | None]]:
    """Yield the checkpoint at `place`, a folder or URL, as a local folder, after all checks; a collective.

    Yields (folder, None), (None, the damage), or (None, None) if the checkpoint is not complete.
    """
    found: Saved | Damaged | None = None
    if ranks.rank() == 0:
        try:
            found = retry(lambda: read(place), patience, place, "read", say, key=key)
        except Damaged as error:
            found = error
    found = ranks.broadcast(found)
    if not isinstance(found, Saved):
        yield None, found
        return
    filesystem, path = filesystem_of(place)
    checkpoint, files = Checkpoint(path, filesystem), found.files
    with contextlib.ExitStack() as stack:
        opened = retry(lambda: stack.enter_context(checkpoint.as_directory()), patience, place, "read", say, key=key)
        folder, rank, count = Path(opened), ranks.rank(), ranks.count()
        part = retry(lambda: wrong_content(folder, files, rank, count), patience, place, "read", say, key=key)
        problem = next(filter(None, ranks.all_gather(part)), None)
        yield (folder, None) if problem is None else (None, Damaged(place, problem))


def _keep_aside(problems: Sequence[Damaged], taken: str, say: Callable[[str], None]) -> None:
    """Rename the damaged checkpoints and report this, on rank 0.

    Args:
        problems: the damaged checkpoints.
        taken: the older checkpoint that is loaded instead, for the sentence.
        say: called with a sentence for each.
    """
    if ranks.rank() == 0:
        for error in problems:
            say(f"{error}; it is kept as {Path(set_aside(error.place)).name}, and {taken} is taken")


def _load(folder: Path, place: str, learners: Sequence[Trained]) -> dict[str, Any]:
    """Load the checkpoint in the local `folder` into `learners` and the random generators; a collective.

    `place` names the checkpoint in errors. Returns the content of `progress.json`.
    """
    state = training_state(learners, to_load=True)
    rng = folder / f"rng_{ranks.rank()}.pt"
    try:
        _check_strategy(folder, place, learners)
        # Checkpoints of earlier versions lack the lower halves of bfloat16 weights, which then are zeros.
        load_checkpoint(state, folder, optional=(LOW,))
        progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
        generators = _generators(rng) if rng.is_file() else None
    # An earlier version listed no files.
    except ValueError as error:
        raise FinalError(
            f"the checkpoint {place} cannot be loaded: {short_reason(error)}; move it away to use the one before"
        ) from error
    for learner in learners:
        part = state[learner.name]
        if own := own_state(learner):
            own.load_training_state(part)
            set_steps(learner.scheduler, progress["scheduler_steps"][learner.name])
            continue
        settings = get_optimizer_state_dict(learner.module, learner.optimizer)["param_groups"]
        set_state_dict(
            learner.module,
            learner.optimizer,
            model_state_dict=part["model"],
            optim_state_dict={**part["optimizer"], "param_groups": settings},
            # A frozen base has its weights in its own folder.
            options=StateDictOptions(strict=not frozen(learner)),
        )
        set_steps(learner.scheduler, progress["scheduler_steps"][learner.name])
    if generators is not None:
        _set_rng(generators)
    return progress


def _check_strategy(folder: Path, place: str, learners: Sequence[Trained]) -> None:
    """Raise FinalError if the checkpoint in the local `folder`, named `place`, has the form of another strategy."""
    written = json.loads((folder / PROGRESS).read_text()).get("strategy", "fsdp")
    if written != (own := strategy_of(learners)):
        raise FinalError(
            f"the checkpoint {place} was written with actor.strategy={written}, and a run with actor.strategy={own} "
            f"cannot read it; set actor.strategy={written}, or begin a new run with model.path= its exported model "
            "(slipstream export)"
        )


def _take_weights(folder: Path, place: str, learners: Sequence[Trained]) -> None:
    """Load only the weights of the checkpoint in the local `folder`, for each learner that it has.

    `place` names the checkpoint in errors.
    """
    state = {}
    try:
        _check_strategy(folder, place, learners)
        there = json.loads((folder / PROGRESS).read_text())["scheduler_steps"]
        for learner in (learner for learner in learners if learner.name in there):
            if own := own_state(learner):
                state[learner.name] = {"model": own.training_state(to_load=True)["model"]}
                continue
            weights, untrained = get_model_state_dict(learner.module), frozen(learner)
            state[learner.name] = {"model": {name: weight for name, weight in weights.items() if name not in untrained}}
        load_checkpoint(state, folder)
    except ValueError as error:
        raise FinalError(f"trainer.resume={place} cannot be loaded: {short_reason(error)}; name another one") from error
    for learner in learners:
        if learner.name in state:
            if own := own_state(learner):
                own.load_training_state(state[learner.name])
                continue
            options = StateDictOptions(strict=not frozen(learner))
            set_model_state_dict(learner.module, state[learner.name]["model"], options=options)


def _generators(file: Path) -> dict[str, torch.Tensor]:
    """Read the states of random generators, `cpu` and `cuda`, from a file. Raises ValueError if it is damaged."""
    try:
        states: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file.name}: {short_reason(error)}") from error
    return states


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
