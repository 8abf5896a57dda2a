"""A tracker's mailbox: records wait in memory, one background thread sends them in order.

1. `put` returns at once, whatever the tracker does: a slow or dead tracker never holds the run up.
2. A record that fails is kept and tried again with growing pauses; those behind it wait, so the order is kept.
3. The mailbox is bounded: beyond `capacity` the oldest records are dropped and counted. `metrics.jsonl` has them.
4. The first failure is a warning, then the 8th, the 64th, ...; `close` says what was never sent.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

PAUSE_AT_THE_END_S = 1.0
WARN_EVERY_POWER_OF = 8


class Rejected(Exception):
    """A tracker can never take this record; it is dropped with a warning and the next one follows."""


@dataclass(frozen=True)
class _Record:
    what: str
    send: Callable[[], None]
    keep: bool


class Sender:
    """Sends the records of one tracker from its own daemon thread."""

    def __init__(
        self, name: str, *, capacity: int = 10_000, first_pause_s: float = 1.0, longest_pause_s: float = 60.0
    ) -> None:
        """
        Args:
            name: the tracker, as warnings name it.
            capacity: records that may wait.
            first_pause_s: seconds between a failure and the next try; doubles with each failure after it.
            longest_pause_s: bound of that pause.
        """
        self.name = name
        self._capacity = capacity
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._waiting: deque[_Record] = deque()
        self._sending: _Record | None = None
        self._failures = 0
        self._warn_at = 1
        self._last_error = "no answer yet"
        self._dropped = 0
        self._rejected = 0
        self._closing = False
        self._abandoned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"track-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread; records may be put before."""
        self._thread.start()

    def put(self, what: str, send: Callable[[], None], *, keep: bool = False, latest: bool = False) -> None:
        """Queues `send`, which is called until it returns without an exception.

        Args:
            what: what is sent, for warnings.
            keep: never drop this record for want of room, nor when it is rejected (the tracker's own start).
            latest: a waiting record of the same `what` is replaced by this one.
        """
        with self._changed:
            if latest:
                self._waiting = deque(record for record in self._waiting if record.what != what)
            self._waiting.append(_Record(what, send, keep))
            if len(self._waiting) > self._capacity:
                oldest = next((record for record in self._waiting if not record.keep), None)
                if oldest is not None:
                    self._waiting.remove(oldest)
                    self._dropped += 1
            self._changed.notify_all()

    def wait(self, deadline: float) -> bool:
        """Waits until everything put so far is sent; False when `time.monotonic()` reaches `deadline` before."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while self._waiting or self._sending:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def close(self, deadline: float) -> str | None:
        """Sends what waits and ends the thread.

        Returns:
            A sentence on what could not be sent, or None when all of it was.
        """
        self.wait(deadline)
        with self._changed:
            unsent = len(self._waiting) + (self._sending is not None)
            self._abandoned = True
            self._changed.notify_all()
        parts = []
        if unsent:
            parts.append(f"{unsent} still waited at the deadline (last error: {self._last_error})")
        if self._dropped:
            parts.append(f"{self._dropped} were dropped when {self._capacity} were waiting")
        if self._rejected:
            parts.append(f"{self._rejected} were refused")
        return f"{self.name} lacks records: {'; '.join(parts)}" if parts else None

    def _run(self) -> None:
        pause = self._first_pause_s
        while True:
            with self._changed:
                while not self._waiting and self._sending is None and not self._abandoned:
                    self._changed.wait()
                if self._abandoned:
                    return
                record = self._sending or self._waiting.popleft()
                self._sending = record
            try:
                record.send()
            # Whatever a tracker's library raises, the run goes on; the error is reported and the record kept.
            except Exception as error:  # noqa: BLE001
                if isinstance(error, Rejected) and not record.keep:
                    self._rejected += 1
                    if self._rejected == 1:
                        log.warning("%s refuses %s: %s", self.name, record.what, _short(error))
                else:
                    self._failed(record, error)
                    self._rest(pause)
                    pause = min(pause * 2, self._longest_pause_s)
                    continue
            pause = self._first_pause_s
            with self._changed:
                self._sending = None
                waiting = len(self._waiting)
                self._changed.notify_all()
            if self._failures:
                log.info("%s answers again; %d waiting records follow", self.name, waiting)
                self._failures, self._warn_at = 0, 1

    def _failed(self, record: _Record, error: Exception) -> None:
        self._failures += 1
        self._last_error = _short(error)
        if self._failures == self._warn_at:
            self._warn_at *= WARN_EVERY_POWER_OF
            log.warning(
                "%s could not take %s (try %d: %s); the run goes on, records are kept and sent when it answers",
                self.name,
                record.what,
                self._failures,
                self._last_error,
            )

    def _rest(self, pause: float) -> None:
        until = time.monotonic() + pause
        with self._changed:
            while not self._abandoned:
                # The end of the run cannot wait out a long pause, it has a deadline of its own.
                if self._closing:
                    until = min(until, time.monotonic() + PAUSE_AT_THE_END_S)
                    self._changed.wait(max(0.0, until - time.monotonic()))
                    return
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else f"{text[:200]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
