"""Typed calls of the policy store's actor, each with the caller's attempt number and a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from pipeline.store.errors import StoreTimeout
from pipeline.store.policy_store import PolicyStore

ANSWER_S = 60.0
"""Seconds within which the policy store must answer a call that does not wait inside the store."""
PAUSE_S = 0.5
"""Seconds between two tries to reach a store that is restarting."""

P = ParamSpec("P")
T = TypeVar("T")


class StoreClient:
    """Calls methods of `PolicyStore` for one attempt: `client.call(PolicyStore.post, event)`.

    `call` is for methods that return at once, `wait` and `awaited` for methods that wait inside the store. Every
    `ANSWER_S` seconds `wait` and `awaited` check that the store still answers. `ask` is for methods without an attempt.

    All calls raise `StaleAttempt` if the train workers were restarted, `StoreTimeout` if the store does not answer or a
    deadline passes, and `ray.exceptions.RayActorError` if the store has died or is restarting.

    Args:
        store: handle of the policy store's actor.
        attempt: number of the caller's attempt. The driver belongs to none, and calls only `ask`.
    """

    def __init__(self, store: Any, attempt: int = -1):
        self._store, self.attempt = store, attempt

    def ask(
        self, method: Callable[Concatenate[PolicyStore, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method without an attempt number that returns at once."""
        return self._answer(method, self._send(method, *args, **kwargs), ANSWER_S)

    def call(
        self, method: Callable[Concatenate[PolicyStore, int, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method that returns at once."""
        return self._answer(method, self._send(method, self.attempt, *args, **kwargs), ANSWER_S)

    def wait(
        self, method: Callable[Concatenate[PolicyStore, int, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method that waits inside the store, up to its own `timeout`."""
        answer = self._send(method, self.attempt, *args, **kwargs)
        while True:
            try:
                return ray.get(answer, timeout=ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                self._answer(method, self._send(PolicyStore.status), ANSWER_S)

    async def awaited(
        self, method: Callable[Concatenate[PolicyStore, int, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method that waits inside the store, as `wait` does, from an asyncio event loop."""
        answer = asyncio.ensure_future(_result(self._send(method, self.attempt, *args, **kwargs)))
        try:
            while True:
                done, _ = await asyncio.wait([answer], timeout=ANSWER_S)
                if done:
                    return answer.result()
                try:
                    await asyncio.wait_for(_result(self._send(PolicyStore.status)), ANSWER_S)
                except TimeoutError:
                    raise _frozen(method, ANSWER_S) from None
        finally:
            answer.cancel()

    def tell(
        self, method: Callable[Concatenate[PolicyStore, int, P], Awaitable[None]], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method without waiting for it; an error of the call is lost."""
        self._send(method, self.attempt, *args, **kwargs)

    def wait_until_ready(self, patience: float) -> None:
        """Wait until the store answers, for example after a restart.

        Raises:
            StoreTimeout: the store did not answer within `patience` seconds (`trainer.deadlines.store`).
        """
        deadline = time.monotonic() + patience
        while True:
            left = deadline - time.monotonic()
            try:
                self._answer(PolicyStore.status, self._send(PolicyStore.status), max(1.0, left))
                return
            except ray.exceptions.RayActorError as error:
                if left <= PAUSE_S:
                    raise StoreTimeout(store_lost(patience, error)) from error
            time.sleep(PAUSE_S)

    def _send(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method.__name__).remote(*args, **kwargs)

    def _answer(self, method: Callable[..., Any], ref: Any, timeout: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise _frozen(method, timeout) from None


async def _result(ref: Any) -> Any:
    return await ref


def _frozen(method: Callable[..., Any], seconds: float) -> StoreTimeout:
    return StoreTimeout(
        f"{method.__name__}: the policy store gave no answer within {seconds:.0f} s; its process, or the network "
        "to it, is blocked"
    )


def store_lost(seconds: float, error: BaseException) -> str:
    """Format the error message for a store that has not answered for `seconds`; `error` is the last one."""
    last = " ".join(str(error).split("\n")[0].split())
    return (
        f"the policy store is lost: it has not answered for {seconds:.0f} s (trainer.deadlines.store); {last}. "
        "Start the same command again"
    )
