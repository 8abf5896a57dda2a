"""The policy store: which policy version exists, where its weights are, and which chunk may start.

One small actor between the train workers and the stream. It holds versions, object refs and the admission rule,
never tensors. The protocol, for version v of one generation:

    train ranks   put their shards, `publish(v, shards)`      v becomes current when every rank has published
    prompt source `pace(chunk)`                               waits until the chunk may start, or soon may
    engine        `admit(chunk)` -> version, shards           waits until the chunk may start
    engine        loads, `acknowledge(v, checksum)`           nothing is generated before that
    value replica `weights("critic", v)` -> version, shards   the critic that belongs to the rows of version v

A version is all models that are trained, policy and critic, as they stand after the same iteration. One that is to be
validated stays current until its validation has been recorded, however far ahead the trainer is (`published.py`).

Every (re)start of the train workers is a new **generation**: the stream starts over, `begin` says from which version,
and whatever still waits for an older generation fails at once. The store itself may die: Ray starts it again, empty and
with other numbers, so that whoever knew the one before fails, the train workers restart, and a new generation begins.

Waits watch for progress: a deadline counts from the last sign of life (a publication, an acknowledgement, the start of
a generation), so that a slow but living run never trips it, and a dead one always does, naming phase and party.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.admission import Admission
from pipeline.errors import FinalError
from pipeline.mailbox import Mailbox
from pipeline.published import CRITIC as CRITIC
from pipeline.published import POLICY, Ticket, Versions
from pipeline.rollout.weights import Shard


class StaleGeneration(RuntimeError):
    """The train workers have restarted since this caller's stream began."""


class StoreTimeout(TimeoutError):
    """A wait in the store passed its deadline; the message names phase, version and party."""


def milliseconds() -> int:
    """Since 1970: a number that no store of a run has used before, since none hands out a thousand a second."""
    return time.time_ns() // 1_000_000


class PolicyStore:
    """The state behind the actor; plain asyncio, usable without Ray.

    Args:
        admission: chunk and batch sizes and the staleness bound.
        first: gives the number before the first generation and the first message. A store that Ray starts again must
            not repeat a number of the one before: `milliseconds`.
    """

    def __init__(self, admission: Admission, first: Callable[[], int] = int):
        self.admission = admission
        self.generation = self._first = first()
        self.base = -1
        self.dropped_groups = 0
        self.stopping = False
        self._versions = Versions(admission.max_staleness)
        self._positions: dict[int, Any] = {}
        self._start: Any = None
        self._last_version: int | None = None
        self._changed = asyncio.Condition()
        self._alive_at = time.monotonic()
        self._alive_by = "the store's own start"
        self._waiting: Counter[str] = Counter()
        self._mailbox = Mailbox(self._first)

    @property
    def version(self) -> int:
        """The current version; -1 before the first."""
        return self._versions.current

    # generations

    async def new_generation(self) -> int:
        """Start over: called when the stream is (re)built. Waits of older generations fail at once."""
        async with self._changed:
            self.generation += 1
            self.base = -1
            self.dropped_groups = 0
            self._versions = Versions(self.admission.max_staleness)
            self._positions.clear()
            self._start = self._last_version = None
            self._sign_of_life("the stream")
            return self.generation

    async def current(self) -> int:
        """Number of the current generation.

        Raises:
            StaleGeneration: the store has restarted since the stream was built.
        """
        if self.generation == self._first:
            raise StaleGeneration("the policy store has restarted, and no stream has been built since")
        return self.generation

    async def begin(self, generation: int, version: int, world_size: int, start: Any) -> None:
        """The restored train loop says which version it holds and from which prompt position to go on."""
        async with self._changed:
            self._check(generation)
            self.base = version
            self._versions.world_size = world_size
            self._start = start
            self._mailbox.post("begun", version=version)
            self._sign_of_life("the train loop")

    async def start(self, generation: int, timeout: float) -> tuple[int, Any]:
        """`(version, position)` given to `begin`; waits for it."""
        await self._wait(generation, lambda: self.base >= 0, timeout, "start", "the train loop's first message")
        return self.base, self._start

    # weights

    async def publish(
        self,
        generation: int,
        version: int,
        shards: dict[str, Shard],
        stepped_at: float,
        kl_coef: float = 0.0,
        validates: bool = False,
    ) -> None:
        """One rank's part of a version.

        Args:
            generation: of the train workers.
            version: the number of the version.
            shards: the rank's shard of each trained model, the policy (`POLICY`) always among them.
            stepped_at: wall-clock time at which the rank's last optimiser step ended.
            kl_coef: coefficient of the KL in the reward for the rows of this version.
            validates: whether the version is to be validated, and stays current until it has been.
        """
        async with self._changed:
            self._check(generation)
            self._versions.publish(version, shards, stepped_at, kl_coef, validates)
            self._sign_of_life(f"train rank {shards[POLICY].rank} (publishing version {version})")

    async def acknowledge(
        self,
        generation: int,
        engine: str,
        version: int,
        crc: int,
        load_s: float,
        idle_s: float = 0.0,
        busy_s: float = 0.0,
    ) -> float:
        """An engine has loaded a policy version. Returns the seconds since the optimiser step that made it.

        Args:
            generation: of the stream.
            engine: its name.
            version: what it has loaded.
            crc: checksum of the weights it got.
            load_s: seconds that loading took.
            idle_s, busy_s: seconds since its last acknowledgement in which it had no admitted chunk, and had some.

        Raises:
            FinalError: the engine's checksum is not the published one.
            ValueError: nobody may use the version.
        """
        async with self._changed:
            self._check(generation)
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
            elapsed = time.time() - entry.stepped_at
            # The first version of a generation waited for the engines to start.
            self._mailbox.post(
                "loaded",
                version=version,
                engine=engine,
                load_s=load_s,
                update_s=elapsed if version > self.base else None,
                idle_s=idle_s,
                busy_s=busy_s,
            )
            self._sign_of_life(f"engine {engine}")
            return elapsed

    async def weights(self, generation: int, model: str, version: int, timeout: float) -> Ticket:
        """The current weights of `model`, which are those of `version` or, in an asynchronous run, newer ones."""
        await self._wait(
            generation,
            lambda: self.version >= version,
            timeout,
            f"{model} weights",
            lambda: self._versions.needs(version),
        )
        return self._versions.ticket(model)

    # admission

    async def admit(self, generation: int, chunk: int, timeout: float, engine: str = "") -> Ticket:
        """Wait until chunk `chunk` of this generation may start, for an engine, or for whoever waits until one may."""

        def ready() -> bool:
            return self.base >= 0 and self.version >= self._needed(chunk)

        await self._wait(generation, ready, timeout, "admission", lambda: self._versions.needs(self._needed(chunk)))
        return self._versions.ticket(POLICY)

    async def admit_validation(self, generation: int, version: int, timeout: float) -> Ticket:
        """Wait for exactly `version`, which stays current until `validated` has been told of all its rows.

        Raises:
            RuntimeError: a newer version is already current.
        """
        await self._wait(
            generation, lambda: self.version >= version, timeout, "validation", lambda: self._versions.needs(version)
        )
        if self.version != version:
            raise RuntimeError(f"validation of policy version {version} came too late: version {self.version} is out")
        return self._versions.ticket(POLICY)

    async def validation(self, generation: int, version: int, prompts: int) -> None:
        """`prompts` prompts validate `version`; with 0 it is not validated (again)."""
        async with self._changed:
            self._check(generation)
            if prompts:
                self._mailbox.post("validation", version=version, prompts=prompts)
            self._versions.announce(version, prompts)
            self._changed.notify_all()

    async def validated(self, generation: int, rows: Any) -> None:
        """Validation rows (a table of one version) are recorded; the driver is told."""
        async with self._changed:
            self._check(generation)
            version = rows["iteration"][0].as_py()
            self._mailbox.post("validated", rows=rows)
            self._versions.record(version, rows["uid"].to_pylist())
            self._sign_of_life(f"the validation of version {version}")

    async def reach(self, generation: int, version: int, timeout: float) -> None:
        """Wait until `version` is current, and so all validations of earlier ones are recorded."""
        await self._wait(
            generation, lambda: self.version >= version, timeout, "reach", lambda: self._versions.needs(version)
        )

    async def pace(self, generation: int, chunk: int, lookahead: int, timeout: float) -> None:
        """Hold the prompt source until chunk `chunk` is at most `lookahead` versions from admission."""

        def ready() -> bool:
            return self.base >= 0 and self.version + lookahead >= self._needed(chunk)

        await self._wait(
            generation, ready, timeout, "pace", lambda: self._versions.needs(self._needed(chunk) - lookahead)
        )

    async def drop(self, generation: int, groups: int) -> None:
        """Report groups that will not be trained on; as many replacements are admitted."""
        async with self._changed:
            self._check(generation)
            self.dropped_groups += groups
            self._changed.notify_all()

    # prompt positions: where a restarted source actor or a resumed run goes on

    async def made(self, generation: int, prompts: Sequence[tuple[int, Any, dict[str, int]]]) -> None:
        """The prompts of some iterations are made: of each its number, the position at which they end, and metrics of
        them for the driver."""
        async with self._changed:
            self._check(generation)
            for iteration, position, metrics in prompts:
                self._positions[iteration] = position
                self._mailbox.post("prompts", iteration=iteration, metrics=metrics)
            for old in [i for i in self._positions if i < self.version - 1]:
                del self._positions[old]

    async def position(self, generation: int, iteration: int) -> Any:
        """Where the prompts of `iteration` ended.

        Raises:
            KeyError: the position is not known (any more).
        """
        self._check(generation)
        if iteration == self.base:
            return self._start
        return self._positions[iteration]

    async def checkpoint_position(self, generation: int, iteration: int) -> Any:
        """What `begin` is given by a run that goes on behind `iteration`."""
        return await self.position(generation, iteration)

    async def end(self, generation: int, version: int) -> None:
        """No prompt follows those that `version` generates."""
        async with self._changed:
            self._check(generation)
            self._last_version = version

    async def ended(self, generation: int) -> int | None:
        """The last policy version that generates rows, once the prompts have ended."""
        self._check(generation)
        return self._last_version

    # messages to the driver

    async def post(self, generation: int, kind: str, payload: dict[str, Any]) -> None:
        """Leave a message for the driver (`read`)."""
        async with self._changed:
            self._check(generation)
            self._mailbox.post(kind, **payload)

    async def failed(self, reason: str) -> None:
        """Tell the driver why the train workers are about to be restarted; of whatever generation."""
        self._mailbox.post("failed", reason=reason)

    async def settle(self, generation: int, version: int, timeout: float) -> None:
        """Wait until the driver has recorded everything up to `version`: what a checkpoint covers is never told again.

        Raises:
            StoreTimeout: it did not within `timeout` seconds.
        """
        await self.post(generation, "saving", {"version": version})
        if not await self._mailbox.emptied(timeout):
            raise StoreTimeout(
                f"checkpoint: the driver did not record iteration {version} within {timeout:.0f} s, so it is not saved"
            )

    async def read(self, after: int, timeout: float) -> tuple[int, list[dict[str, Any]]]:
        """Messages past number `after`, waiting up to `timeout` seconds for one. Messages read are forgotten."""
        return await self._mailbox.read(after, timeout)

    async def status(self) -> dict[str, Any]:
        """What the run is doing: version, who waits for what, the last sign of life."""
        return {
            "generation": self.generation,
            "base": self.base,
            "version": self.version,
            "stopping": self.stopping,
            "waiting": dict(self._waiting),
            "alive_s": time.monotonic() - self._alive_at,
            "alive_by": self._alive_by,
        }

    async def stop(self) -> None:
        """Ask the train loop to end after the iteration it is in."""
        self.stopping = True

    async def should_stop(self) -> bool:
        return self.stopping

    # inside

    def _needed(self, chunk: int) -> int:
        """Version that chunk `chunk` of this generation needs; -1 before `begin`."""
        return -1 if self.base < 0 else self.base + self.admission.version_needed(chunk, self.dropped_groups)

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise StaleGeneration(
                f"generation {generation} of the stream has ended: the train workers restarted "
                f"(now generation {self.generation})"
            )

    def _sign_of_life(self, party: str) -> None:
        self._alive_at = time.monotonic()
        self._alive_by = party
        self._changed.notify_all()

    async def _wait(
        self, generation: int, ready: Callable[[], bool], timeout: float, phase: str, what: str | Callable[[], str]
    ) -> None:
        begun = time.monotonic()
        self._waiting[phase] += 1
        try:
            async with self._changed:
                while True:
                    self._check(generation)
                    if ready():
                        return
                    left = max(begun, self._alive_at) + timeout - time.monotonic()
                    if left <= 0:
                        waited_for = what if isinstance(what, str) else what()
                        raise StoreTimeout(
                            f"{phase}: waited {time.monotonic() - begun:.0f} s for {waited_for}; the last sign of life "
                            f"came {time.monotonic() - self._alive_at:.0f} s ago from {self._alive_by}"
                        )
                    try:
                        async with asyncio.timeout(left):
                            await self._changed.wait()
                    except TimeoutError:
                        continue
        finally:
            self._waiting[phase] -= 1
