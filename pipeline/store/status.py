"""Two reports: of the train workers to the policy store at the start of an attempt, and of the store on the run."""

from dataclasses import dataclass

from pipeline.store.cursor import PromptCursor


@dataclass(frozen=True)
class TrainerState:
    """The restored state of the train workers at the start of an attempt."""

    version: int
    """Policy version of the restored weights; 0 in a new run."""
    cursor: PromptCursor
    """Cursor at the beginning of the next iteration's prompts."""
    validated: bool
    """True if the validation of this version is recorded already."""


@dataclass(frozen=True)
class StoreStatus:
    """The current state of the run."""

    attempt: int
    """Number of the current attempt."""
    base: int
    """Policy version with which the attempt began; -1 before the train workers have registered."""
    version: int
    """The current policy version; -1 before the first."""
    stopping: bool
    """True if the run was requested to stop."""
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
