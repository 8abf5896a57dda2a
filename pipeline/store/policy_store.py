"""The policy store: the current policy version, references to its weights, and the admission of chunks.

The store is a small Ray actor between the train workers and the stream. It holds versions, object refs and the
admission rule, but neither tensors nor rows. The protocol, for version v of one attempt (callers use `StoreClient`):

    train ranks   put their shards, `publish(v, shards)`      v becomes current when every rank has published
    prompt source `wait_prompts_due(chunk)`                   waits until the chunk may start, or soon may
    engine        `admit(chunk)` -> version, shards           waits until the chunk may start
    engine        loads, `acknowledge(v, checksum)`           the engine generates only after this call
    engine        `greet(rows)`                               the first engine; its ticket requests rows for comparison
    train loop    `settle(change)`                            after the handshake; scoring replicas wait for this
    filter        `report_groups(kept, dropped)`              each dropped group admits another one
    validation    `record_validation(scores)`                 after the last scores, version v + 1 may become current
    advantage     `kl_coef(v)`                                the KL coefficient for the rows of version v
    value, policy `weights(model, v)` -> version, shards      the model's current weights, of version v or newer

A version is the weights of all trained models, policy and critic, after the same iteration. A version to be validated
stays current until its validation is recorded, even if the trainer has published newer ones (`versions.py`).

Each (re)start of the train workers begins a new **attempt**: a new stream is built, `register_trainer` reports the
version, and the waits of older attempts fail at once. If the store itself dies, Ray starts an empty one with other
numbers. Then all calls of the old attempt fail, the train workers restart, and a new attempt begins.

The deadline of a wait counts from the last heartbeat, so it limits the time without progress: the start of an attempt,
a publication, an acknowledgement, recorded scores, or a report of work (`beat`). Errors name phase and last sender.
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
from pipeline.store.shaking import Shaking, ShakingCalls
from pipeline.store.status import StoreStatus, TrainerState
from pipeline.store.versions import POLICY, Ticket, Versions
from pipeline.store.waits import Waits
from pipeline.weights.load import Shard


class PolicyStore(ShakingCalls):
    """The policy store; plain asyncio, usable without Ray. Calls of an ended attempt raise `StaleAttempt`.

    Args:
        admission: chunk and batch sizes and the staleness bound.
        first: returns the number after which attempts and events are counted. In a Ray actor this is `milliseconds`,
            because a restarted store must not repeat numbers of the old one.
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
        self._shaking = Shaking()
        self._prompts = PromptLedger(-1, PromptCursor())
        self._last_version: int | None = None

    @property
    def version(self) -> int:
        """Number of the current version; -1 before the first."""
        return self._versions.current

    # attempts

    async def new_attempt(self) -> int:
        """Begin a new attempt with empty state; called whenever a stream is built. Returns its number."""
        async with self._changed:
            self.attempt += 1
            self._reset()
            self._waits.heartbeat("the stream")
            return self.attempt

    async def current_attempt(self) -> int:
        """Return the number of the current attempt.

        Raises:
            StaleAttempt: the store has restarted since the stream was built.
        """
        if self.attempt == self._first:
            raise StaleAttempt("the policy store has restarted, and no stream has been built since")
        return self.attempt

    async def register_trainer(
        self, attempt: int, state: TrainerState, world_size: int, shaking: Shaking | None = None
    ) -> None:
        """Register the train loop at the start of an attempt, with its restored `state`, its number of ranks, and the
        state of the handshake (None for no handshake)."""
        async with self._changing(attempt):
            self.base = state.version
            self._versions.world_size = world_size
            self._trainer, self._shaking = state, shaking or self._shaking
            self._prompts = PromptLedger(state.version, state.cursor)
            self._events.append(AttemptBegun(state.version))
            self._waits.heartbeat("the train loop")

    async def trainer_state(self, attempt: int, timeout: float) -> TrainerState:
        """Wait for `register_trainer`; returns its `state`."""
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
        """Publish one rank's part of a version.

        Args:
            attempt: attempt of the train workers.
            version: number of the version.
            shards: the rank's shard of each trained model; it always includes the policy (`POLICY`).
            stepped_at: wall-clock time at which the rank's last optimiser step ended.
            kl_coef: coefficient of the KL in the reward for the rows of this version.
            validates: whether the version will be validated.
        """
        async with self._changing(attempt):
            self._versions.publish(version, shards, stepped_at, kl_coef, validates)
            self._waits.heartbeat(f"train rank {shards[POLICY].rank} (publishing version {version})")

    async def acknowledge(
        self, attempt: int, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        """Record that an engine has loaded a policy version.

        Args:
            attempt: attempt of the stream.
            engine: name of the engine.
            version: the version that the engine has loaded.
            crc: checksum of the loaded weights.
            load_s: seconds that loading took.
            idle_s, busy_s: seconds without and with admitted chunks since the engine's last acknowledgement.

        Raises:
            FinalError: the engine's checksum differs from the published one.
            ValueError: the version is unknown, already deleted, or not current yet.
        """
        async with self._changing(attempt):
            entry = self._versions.get(version)
            if entry is None or version > self.version:
                raise ValueError(
                    f"engine {engine} acknowledged version {version}, unknown or too new (current is {self.version})"
                )
            if crc != entry.checksum:
                raise FinalError(
                    f"engine {engine} loaded version {version} with checksum {crc:08x}, "
                    f"but the published checksum is {entry.checksum:08x}"
                )
            # In the first version of an attempt the seconds would include the start of the engines.
            update_s = time.time() - entry.stepped_at if version > self.base else None
            self._events.append(VersionLoaded(version, engine, load_s, update_s, idle_s, busy_s))
            self._waits.heartbeat(f"engine {engine}")

    async def weights(self, attempt: int, model: str, version: int, timeout: float) -> Ticket:
        """Wait for `version`; returns the current weights of `model`, which may be newer in an asynchronous run."""
        await self.wait_version(attempt, version, timeout, f"{model} weights")
        return self._versions.ticket(model)

    async def kl_coef(self, attempt: int, version: int, timeout: float) -> float:
        """Wait for `version`; returns the KL coefficient of the reward for rows that this version generated."""
        await self.wait_version(attempt, version, timeout, "KL coefficient")
        return self._versions.kl_coef(version)

    # admission

    async def admit(self, attempt: int, chunk: int, timeout: float) -> Ticket | None:
        """Wait until chunk number `chunk` may start; returns the current weights of the policy.

        Returns None if dynamic sampling already has all groups of the run, so that the chunk is not needed.
        """

        def ready() -> bool:
            if self.base < 0:
                return False
            if self._filled():
                # Do not wait for the last iteration, which may wait for a validation that follows this chunk in the
                # stream.
                return True
            needless = self.admission.needless(self.base, chunk, self.dropped_groups)
            return self.version >= self._needed(chunk) and not needless

        await self._waits.until(attempt, ready, timeout, "admission", lambda: self._versions.needs(self._needed(chunk)))
        return None if self._filled() else self._versions.ticket(POLICY, self._shaking.plan)

    async def admit_validation(self, attempt: int, version: int, timeout: float) -> Ticket:
        """Wait until `version` is current; returns its weights. It stays current until its validation is recorded.

        Raises:
            RuntimeError: a newer version is already current.
        """
        await self.wait_version(attempt, version, timeout, "validation")
        if self.version != version:
            raise RuntimeError(f"validation of policy version {version} came too late: current is {self.version}")
        return self._versions.ticket(POLICY, self._shaking.plan)

    async def report_groups(self, attempt: int, kept: int, dropped: int) -> None:
        """Set the numbers of groups that dynamic sampling has kept and dropped so far in this attempt."""
        async with self._changing(attempt):
            self.kept_groups, self.dropped_groups = kept, dropped
            self._changed.notify_all()

    # validation

    async def announce_validation(self, attempt: int, version: int, prompts: int) -> None:
        """Announce that `version` will be validated on `prompts` prompts; 0 if its validation is recorded already."""
        async with self._changing(attempt):
            if prompts:
                self._events.append(ValidationAnnounced(version, prompts))
            self._versions.announce(version, prompts)
            self._changed.notify_all()

    async def record_validation(self, attempt: int, scored: ValidationScored) -> None:
        """Record the scores of some prompts of a validation. Their rows must be on disk already."""
        async with self._changing(attempt):
            self._events.append(scored)
            self._versions.record(scored.version, [prompt.uid for prompt in scored.prompts])
            self._waits.heartbeat(f"the validation of version {scored.version}")

    async def wait_version(self, attempt: int, version: int, timeout: float, phase: str = "version") -> None:
        """Wait until `version` is current. By then the validations of all earlier versions are recorded."""
        await self._waits.until(
            attempt, lambda: self.version >= version, timeout, phase, lambda: self._versions.needs(version)
        )

    async def wait_validated(self, attempt: int, version: int, timeout: float) -> None:
        """Wait until `version` is current and its whole validation, if any, is recorded."""
        what = f"the validation of policy version {version}"
        await self._waits.until(attempt, lambda: self._versions.validated(version), timeout, "checkpoint", what)

    async def is_validated(self, attempt: int, version: int) -> bool:
        """Return whether the whole validation of `version`, if any, is recorded."""
        self._check(attempt)
        return self._versions.validated(version)

    async def wait_prompts_due(self, attempt: int, chunk: int, lookahead: int, timeout: float) -> None:
        """Wait until the current version is at most `lookahead` versions before the one that `chunk` needs to start."""
        await self._until_due(attempt, lambda: self._due(chunk, lookahead), chunk, lookahead, timeout)

    async def grant_page(self, attempt: int, page: int, chunk: int, lookahead: int, timeout: float) -> PageGrant:
        """Wait, with dynamic sampling, until page number `page` of prompts may be made; returns the permission.

        This waits as `wait_prompts_due` does for the page's chunk `chunk`. A page that was granted before, or that
        comes after the last iteration was trained, waits only until the attempt has a version.
        """

        def ready() -> bool:
            if self.version < self.base:
                return False
            known = self._prompts.granted(page) or self.admission.over(self.version)
            return known or self._due(chunk, lookahead)

        await self._until_due(attempt, ready, chunk, lookahead, timeout)
        return self._prompts.grant(page, self.version, self.admission.over(self.version))

    async def report_prompts(self, attempt: int, batches: Sequence[PromptBatch]) -> None:
        """Record new batches of prompts, with the cursors at their beginnings."""
        async with self._changing(attempt):
            self._prompts.add(batches)
            for batch in batches:
                if batch.iteration is not None:
                    self._events.append(PromptsMade(batch.iteration, dict(batch.metrics)))
            self._prompts.forget(self.version, self.admission.drops_groups)

    async def report_filled(
        self, attempt: int, iteration: int, batch: int, used: int, metrics: dict[str, float]
    ) -> None:
        """Record, with dynamic sampling, that `iteration` ends after the first `used` prompts of batch `batch`."""
        async with self._changing(attempt):
            self._events.append(PromptsMade(iteration, self._prompts.end(iteration, batch, used) | metrics))

    async def begin_of_batch(self, attempt: int, batch: int) -> PromptCursor:
        """Return the cursor at the beginning of batch number `batch` of this attempt.

        Raises:
            KeyError: the batch is unknown, or already deleted.
        """
        self._check(attempt)
        return self._prompts.begin_of(batch)

    async def end_of_iteration(self, attempt: int, iteration: int) -> PromptCursor:
        """Return the cursor at the end of the prompts of `iteration`.

        Raises:
            KeyError: the cursor is not known yet, or already deleted.
        """
        self._check(attempt)
        return self._prompts.end_of(iteration, self.admission.drops_groups)

    async def end_prompts(self, attempt: int, version: int) -> None:
        """Record that the prompts for `version` are the last ones."""
        async with self._changing(attempt):
            self._last_version = version

    async def last_version(self, attempt: int) -> int | None:
        """Return the last policy version that generates rows; None until `end_prompts` is called."""
        self._check(attempt)
        return self._last_version

    async def beat(self, attempt: int, party: str) -> None:
        """Record that `party`, such as an engine, is at work."""
        async with self._changing(attempt):
            self._waits.heartbeat(party)

    # events for the driver

    async def post(self, attempt: int, event: Event) -> None:
        """Append an event for the driver, which reads it with `read_events`."""
        async with self._changing(attempt):
            self._events.append(event)

    async def report_failure(self, reason: str) -> None:
        """Report to the driver why the train workers will be restarted. Can be called without an attempt."""
        self._events.append(AttemptFailed(reason))

    async def flush_events(self, attempt: int, version: int, timeout: float) -> None:
        """Wait until the driver has recorded all events so far, before a checkpoint of `version` is written.

        A run that resumes from the checkpoint does not send them again.

        Raises:
            StoreTimeout: the driver took longer than `timeout` seconds.
        """
        await self.post(attempt, CheckpointBegun(version))
        if not await self._events.flush(timeout):
            raise StoreTimeout(
                f"checkpoint: not saved, the driver did not record iteration {version} within {timeout:.0f} s"
            )

    async def read_events(self, after: int, timeout: float) -> tuple[int, list[Event]]:
        """Return the number of the last event, and the events after number `after`; see `EventLog.read`."""
        return await self._events.read(after, timeout)

    async def status(self) -> StoreStatus:
        """Return the state of the run and of the waits in the store."""
        waits = self._waits.waiting, self._waits.silent_s, self._waits.alive_by
        return StoreStatus(self.attempt, self.base, self.version, self.stopping, dict(waits[0]), *waits[1:])

    async def stop(self) -> None:
        """Request that the train loop ends after its current iteration."""
        self.stopping = True

    def _needed(self, chunk: int) -> int:
        """Return the lowest version at which chunk `chunk` of this attempt may start; -1 before `register_trainer`."""
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
        """Hold the store's lock for a change of the state. Raises `StaleAttempt` if the attempt has ended."""
        async with self._changed:
            self._check(attempt)
            yield

    def _check(self, attempt: int) -> None:
        if attempt != self.attempt:
            now = f"the train workers restarted (now attempt {self.attempt})"
            raise StaleAttempt(f"attempt {attempt} of the stream has ended: {now}")
