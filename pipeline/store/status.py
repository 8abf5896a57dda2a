"""What the train workers report to the policy store when they start, and what the store reports about the run."""

from dataclasses import dataclass

from pipeline.store.cursor import PromptCursor


@dataclass(frozen=True)
class TrainerState:
    """The restored state of the train workers when an attempt begins."""

    version: int
    cursor: PromptCursor
    """Where the prompts of the next iteration begin."""
    validated: bool
    """Whether the validation of the version is already recorded."""


@dataclass(frozen=True)
class StoreStatus:
    """What the run is doing."""

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
        """A clause that says what the run waits for."""
        waits = ", ".join(f"{count} in {phase}" for phase, count in self.waiting.items() if count) or "none"
        return (
            f"policy version {self.version} is current, store waits: {waits}, last heartbeat {self.alive_s:.0f} s "
            f"ago from {self.alive_by}"
        )
