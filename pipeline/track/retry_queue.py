"""A queue of calls that may fail or hang (to a tracking server, to a storage), made in order by a background thread.

1. `put` returns at once, so a slow or dead server never delays the run.
2. A call that fails is repeated with growing pauses. Later calls wait, so the order is kept.
3. Beyond `capacity` the oldest calls are dropped and counted.
4. The first failure is a warning, then the 8th, the 64th, ...; `close` reports the calls that were never made.
5. A call with a limit of tries goes to the end of the queue if it fails, and is given up after the last try. So less
   important calls never delay the others.

MLflow's own asynchronous logging is not used: it drops a batch after a few minutes without an answer, its flush has no
deadline, and it does not cover parameters, tables and artifacts.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger(__name__)

PAUSE_AT_THE_END_S = 1.0
WARN_EVERY_POWER_OF = 8


class Rejected(Exception):
    """A record will never be accepted by its receiver. It is dropped with a warning, and the queue goes on."""


@dataclass(frozen=True)
class _Call:
    what: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    keep: bool
    tries: int | None


class RetryQueue:
    """The queue of calls to one receiver, such as a tracker.

    Args:
        name: name of the receiver, for warnings.
        capacity: maximum number of waiting calls.
        first_pause_s: seconds between a failure and the next try; doubles with each failure after it.
        longest_pause_s: maximum of that pause, in seconds.
    """

    def __init__(
        self, name: str, *, capacity: int = 10_000, first_pause_s: float = 1.0, longest_pause_s: float = 60.0
    ) -> None:
        self._name, self._capacity = name, capacity
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._waiting: deque[_Call] = deque()
        self._busy = False
        self._last_error = "no answer yet"
        self._dropped = self._rejected = self._given_up = 0
        self._closing = threading.Event()
        self._abandoned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"queue {name}", daemon=True)

    def start(self) -> None:
        """Start the thread. Calls may be put before."""
        self._thread.start()

    def put(
        self,
        what: str,
        function: Callable[..., None],
        *arguments: Any,
        keep: bool = False,
        latest: bool = False,
        tries: int | None = None,
    ) -> None:
        """Queue `function(*arguments)`, which is called until it returns without an exception.

        Args:
            what: the record or action, for warnings.
            function: the function to call.
            arguments: arguments of the function.
            keep: true to drop this call neither if the queue is full, nor if it is rejected.
            latest: true to replace a waiting call of the same `what` by this one.
            tries: number of failures after which the call is given up and counted. After each failure it goes to the
                end of the queue. None repeats it at once until it succeeds.
        """
        with self._changed:
            if latest:
                self._waiting = deque(call for call in self._waiting if call.what != what)
            self._waiting.append(_Call(what, function, arguments, keep, tries))
            if len(self._waiting) > self._capacity:
                oldest = next((call for call in self._waiting if not call.keep), None)
                if oldest is not None:
                    self._waiting.remove(oldest)
                    self._dropped += 1
            self._changed.notify_all()

    def close(self, deadline: float) -> str | None:
        """Make the waiting calls until `time.monotonic()` reaches `deadline`, and end the thread.

        Returns:
            A sentence on the calls that were not made, or None if all were made.
        """
        self._closing.set()
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._busy), max(0.0, deadline - time.monotonic()))
            unsent = len(self._waiting) + self._busy
            self._abandoned = True
            self._changed.notify_all()
        parts = []
        if unsent:
            parts.append(f"{unsent} still waited at the deadline (last error: {self._last_error})")
        if self._dropped:
            parts.append(f"{self._dropped} were dropped when {self._capacity} were waiting")
        if self._rejected:
            parts.append(f"{self._rejected} were refused")
        if self._given_up:
            parts.append(f"{self._given_up} were given up (last error: {self._last_error})")
        return f"{self._name} lacks records: {'; '.join(parts)}" if parts else None

    def _work(self) -> None:
        failures, warn_at = 0, 1
        while (call := self._next()) is not None:
            try:
                call.function(*call.arguments)
            # The run goes on after any exception of a library; the error is reported and the call repeated.
            except Exception as error:  # noqa: BLE001
                if call.keep or not isinstance(error, Rejected):
                    failures += 1
                    self._last_error = _short(error)
                    if call.tries != 1 and failures >= warn_at:
                        warn_at *= WARN_EVERY_POWER_OF
                        again = "records are kept and sent when it answers"
                        if call.tries is not None:
                            again = f"it is tried up to {call.tries - 1} times more"
                        log.warning(
                            "%s could not take %s (try %d: %s); the run goes on, %s",
                            self._name,
                            call.what,
                            failures,
                            self._last_error,
                            again,
                        )
                    if call.tries == 1:
                        self._give_up(call)
                    else:
                        self._put_back(call)
                    self._pause(min(self._first_pause_s * 2 ** min(failures - 1, 32), self._longest_pause_s))
                    continue
                self._rejected += 1
                if self._rejected == 1:
                    log.warning("%s refuses %s: %s", self._name, call.what, _short(error))
            if failures:
                log.info("%s answers again; %d waiting records follow", self._name, len(self._waiting))
                failures, warn_at = 0, 1

    def _next(self) -> _Call | None:
        """Wait for the next call and return it; None if the thread must end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._abandoned)
            if self._abandoned:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _put_back(self, call: _Call) -> None:
        with self._changed:
            if call.tries is None:
                self._waiting.appendleft(call)
            else:
                self._waiting.append(replace(call, tries=call.tries - 1))
            self._busy = False

    def _give_up(self, call: _Call) -> None:
        self._given_up += 1
        if self._given_up == 1:
            log.warning("%s did not take %s (the last try: %s)", self._name, call.what, self._last_error)

    def _pause(self, seconds: float) -> None:
        # The end of the run has a deadline of its own, and cannot wait for a long pause.
        if not self._closing.wait(seconds):
            return
        time.sleep(min(seconds, PAUSE_AT_THE_END_S))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else f"{text[:200]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
