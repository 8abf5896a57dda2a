"""The state of the handshake of engine and trainer (`pipeline/greeting.py`)."""

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from pipeline.greeting import Change, Greeting, GreetingPlan
from pipeline.store.waits import Waits


@dataclass
class Shaking:
    """The handshake of one attempt."""

    plan: GreetingPlan | None = None
    """The request to the next engine; None if no (further) engine gets one."""
    greeting: Greeting | None = None
    """The first engine's rows."""
    change: Change | None = None
    """The other way in which rows pass through models of the policy's class."""
    settled: bool = True
    """True if `change` is known."""

    def greet(self, greeting: Greeting) -> None:
        """Keep the first greeting; no further engine gets a request."""
        self.plan, self.greeting = None, self.greeting or greeting

    def settle(self, change: Change | None) -> None:
        """Note the result of the trainer's comparison."""
        self.change, self.settled = change, True


class ShakingCalls(ABC):
    """The calls of the policy store for the handshake."""

    _shaking: Shaking
    _waits: Waits

    @abstractmethod
    def _changing(self, attempt: int) -> AbstractAsyncContextManager[None]: ...

    async def greet(self, attempt: int, greeting: Greeting) -> None:
        """Note that an engine has generated the rows that its ticket requested."""
        async with self._changing(attempt):
            self._shaking.greet(greeting)
            self._waits.heartbeat(f"engine {greeting.engine}")

    async def greeting(self, attempt: int) -> Greeting | None:
        """Return the first engine's greeting; None before it."""
        async with self._changing(attempt):
            return self._shaking.greeting

    async def settle(self, attempt: int, change: Change | None) -> None:
        """Note that the trainer has compared itself with the greeting."""
        async with self._changing(attempt):
            self._shaking.settle(change)
            self._waits.heartbeat("the train loop")

    async def wait_settled(self, attempt: int, timeout: float) -> Change | None:
        """Wait until the handshake is settled; returns its change, if any."""
        ready = self._shaking_settled
        await self._waits.until(attempt, ready, timeout, "handshake", "the trainer's comparison")
        return self._shaking.change

    def _shaking_settled(self) -> bool:
        return self._shaking.settled
