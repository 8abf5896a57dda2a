"""Training states of backends that have a form of their own, not the one of FSDP (`checkpoint.py`)."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class KeepsState(Protocol):
    """A backend with a training state of its own form."""

    strategy: str
    """Value of `actor.strategy`."""

    def checkpoint_bytes(self) -> int:
        """Return the number of bytes of this rank's part of a checkpoint."""

    def training_state(self, to_load: bool = False) -> dict[str, Any]:
        """Return the state, as tensors that `dcp` saves from or, if `to_load`, loads into; a collective."""

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Put the loaded tensors of `training_state` into place."""


def own_state(learner: Any) -> KeepsState | None:
    """Return the backend of `learner` if its training state has a form of its own; else None."""
    backend = getattr(learner, "backend", None)
    return backend if isinstance(backend, KeepsState) else None


def strategy_of(learners: Sequence[Any]) -> str:
    """Return the form of the training state of `learners`: `fsdp`, or the `actor.strategy` with another form."""
    return next((own.strategy for own in map(own_state, learners) if own), "fsdp")
