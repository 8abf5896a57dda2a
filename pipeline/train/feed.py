"""The trainer's end of the stream: one iteration's rows of this rank, or a sentence about what did not come."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa


class RowsTimeout(TimeoutError):
    """The next rows did not come within the deadline."""


class RowsFeed:
    """Hands out whole iterations from an iterator of blocks, with a deadline on every wait.

    The iterator is drained by a thread of its own, so that a stream that never answers cannot hold the trainer.

    Args:
        blocks: Arrow tables, one chunk each, in the order of the stream.
        chunks: chunks of one iteration that come to this rank.
        timeout: seconds one chunk may take.
        describe: says what the run is waiting for, for the error.
    """

    def __init__(self, blocks: Iterator[pa.Table], chunks: int, timeout: float, describe: Callable[[], str]):
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._chunks, self._timeout, self._describe = chunks, timeout, describe
        self._ended = False
        self._thread = threading.Thread(target=self._fetch, args=(blocks,), name="rows", daemon=True)
        self._thread.start()

    def next(self, iteration: int) -> pa.Table | None:
        """The rows of `iteration`, in chunk order; None when the stream has ended.

        Raises:
            RowsTimeout: a chunk did not come in time.
            RuntimeError: rows of another iteration came, or the stream ended inside an iteration.
        """
        tables: list[pa.Table] = []
        while len(tables) < self._chunks:
            table = self._take(iteration)
            if table is None:
                if tables:
                    raise RuntimeError(f"the stream ended inside iteration {iteration}, after {len(tables)} chunks")
                return None
            if len(table):
                tables.append(table)
        rows = pa.concat_tables(tables)
        found = set(rows["iteration"].to_pylist())
        if found != {iteration}:
            raise RuntimeError(f"rows of iterations {sorted(found)} arrived where iteration {iteration} was expected")
        return rows

    def drain(self) -> None:
        """Read on to the end of the stream, which must hold no more rows.

        Raises:
            RuntimeError: there were rows.
        """
        while (table := self._take(-1)) is not None:
            if len(table):
                raise RuntimeError(f"{len(table)} rows came after the last iteration")

    def _take(self, iteration: int) -> pa.Table | None:
        if self._ended:
            return None
        what = f"rows for iteration {iteration}" if iteration > 0 else "end of the stream"
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise RowsTimeout(
                f"no {what} within {self._timeout:.0f} s (trainer.deadlines.rows): {self._describe()}"
            ) from None
        if isinstance(item, BaseException):
            raise item
        self._ended = item is None
        return item

    def _fetch(self, blocks: Iterator[pa.Table]) -> None:
        try:
            for block in blocks:
                self._queue.put(block)
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 (handed to the trainer's thread)
            self._queue.put(error)
