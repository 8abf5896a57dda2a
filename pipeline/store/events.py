"""What the run tells the driver: events, and the log in which they wait until the driver has read them."""

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AttemptFailed:
    """The train workers are about to be restarted."""

    reason: str


@dataclass(frozen=True)
class AttemptBegun:
    """The train workers hold `version` and begin."""

    version: int


@dataclass(frozen=True)
class PromptsMade:
    """The prompts of an iteration are known."""

    iteration: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class VersionLoaded:
    """An engine has loaded a policy version."""

    version: int
    engine: str
    load_s: float
    update_s: float | None
    """Seconds since the optimiser step; None for the first version of an attempt, which waited for the engines."""
    idle_s: float
    """Seconds since the engine's last event in which it had no admitted chunk."""
    busy_s: float
    """Seconds since then in which it had one."""


@dataclass(frozen=True)
class IterationTrained:
    """An iteration has been trained."""

    iteration: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ValidationAnnounced:
    """`prompts` prompts validate a policy version."""

    version: int
    prompts: int


@dataclass(frozen=True)
class PromptScores:
    """The numbers of one validation prompt, one entry per response whose reward did not fail."""

    data_source: str
    uid: str
    responses: int
    """Those whose reward failed included."""
    scores: list[float]
    votes: list[int]
    """Equal numbers stand for equal answers."""
    accuracies: list[float] = field(default_factory=list)
    """`acc` of the reward function, where it gives one."""
    accuracy_votes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ValidationScored:
    """The rows of some validation prompts are scored and on disk."""

    version: int
    prompts: list[PromptScores]
    generate_s: float


@dataclass(frozen=True)
class CheckpointBegun:
    """A checkpoint of `version` is about to be written; a run that resumes from it never repeats what it covers."""

    version: int


@dataclass(frozen=True)
class CheckpointSaved:
    """A rank's part of a checkpoint is in the storage."""

    version: int
    rank: int
    ranks: int


@dataclass(frozen=True)
class TrainingEnded:
    """Training ended with `version`."""

    version: int
    stopped: bool
    """Whether it was asked to stop."""


Event = (
    AttemptFailed
    | AttemptBegun
    | PromptsMade
    | VersionLoaded
    | IterationTrained
    | ValidationAnnounced
    | ValidationScored
    | CheckpointBegun
    | CheckpointSaved
    | TrainingEnded
)


class EventLog:
    """Numbered events for one reader, kept until the reader confirms them.

    Args:
        first: number before the first event. A log that replaces a lost one starts beyond all numbers of that one, so
            a reader who asks for what follows the old ones misses none of the new.
    """

    PAUSE_S = 0.05

    def __init__(self, first: int = 0):
        self._count = self._confirmed = first
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        """Add an event."""
        self._count += 1
        self._events.append(event)

    async def read(self, after: int, timeout: float) -> tuple[int, list[Event]]:
        """Events past number `after`, and the number of the last one; waits up to `timeout` seconds for one.

        Events up to `after` are confirmed thereby, and forgotten.
        """
        self._confirmed = max(self._confirmed, min(after, self._count))
        self._events = self._events[len(self._events) - (self._count - self._confirmed) :]
        deadline = time.monotonic() + timeout
        while not self._events and time.monotonic() < deadline:
            await asyncio.sleep(self.PAUSE_S)
        return self._count, list(self._events)

    async def flush(self, timeout: float) -> bool:
        """Wait until the reader has confirmed all events that are there now; False when it takes longer."""
        last = self._count
        deadline = time.monotonic() + timeout
        while self._confirmed < last:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(self.PAUSE_S)
        return True
