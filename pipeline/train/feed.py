"""The trainer's end of the stream: blocks with a deadline on every wait, and the rows of each iteration."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

PAUSE_S = 0.2
"""Seconds between two looks."""

T = TypeVar("T")


class RowsTimeout(TimeoutError):
    """Error of rows that did not come within the deadline."""


class TimedIterator:
    """Blocks from an iterator, read by a thread of its own, with a deadline on every wait; empty ones are skipped.

    Args:
        blocks: Arrow tables.
        timeout: seconds that one block may take.
        hint: event that the run waits for, or setting to change, for the error.
    """

    def __init__(self, blocks: Iterator[pa.Table], timeout: float, hint: Callable[[], str]):
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._timeout, self._hint = timeout, hint
        self._ended = False
        threading.Thread(target=self._fetch, args=(blocks,), name="rows", daemon=True).start()

    def next(self, what: str) -> pa.Table | None:
        """Return the next block; None after the last one.

        Raises:
            RowsTimeout: it did not come in time; the message names `what`.
            Exception: the iterator raised it.
        """
        if self._ended:
            return None
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise RowsTimeout(f"no {what} within {self._timeout:.0f} s: {self._hint()}") from None
        if isinstance(item, BaseException):
            raise item
        self._ended = item is None
        return item

    def wait(self, ready: Callable[[], T | None], what: str) -> T | None:
        """Wait until `ready` gives something else than None, and return it; None if the first block comes before.

        Raises:
            RowsTimeout: neither came in time; the message names `what`.
            Exception: the iterator raised it.
        """
        deadline = time.monotonic() + self._timeout
        came = False
        while (found := ready()) is None and not came:
            came = self._queue.full()
            if came and isinstance(self._queue.queue[0], BaseException):
                raise self._queue.queue[0]
            if time.monotonic() > deadline:
                raise RowsTimeout(f"no {what} within {self._timeout:.0f} s: {self._hint()}")
            time.sleep(PAUSE_S)
        return found

    def _fetch(self, blocks: Iterator[pa.Table]) -> None:
        try:
            for block in blocks:
                if len(block):
                    self._queue.put(block)
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 (handed to the trainer's thread)
            self._queue.put(error)


class RowsFeed:
    """The rows of iterations, in equal parts.

    Args:
        blocks: chunks in the order of the stream.
        chunks: chunks of one iteration that come to this rank.
        parts: parts of an iteration; it divides `chunks`.
    """

    def __init__(self, blocks: TimedIterator, chunks: int, parts: int = 1):
        self._blocks = blocks
        self._chunks_per_part = chunks // parts
        self.parts = parts

    def next(self, iteration: int, part: int = 0) -> pa.Table | None:
        """Return the rows of part `part`, from 0, of `iteration`, in chunk order; None if the stream has ended before.

        Raises:
            RowsTimeout: a chunk did not come in time.
            RuntimeError: rows of another iteration came, or the stream ended inside an iteration.
        """
        first = part * self._chunks_per_part
        tables: list[pa.Table] = []
        for number in range(first, first + self._chunks_per_part):
            rows = self._blocks.next(f"rows for iteration {iteration}")
            if rows is None and number == 0:
                return None
            if rows is None:
                raise RuntimeError(f"the stream ended inside iteration {iteration}, after {number} chunks")
            iterations = set(rows["iteration"].to_pylist())
            if iterations != {iteration}:
                raise RuntimeError(f"rows of iterations {sorted(iterations)} arrived instead of iteration {iteration}")
            tables.append(rows)
        return pa.concat_tables(tables)

    def drain(self) -> None:
        """Wait for the end of the stream. Raises RuntimeError if there are more rows."""
        if (table := self._blocks.next("end of the stream")) is not None:
            raise RuntimeError(f"{len(table)} rows came after the last iteration")
