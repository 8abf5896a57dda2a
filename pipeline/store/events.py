"""Events that the run sends to the driver, and the log that keeps them until the driver has read them."""

import asyncio
import time
from dataclasses import dataclass, field

from pipeline.stats import Stats


@dataclass(frozen=True)
class AttemptFailed:
    """Event: the train workers are about to be restarted."""

    reason: str


@dataclass(frozen=True)
class AttemptBegun:
    """Event: the train workers have loaded `version` and start."""

    version: int


@dataclass(frozen=True)
class PromptsMade:
    """Event: the prompts of an iteration are known."""

    iteration: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class VersionLoaded:
    """Event: an engine has loaded a policy version."""

    version: int
    engine: str
    load_s: float
    update_s: float | None
    """Seconds since the optimiser step; None for the first version of an attempt, because engines start after it."""
    idle_s: float
    """Seconds without an admitted chunk since the engine's previous event."""
    busy_s: float
    """Seconds with an admitted chunk since the engine's previous event."""


@dataclass(frozen=True)
class IterationTrained:
    """Event: an iteration has been trained."""

    iteration: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ValidationAnnounced:
    """Event: a policy version will be validated on `prompts` prompts."""

    version: int
    prompts: int


@dataclass(frozen=True)
class PromptScores:
    """Scores of one validation prompt, one entry per response whose reward did not fail."""

    data_source: str
    uid: str
    responses: int
    """Number of responses, including those whose reward failed."""
    scores: list[float]
    votes: list[int]
    """A number for each answer; equal answers have equal numbers."""
    accuracies: list[float | None] = field(default_factory=list)
    """`acc` of the reward function; None if it returned none."""


@dataclass(frozen=True)
class ValidationScored:
    """Event: the rows of some validation prompts are scored and on disk."""

    version: int
    prompts: list[PromptScores]
    generate_s: float
    episodes: Stats = field(default_factory=dict)
    """Metrics of the rows' episodes."""


@dataclass(frozen=True)
class CheckpointBegun:
    """Event: a checkpoint of `version` will now be written. A run that resumes from it does not repeat earlier
    events."""

    version: int


@dataclass(frozen=True)
class CheckpointSaved:
    """Event: a rank's part of a checkpoint has been copied to the run's storage."""

    version: int
    rank: int
    ranks: int


@dataclass(frozen=True)
class Trouble:
    """Event: a message for the user, on a failure that is retried or a finding of the run."""

    text: str


@dataclass(frozen=True)
class TrainingEnded:
    """Event: training ended with `version`."""

    version: int
    stopped: bool
    """True if training ended because of a request to stop."""


@dataclass(frozen=True)
class Noted:
    """Event: a decision about a model. Several processes, and restarted ones, may post the same text."""

    text: str


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
    | Trouble
    | Noted
    | TrainingEnded
)


def milliseconds() -> int:
    """Milliseconds since 1970. No earlier store of the run has reached this number: none counts 1,000 per second."""
    return time.time_ns() // 1_000_000


class EventLog:
    """Numbered events for one reader, kept until the reader confirms them.

    Args:
        first: number before the first event. After a crash, the new log must start above every number of the old log.
            Then a reader that requests the events after an old number misses no new one.
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
        """Return the number of the last event, and the events after number `after`; wait up to `timeout` seconds for
        one.

        The call confirms the events up to `after`, and the log deletes them.
        """
        self._confirmed = max(self._confirmed, min(after, self._count))
        self._events = self._events[len(self._events) - (self._count - self._confirmed) :]
        deadline = time.monotonic() + timeout
        while not self._events and time.monotonic() < deadline:
            await asyncio.sleep(self.PAUSE_S)
        return self._count, list(self._events)

    async def flush(self, timeout: float) -> bool:
        """Wait until the reader has confirmed all present events; returns False after `timeout` seconds."""
        last = self._count
        deadline = time.monotonic() + timeout
        while self._confirmed < last:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(self.PAUSE_S)
        return True
