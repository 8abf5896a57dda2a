"""The state of the handshake, the comparison of engine and trainer (`pipeline/greeting.py`), in the policy store."""

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from pipeline.greeting import Change, Greeting, GreetingPlan
from pipeline.store.waits import Waits


@dataclass
class Shaking:
    """The handshake of one attempt."""

    plan: GreetingPlan | None = None
    """Rows that the next engine must generate for the comparison; None if no engine must any more."""
    greeting: Greeting | None = None
    """Rows that the first engine has generated, with their log-probs."""
    change: Change | None = None
    """New way in which rows pass through models of the policy's class; None if the handshake changed nothing."""
    settled: bool = True
    """True if the comparison is over, or not due, so that `change` is final."""

    def greet(self, greeting: Greeting) -> None:
        """Keep the rows of the first engine, and request no more."""
        self.plan, self.greeting = None, self.greeting or greeting

    def settle(self, change: Change | None) -> None:
        """Record the result of the trainer's comparison."""
        self.change, self.settled = change, True


class ShakingCalls(ABC):
    """The methods of the policy store for the handshake."""

    _shaking: Shaking
    _waits: Waits

    @abstractmethod
    def _changing(self, attempt: int) -> AbstractAsyncContextManager[None]: ...

    async def greet(self, attempt: int, greeting: Greeting) -> None:
        """Record the rows that an engine has generated because its ticket requested them."""
        async with self._changing(attempt):
            self._shaking.greet(greeting)
            self._waits.heartbeat(f"engine {greeting.engine}")

    async def greeting(self, attempt: int) -> Greeting | None:
        """Return the rows of the first engine for the comparison; None if there are none yet."""
        async with self._changing(attempt):
            return self._shaking.greeting

    async def settle(self, attempt: int, change: Change | None) -> None:
        """Record that the trainer has compared its log-probs with the engine's; `change` is the result."""
        async with self._changing(attempt):
            self._shaking.settle(change)
            self._waits.heartbeat("the train loop")

    async def wait_settled(self, attempt: int, timeout: float) -> Change | None:
        """Wait until the handshake is settled; returns its change, None if it changed nothing."""
        ready = self._shaking_settled
        await self._waits.until(attempt, ready, timeout, "handshake", "the trainer's comparison")
        return self._shaking.change

    def _shaking_settled(self) -> bool:
        return self._shaking.settled
