"""The interface from which engines get admission, policy versions and weights."""

from typing import Protocol

from pipeline.greeting import Greeting
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.store.versions import Ticket


class PolicySource(Protocol):
    """A source of admission and weights; in a run, the policy store."""

    async def admit(self, split: str, chunk: int, version: int) -> Ticket | None:
        """Wait for the permission to start a chunk. Returns a ticket, or None if the run has all the rows that it
        needs.

        Args:
            split: `train`, or another split, with rows of exactly `version`.
            chunk: number of a training chunk.
            version: policy version of the rows of another split.
        """

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        """Report that the engine has loaded a version; see `PolicyStore.acknowledge`.

        Args:
            engine: name of the engine.
            version: the version.
            crc: checksum of the weights.
            load_s: seconds for loading.
            idle_s, busy_s: seconds of the engine without and with chunks since the last report.
        """

    async def greet(self, greeting: Greeting) -> None:
        """Send the rows that were generated for a ticket's handshake."""

    def beat(self, engine: str) -> None:
        """Report that the engine generates; this does not wait."""


class StorePolicy:
    """The policy store as the source for the engines of one attempt at the run.

    Args:
        store: client of the policy store.
        timeout: seconds without a heartbeat after which a wait for admission fails (`trainer.deadlines.admission`).
    """

    def __init__(self, store: StoreClient, timeout: float):
        self._store, self._timeout = store, timeout

    async def admit(self, split: str, chunk: int, version: int) -> Ticket | None:
        if split == "train":
            return await self._store.awaited(PolicyStore.admit, chunk, self._timeout)
        return await self._store.awaited(PolicyStore.admit_validation, version, self._timeout)

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        await self._store.awaited(PolicyStore.acknowledge, engine, version, crc, load_s, idle_s, busy_s)

    async def greet(self, greeting: Greeting) -> None:
        await self._store.awaited(PolicyStore.greet, greeting)

    def beat(self, engine: str) -> None:
        self._store.tell(PolicyStore.beat, f"engine {engine} (generating)")
