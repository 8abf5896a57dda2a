"""Loads the newest whole checkpoint of a run into its learners.

    newest first     files and their lengths              rank 0
                     checksums, an equal part each        all ranks
    damaged          the next one is tried; when one is whole, the damaged ones after it are renamed, and reported
    whole            it is loaded                         all ranks

All of this comes before the first tensor is loaded, and rank 0 decides: others might find another checkpoint.
"""

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from ray.train import Checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
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
from pipeline.train.checkpoint import frozen, retry, training_state
from pipeline.train.learner import Learner
from pipeline.train.optim import LOW


def restore(
    learners: Sequence[Learner],
    kl: KLController,
    root: str,
    policy: str | None = None,
    patience: float = 0.0,
    say: Callable[[str], None] = print,
) -> TrainerState:
    """Load the newest whole checkpoint of the run into `learners` and `kl`; a collective.

    The files decide which one is whole, because Ray Train's own list is updated later.

    Args:
        learners: actor and critic, sharded over any number of ranks.
        kl: the controller of the KL's coefficient.
        root: folder or URL that holds the run's folder of checkpoints.
        policy: folder or URL of the checkpoint of another run, for a run without one of its own; only its weights are
            loaded.
        patience: seconds of retries while the storage does not answer.
        say: takes a sentence about a retry, or about damage.

    Returns:
        the restored state; version 0 for a new run.

    Raises:
        OSError: the storage did not answer.
        FinalError: all checkpoints are damaged, or one cannot be loaded.
    """
    own = ranks.broadcast(retry(lambda: places(root), patience, root, "read", say) if ranks.rank() == 0 else None)
    problems: list[Damaged] = []
    for place in own:
        with _opened(place, patience, say) as (folder, problem):
            if problem is not None:
                problems.append(problem)
            elif folder is not None:
                _keep_aside(problems, place, say)
                return _load(folder, place, learners, kl)
    if problems:
        raise FinalError(none_is_whole(problems))
    if policy is not None:
        with _opened(policy, patience, say) as (folder, problem):
            if folder is None:
                raise FinalError(
                    f"trainer.resume: {problem or f'{policy} is not a complete checkpoint'}; name another one"
                )
            _take_weights(folder, policy, learners)
    return TrainerState(0, PromptCursor(), False)


@contextlib.contextmanager
def _opened(place: str, patience: float, say: Callable[[str], None]) -> Iterator[tuple[Path | None, Damaged | None]]:
    """Yield the checkpoint in `place` as a folder of this machine, None if it is not whole; and its damage."""
    found: Saved | Damaged | None = None
    if ranks.rank() == 0:
        try:
            found = retry(lambda: read(place), patience, place, "read", say)
        except Damaged as error:
            found = error
    found = ranks.broadcast(found)
    if not isinstance(found, Saved):
        yield None, found
        return
    filesystem, path = filesystem_of(place)
    checkpoint, files = Checkpoint(path, filesystem), found.files
    with contextlib.ExitStack() as stack:
        folder = Path(retry(lambda: stack.enter_context(checkpoint.as_directory()), patience, place, "read", say))
        rank, count = ranks.rank(), ranks.count()
        part = retry(lambda: wrong_content(folder, files, rank, count), patience, place, "read", say)
        problem = next(filter(None, ranks.all_gather(part)), None)
        yield (folder, None) if problem is None else (None, Damaged(place, problem))


def _keep_aside(problems: Sequence[Damaged], taken: str, say: Callable[[str], None]) -> None:
    """Rename the damaged checkpoints and report it, on rank 0."""
    if ranks.rank() == 0:
        for error in problems:
            say(f"{error}; it is kept as {Path(set_aside(error.place)).name}, and {taken} is taken")


def _load(folder: Path, place: str, learners: Sequence[Learner], kl: KLController) -> TrainerState:
    """Load the checkpoint of `place`, which is in `folder`."""
    state = training_state(learners)
    rng = folder / f"rng_{ranks.rank()}.pt"
    try:
        # Earlier versions trained bfloat16 weights without their lower halves, which then are zeros.
        load_checkpoint(state, folder, optional=(LOW,))
        progress = json.loads((folder / PROGRESS).read_text())
        generators = _generators(rng) if rng.is_file() else None
    # An earlier version listed no files.
    except ValueError as error:
        raise FinalError(
            f"the checkpoint {place} cannot be loaded: {short_reason(error)}; move it away to use the one before"
        ) from error
    for learner in learners:
        part = state[learner.name]
        model, optimizer = part["model"], part["optimizer"]
        set_state_dict(
            learner.module,
            learner.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            # A frozen base has its weights in its own folder.
            options=StateDictOptions(strict=not frozen(learner)),
        )
        learner.restore_schedule(progress["scheduler_steps"][learner.name])
    if generators is not None:
        _set_rng(generators)
    kl.coef = progress["kl_coef"]
    return TrainerState(progress["version"], PromptCursor.from_json(progress["cursor"]), progress["validated"])


def _take_weights(folder: Path, place: str, learners: Sequence[Learner]) -> None:
    """Load the weights of the learners that the checkpoint of `place`, which is in `folder`, has."""
    state = {}
    try:
        there = json.loads((folder / PROGRESS).read_text())["scheduler_steps"]
        for learner in (learner for learner in learners if learner.name in there):
            weights, untrained = get_model_state_dict(learner.module), frozen(learner)
            state[learner.name] = {"model": {name: weight for name, weight in weights.items() if name not in untrained}}
        load_checkpoint(state, folder)
    except ValueError as error:
        raise FinalError(f"trainer.resume={place} cannot be loaded: {short_reason(error)}; name another one") from error
    for learner in learners:
        if learner.name in state:
            options = StateDictOptions(strict=not frozen(learner))
            set_model_state_dict(learner.module, state[learner.name]["model"], options=options)


def _generators(file: Path) -> dict[str, torch.Tensor]:
    """Load the states of random generators from a file. Raises ValueError if it is damaged."""
    try:
        states: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file.name}: {short_reason(error)}") from error
    return states


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
