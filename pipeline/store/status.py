"""The report of the train workers to the policy store at their start, and the store's report on the run."""

from dataclasses import dataclass

from pipeline.store.cursor import PromptCursor


@dataclass(frozen=True)
class TrainerState:
    """The restored state of the train workers when an attempt begins."""

    version: int
    cursor: PromptCursor
    """Cursor at the beginning of the next iteration's prompts."""
    validated: bool
    """True if the validation of the version is already recorded."""


@dataclass(frozen=True)
class StoreStatus:
    """The current state of the run."""

    attempt: int
    base: int
    """Version that the attempt began with; -1 before the train workers are there."""
    version: int
    stopping: bool
    waiting: dict[str, int]
    """Number of waiting callers, by phase."""
    alive_s: float
    """Seconds since the last heartbeat."""
    alive_by: str
    """Sender of the last heartbeat."""

    def describe(self) -> str:
        """Format the run's current waits as a clause."""
        waits = ", ".join(f"{count} in {phase}" for phase, count in self.waiting.items() if count) or "none"
        return (
            f"policy version {self.version} is current, store waits: {waits}, last heartbeat {self.alive_s:.0f} s "
            f"ago from {self.alive_by}"
        )
