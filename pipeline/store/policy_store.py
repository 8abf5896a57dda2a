"""The policy store: which policy version exists, where its weights are, and which chunk may start.

One small actor between the train workers and the stream. It holds versions, object refs and the admission rule, never
tensors and never rows. The protocol, for version v of one attempt (`StoreClient` has one method for each call):

    train ranks   put their shards, `publish(v, shards)`      v becomes current when every rank has published
    prompt source `wait_prompts_due(chunk)`                   waits until the chunk may start, or soon may
    engine        `admit(chunk)` -> version, shards           waits until the chunk may start
    engine        loads, `acknowledge(v, checksum)`           nothing is generated before that
    filter        `report_groups(kept, dropped)`              dropped groups admit as many others
    advantage     `kl_coef(v)`                                the coefficient that belongs to the rows of version v
    value replica `weights("critic", v)` -> version, shards   the critic that belongs to the rows of version v

A version is all trained models, policy and critic, after the same iteration. One that is to be validated stays current
until its validation has been recorded, however far ahead the trainer is (`versions.py`).

Every (re)start of the train workers is a new **attempt**: the stream starts over, `register_trainer` gives the version,
and waits of older attempts fail at once. If the store itself dies, Ray starts it again, empty and with other numbers:
all callers of the old one fail, the train workers restart, and an attempt begins.

A wait's deadline counts from the last heartbeat (a publication, an acknowledgement, the start of an attempt), so a slow
but living run never trips it, and a dead one always does, naming phase and party.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pipeline.errors import FinalError
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.errors import StaleAttempt, StoreTimeout
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    Event,
    EventLog,
    PromptsMade,
    ValidationAnnounced,
    ValidationScored,
    VersionLoaded,
)
from pipeline.store.prompt_ledger import PageGrant, PromptBatch, PromptLedger
from pipeline.store.status import StoreStatus, TrainerState
from pipeline.store.versions import POLICY, Ticket, Versions
from pipeline.store.waits import Waits
from pipeline.weights.load import Shard


def milliseconds() -> int:
    """Since 1970: a number that no store of the run has used, because none counts a thousand a second."""
    return time.time_ns() // 1_000_000


class PolicyStore:
    """The state behind the actor; plain asyncio, usable without Ray. Calls of an ended attempt raise `StaleAttempt`.

    Args:
        admission: chunk and batch sizes and the staleness bound.
        first: gives the number before the first attempt and the first event. A store that Ray starts again must not
            repeat a number of the one before: `milliseconds`.
    """

    def __init__(self, admission: Admission, first: Callable[[], int] = int):
        self.admission = admission
        self.attempt = self._first = first()
        self.stopping = False
        self._waits = Waits(self._check)
        self._changed = self._waits.changed
        self._events = EventLog(self._first)
        self._reset()

    def _reset(self) -> None:
        self.base = -1
        self.kept_groups = 0
        self.dropped_groups = 0
        self._versions = Versions(self.admission.max_staleness)
        self._trainer: TrainerState | None = None
        self._prompts = PromptLedger(-1, PromptCursor())
        self._last_version: int | None = None

    @property
    def version(self) -> int:
        """The current version; -1 before the first."""
        return self._versions.current

    # attempts

    async def new_attempt(self) -> int:
        """Start over: called when the stream is (re)built."""
        async with self._changed:
            self.attempt += 1
            self._reset()
            self._waits.heartbeat("the stream")
            return self.attempt

    async def current_attempt(self) -> int:
        """Number of the current attempt.

        Raises:
            StaleAttempt: the store has restarted since the stream was built.
        """
        if self.attempt == self._first:
            raise StaleAttempt("the policy store has restarted, and no stream has been built since")
        return self.attempt

    async def register_trainer(self, attempt: int, state: TrainerState, world_size: int) -> None:
        """The restored train loop reports its version and the prompts that come next."""
        async with self._changing(attempt):
            self.base = state.version
            self._versions.world_size = world_size
            self._trainer = state
            self._prompts = PromptLedger(state.version, state.cursor)
            self._events.append(AttemptBegun(state.version))
            self._waits.heartbeat("the train loop")

    async def trainer_state(self, attempt: int, timeout: float) -> TrainerState:
        """Wait for what `register_trainer` was given."""
        await self._waits.until(attempt, lambda: self._trainer is not None, timeout, "start", "the train loop")
        assert self._trainer is not None
        return self._trainer

    # weights

    async def publish(
        self,
        attempt: int,
        version: int,
        shards: dict[str, Shard],
        stepped_at: float,
        kl_coef: float = 0.0,
        validates: bool = False,
    ) -> None:
        """One rank's part of a version.

        Args:
            attempt: of the train workers.
            version: its number.
            shards: the rank's shard of each trained model, the policy (`POLICY`) always among them.
            stepped_at: wall-clock time at which the rank's last optimiser step ended.
            kl_coef: coefficient of the KL in the reward for the rows of this version.
            validates: whether the version is to be validated.
        """
        async with self._changing(attempt):
            self._versions.publish(version, shards, stepped_at, kl_coef, validates)
            self._waits.heartbeat(f"train rank {shards[POLICY].rank} (publishing version {version})")

    async def acknowledge(
        self, attempt: int, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        """An engine has loaded a policy version.

        Args:
            attempt: of the stream.
            engine: its name.
            version: what it has loaded.
            crc: checksum of the weights it got.
            load_s: seconds that loading took.
            idle_s, busy_s: seconds since its last acknowledgement without and with admitted chunks.

        Raises:
            FinalError: the engine's checksum is not the published one.
            ValueError: the version is not known, or not current yet.
        """
        async with self._changing(attempt):
            entry = self._versions.get(version)
            if entry is None or version > self.version:
                raise ValueError(
                    f"engine {engine} acknowledged version {version}, which nobody may use (current is {self.version})"
                )
            if crc != entry.checksum:
                raise FinalError(
                    f"engine {engine} loaded version {version} with checksum {crc:08x}, "
                    f"published was {entry.checksum:08x}"
                )
            # The first version of an attempt waited for the engines to start.
            update_s = time.time() - entry.stepped_at if version > self.base else None
            self._events.append(VersionLoaded(version, engine, load_s, update_s, idle_s, busy_s))
            self._waits.heartbeat(f"engine {engine}")

    async def weights(self, attempt: int, model: str, version: int, timeout: float) -> Ticket:
        """The current weights of `model`, which are those of `version` or, in an asynchronous run, newer ones."""
        await self.wait_version(attempt, version, timeout, f"{model} weights")
        return self._versions.ticket(model)

    async def kl_coef(self, attempt: int, version: int, timeout: float) -> float:
        """Coefficient of the KL in the reward for the rows of a version; waits for the version."""
        await self.wait_version(attempt, version, timeout, "KL coefficient")
        return self._versions.kl_coef(version)

    # admission

    async def admit(self, attempt: int, chunk: int, timeout: float) -> Ticket | None:
        """Wait until a chunk may start, and return the current weights.

        None where dynamic sampling has all groups of the run, so that the chunk never starts.
        """

        def ready() -> bool:
            if self.base < 0:
                return False
            if self._filled():
                # Not only when the last iteration is trained: that may wait for a validation behind this chunk.
                return True
            needless = self.admission.needless(self.base, chunk, self.dropped_groups)
            return self.version >= self._needed(chunk) and not needless

        await self._waits.until(attempt, ready, timeout, "admission", lambda: self._versions.needs(self._needed(chunk)))
        return None if self._filled() else self._versions.ticket(POLICY)

    async def admit_validation(self, attempt: int, version: int, timeout: float) -> Ticket:
        """Wait for exactly `version`, which stays current until all of its validation is recorded.

        Raises:
            RuntimeError: a newer version is already current.
        """
        await self.wait_version(attempt, version, timeout, "validation")
        if self.version != version:
            raise RuntimeError(f"validation of policy version {version} came too late: version {self.version} is out")
        return self._versions.ticket(POLICY)

    async def report_groups(self, attempt: int, kept: int, dropped: int) -> None:
        """Dynamic sampling: groups of this attempt that are trained, and that are not, so far."""
        async with self._changing(attempt):
            self.kept_groups, self.dropped_groups = kept, dropped
            self._changed.notify_all()

    # validation

    async def announce_validation(self, attempt: int, version: int, prompts: int) -> None:
        """`prompts` prompts validate `version`; 0 if it is not validated (again)."""
        async with self._changing(attempt):
            if prompts:
                self._events.append(ValidationAnnounced(version, prompts))
            self._versions.announce(version, prompts)
            self._changed.notify_all()

    async def record_validation(self, attempt: int, scored: ValidationScored) -> None:
        """Some prompts of a validation are scored, and their rows are on disk."""
        async with self._changing(attempt):
            self._events.append(scored)
            self._versions.record(scored.version, [prompt.uid for prompt in scored.prompts])
            self._waits.heartbeat(f"the validation of version {scored.version}")

    async def wait_version(self, attempt: int, version: int, timeout: float, phase: str = "version") -> None:
        """Wait until `version` is current, and so all validations of earlier ones are recorded."""
        await self._waits.until(
            attempt, lambda: self.version >= version, timeout, phase, lambda: self._versions.needs(version)
        )

    async def wait_validated(self, attempt: int, version: int, timeout: float) -> None:
        """Wait until `version` is current and nothing of its validation is missing."""
        what = f"the validation of policy version {version}"
        await self._waits.until(attempt, lambda: self._versions.validated(version), timeout, "checkpoint", what)

    async def is_validated(self, attempt: int, version: int) -> bool:
        """Whether nothing of the validation of `version` is missing."""
        self._check(attempt)
        return self._versions.validated(version)

    async def wait_prompts_due(self, attempt: int, chunk: int, lookahead: int, timeout: float) -> None:
        """Hold the prompt source until chunk `chunk` is at most `lookahead` versions from admission."""
        await self._until_due(attempt, lambda: self._due(chunk, lookahead), chunk, lookahead, timeout)

    async def grant_page(self, attempt: int, page: int, chunk: int, lookahead: int, timeout: float) -> PageGrant:
        """Dynamic sampling: as `wait_prompts_due`, for a page that has chunk `chunk`; at once when the run is over.

        Never before the first version of the attempt is out, because a grant names the version it is made at.
        """

        def ready() -> bool:
            if self.version < self.base:
                return False
            known = self._prompts.granted(page) or self.admission.over(self.version)
            return known or self._due(chunk, lookahead)

        await self._until_due(attempt, ready, chunk, lookahead, timeout)
        return self._prompts.grant(page, self.version, self.admission.over(self.version))

    async def report_prompts(self, attempt: int, batches: Sequence[PromptBatch]) -> None:
        """Batches of prompts whose beginnings are known."""
        async with self._changing(attempt):
            self._prompts.add(batches)
            for batch in batches:
                if batch.iteration is not None:
                    self._events.append(PromptsMade(batch.iteration, dict(batch.metrics)))
            self._prompts.forget(self.version, self.admission.drops_groups)

    async def report_filled(
        self, attempt: int, iteration: int, batch: int, used: int, metrics: dict[str, float]
    ) -> None:
        """Dynamic sampling: `iteration` has all its groups with the first `used` prompts of a batch."""
        async with self._changing(attempt):
            self._events.append(PromptsMade(iteration, self._prompts.end(iteration, batch, used) | metrics))

    async def begin_of_batch(self, attempt: int, batch: int) -> PromptCursor:
        """Where the prompts of a batch of this attempt begin.

        Raises:
            KeyError: it is not known (any more).
        """
        self._check(attempt)
        return self._prompts.begin_of(batch)

    async def end_of_iteration(self, attempt: int, iteration: int) -> PromptCursor:
        """Where the prompts of `iteration` end.

        Raises:
            KeyError: it is not known (yet, or any more).
        """
        self._check(attempt)
        return self._prompts.end_of(iteration, self.admission.drops_groups)

    async def end_prompts(self, attempt: int, version: int) -> None:
        """No prompt follows those that `version` generates."""
        async with self._changing(attempt):
            self._last_version = version

    async def last_version(self, attempt: int) -> int | None:
        """The last policy version that generates rows, once the prompts have ended."""
        self._check(attempt)
        return self._last_version

    # events for the driver

    async def post(self, attempt: int, event: Event) -> None:
        """Leave an event for the driver (`read_events`)."""
        async with self._changing(attempt):
            self._events.append(event)

    async def report_failure(self, reason: str) -> None:
        """Tell the driver why the train workers are about to be restarted; for any attempt."""
        self._events.append(AttemptFailed(reason))

    async def flush_events(self, attempt: int, version: int, timeout: float) -> None:
        """Wait until the driver has recorded everything up to `version`; after a resume it would not be sent again.

        Raises:
            StoreTimeout: it did not within `timeout` seconds.
        """
        await self.post(attempt, CheckpointBegun(version))
        if not await self._events.flush(timeout):
            raise StoreTimeout(
                f"checkpoint: the driver did not record iteration {version} within {timeout:.0f} s, so it is not saved"
            )

    async def read_events(self, after: int, timeout: float) -> tuple[int, list[Event]]:
        """Events past number `after`, waiting up to `timeout` seconds for one. Events read are forgotten."""
        return await self._events.read(after, timeout)

    async def status(self) -> StoreStatus:
        """What the run is doing."""
        return StoreStatus(
            self.attempt,
            self.base,
            self.version,
            self.stopping,
            dict(self._waits.waiting),
            self._waits.silent_s,
            self._waits.alive_by,
        )

    async def stop(self) -> None:
        """Ask the train loop to end after the iteration it is in."""
        self.stopping = True

    def _needed(self, chunk: int) -> int:
        """Version that chunk `chunk` of this attempt needs; -1 before `register_trainer`."""
        return -1 if self.base < 0 else self.base + self.admission.version_needed(chunk, self.dropped_groups)

    def _due(self, chunk: int, lookahead: int) -> bool:
        return self.base >= 0 and self.version + lookahead >= self._needed(chunk)

    async def _until_due(
        self, attempt: int, ready: Callable[[], bool], chunk: int, lookahead: int, timeout: float
    ) -> None:
        await self._waits.until(
            attempt, ready, timeout, "prompts", lambda: self._versions.needs(self._needed(chunk) - lookahead)
        )

    def _filled(self) -> bool:
        return self.admission.filled(self.base, self.kept_groups)

    @asynccontextmanager
    async def _changing(self, attempt: int) -> AsyncIterator[None]:
        """Change the state for an attempt that has not ended."""
        async with self._changed:
            self._check(attempt)
            yield

    def _check(self, attempt: int) -> None:
        if attempt != self.attempt:
            raise StaleAttempt(
                f"attempt {attempt} of the stream has ended: the train workers restarted (now attempt {self.attempt})"
            )
