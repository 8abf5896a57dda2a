"""The trainer's end of the stream: reads blocks of rows with a deadline, and collects the rows of each iteration."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

PAUSE_S = 0.2
"""Seconds between two checks in `TimedIterator.wait`."""

T = TypeVar("T")


class RowsTimeout(TimeoutError):
    """Error if rows did not arrive within the deadline."""


class TimedIterator:
    """Reader of blocks from an iterator, in a separate thread, with a deadline on every wait. Skips empty blocks.

    Args:
        blocks: Arrow tables.
        timeout: seconds that one block may take.
        hint: returns the end of the error's sentence: the event that the run waits for, or a setting to change.
    """

    def __init__(self, blocks: Iterator[pa.Table], timeout: float, hint: Callable[[], str]):
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._timeout, self._hint = timeout, hint
        self._ended = False
        threading.Thread(target=self._fetch, args=(blocks,), name="rows", daemon=True).start()

    def next(self, what: str) -> pa.Table | None:
        """Return the next block; None after the last one.

        Raises:
            RowsTimeout: the block did not arrive in time; the message names `what`.
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
        """Call `ready` until it returns something other than None, and return that; None if a block arrives first.

        Raises:
            RowsTimeout: neither happened in time; the message names `what`.
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
    """Reader of this rank's rows, iteration by iteration, each in `parts` equal parts.

    Args:
        blocks: this rank's chunks in the order of the stream.
        chunks: number of chunks of one iteration that this rank gets.
        parts: number of parts of an iteration; it divides `chunks`.
    """

    def __init__(self, blocks: TimedIterator, chunks: int, parts: int = 1):
        self._blocks = blocks
        self._chunks_per_part = chunks // parts
        self.parts = parts

    def next(self, iteration: int, part: int = 0) -> pa.Table | None:
        """Return the rows of one part of an iteration, in chunk order; None if the stream ended before the iteration.

        Args:
            iteration: number of the iteration.
            part: number of the part, from 0.

        Raises:
            RowsTimeout: a chunk did not arrive in time.
            RuntimeError: rows of another iteration arrived, or the stream ended inside an iteration.
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
        """Wait for the end of the stream. Raises RuntimeError if more rows arrive."""
        if (table := self._blocks.next("end of the stream")) is not None:
            raise RuntimeError(f"{len(table)} rows came after the last iteration")
