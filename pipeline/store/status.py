"""What the train workers tell the policy store when they begin, and what the store says of the run."""

from dataclasses import dataclass

from pipeline.store.cursor import PromptCursor


@dataclass(frozen=True)
class TrainerState:
    """What the train workers hold when an attempt begins."""

    version: int
    cursor: PromptCursor
    """Where the prompts of the next iteration begin."""
    validated: bool
    """Whether the validation of the version is recorded."""


@dataclass(frozen=True)
class StoreStatus:
    """What the run is doing."""

    attempt: int
    base: int
    """Version that the attempt began with; -1 before the train workers are there."""
    version: int
    stopping: bool
    waiting: dict[str, int]
    """Callers by the phase in which they wait."""
    alive_s: float
    """Seconds since the last heartbeat."""
    alive_by: str

    def describe(self) -> str:
        """One clause about what the run waits for."""
        waits = ", ".join(f"{count} in {phase}" for phase, count in self.waiting.items() if count) or "none"
        return (
            f"policy version {self.version} is out, store waits: {waits}, last heartbeat {self.alive_s:.0f} s "
            f"ago from {self.alive_by}"
        )
