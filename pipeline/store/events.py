"""Events that parts of a run send to the driver, and the log that keeps them until the driver has read them."""

import asyncio
import time
from dataclasses import dataclass, field

from pipeline.stats import Stats


@dataclass(frozen=True)
class AttemptFailed:
    """Event: the train workers have failed and will be restarted."""

    reason: str


@dataclass(frozen=True)
class AttemptBegun:
    """Event: the train workers have loaded `version` and start."""

    version: int


@dataclass(frozen=True)
class PromptsMade:
    """Event: all prompts of an iteration have been chosen."""

    iteration: int
    metrics: dict[str, float]
    """Metrics of these prompts."""


@dataclass(frozen=True)
class VersionLoaded:
    """Event: an engine has loaded a policy version."""

    version: int
    engine: str
    """Name of the engine."""
    load_s: float
    """Seconds that loading took."""
    update_s: float | None
    """Seconds from the end of the version's last optimiser step to this event; None for the first version of an
    attempt, because engines start later."""
    idle_s: float
    """Seconds without an admitted chunk since the engine's previous `VersionLoaded`."""
    busy_s: float
    """Seconds with an admitted chunk since the engine's previous `VersionLoaded`."""


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
    """Scores of the responses to one validation prompt; lists have one entry per response whose reward did not fail."""

    data_source: str
    uid: str
    responses: int
    """Number of responses, including those whose reward failed."""
    scores: list[float]
    votes: list[int]
    """For each entry of `scores` the number of the response's final answer; equal answers have equal numbers. For
    majority votes."""
    accuracies: list[float | None] = field(default_factory=list)
    """For each entry of `scores` the `acc` that the reward function returned; None if it returned none."""


@dataclass(frozen=True)
class ValidationScored:
    """Event: the rows of some validation prompts are scored and on disk."""

    version: int
    prompts: list[PromptScores]
    generate_s: float
    episodes: Stats = field(default_factory=dict)
    """Metrics of the rows' multi-turn episodes, in runs that have them."""


@dataclass(frozen=True)
class CheckpointBegun:
    """Event: a checkpoint of `version` will be written next. A run that resumes from it does not send the earlier
    events again."""

    version: int


@dataclass(frozen=True)
class CheckpointSaved:
    """Event: one rank's part of a checkpoint has been copied to the run's storage."""

    version: int
    rank: int
    ranks: int
    """Number of ranks that copy a part."""


@dataclass(frozen=True)
class Trouble:
    """Event: a message for the user, for example on a failure that is retried."""

    text: str


@dataclass(frozen=True)
class TrainingEnded:
    """Event: training ended with `version`."""

    version: int
    stopped: bool
    """True if training ended because of a request to stop."""


@dataclass(frozen=True)
class Noted:
    """Event: a sentence on a choice that was made for a model. Several processes may post the same text."""

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
    """Return the milliseconds since 1970, a number above all numbers of earlier stores of the run.

    (Each store starts at this time and counts less than 1,000 events per second.)
    """
    return time.time_ns() // 1_000_000


class EventLog:
    """Numbered events for one reader, kept until the reader confirms them.

    Args:
        first: events are counted from `first + 1`. After a crash, the new log must start above every number of the old
            log, so that a reader that requests events after an old number gets all new ones.
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
        """Return the number of the last event, and all events after number `after`.

        Waits up to `timeout` seconds if there is none. The call confirms the events up to `after`, and the log deletes
        these.
        """
        self._confirmed = max(self._confirmed, min(after, self._count))
        self._events = self._events[len(self._events) - (self._count - self._confirmed) :]
        deadline = time.monotonic() + timeout
        while not self._events and time.monotonic() < deadline:
            await asyncio.sleep(self.PAUSE_S)
        return self._count, list(self._events)

    async def flush(self, timeout: float) -> bool:
        """Wait until the reader has confirmed all events so far. Returns True, or False after `timeout` seconds."""
        last = self._count
        deadline = time.monotonic() + timeout
        while self._confirmed < last:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(self.PAUSE_S)
        return True
