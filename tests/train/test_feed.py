"""The trainer's end of the stream, fed by plain iterators."""

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from pipeline.train.feed import RowsFeed, RowsTimeout, TimedIterator

WAIT = 30.0
EMPTY = pa.table({"iteration": pa.array([], pa.int64()), "row": pa.array([], pa.int64())})


def block(iteration: int, *rows: int) -> pa.Table:
    return pa.table({"iteration": pa.array([iteration] * len(rows), pa.int64()), "row": pa.array(rows, pa.int64())})


def feed(blocks: Iterator[pa.Table], chunks: int = 2, timeout: float = WAIT) -> RowsFeed:
    return RowsFeed(TimedIterator(blocks, timeout, lambda: "3 in admission"), chunks)


def test_whole_iterations_in_chunk_order_then_none() -> None:
    made = feed(iter([block(1, 0, 1), EMPTY, block(1, 2), block(2, 3), block(2, 4), EMPTY]))
    assert made.next(1).to_pydict() == {"iteration": [1, 1, 1], "row": [0, 1, 2]}
    assert made.next(2)["row"].to_pylist() == [3, 4]
    assert made.next(3) is None
    # The end stays the end: the loop drains what it has already seen the end of.
    made.drain()
    assert made.next(3) is None


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([block(3, 0), block(3, 1)], r"rows of iterations \[3\] arrived instead of iteration 2"),
        ([block(2, 0), block(3, 1)], r"rows of iterations \[3\] arrived instead of iteration 2"),
        ([block(2, 0)], "the stream ended inside iteration 2, after 1 chunks"),
    ],
)
def test_rows_of_another_iteration_and_missing_ones_are_refused(blocks: list[pa.Table], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        feed(iter(blocks)).next(2)


def test_the_deadline_says_what_is_waited_for() -> None:
    release = threading.Event()

    def silent() -> Iterator[pa.Table]:
        yield block(1, 0)
        release.wait(WAIT)

    made = feed(silent(), timeout=0.1)
    begun = time.monotonic()
    with pytest.raises(RowsTimeout, match=r"no rows for iteration 1 within 0 s: 3 in admission"):
        made.next(1)
    assert 0.1 <= time.monotonic() - begun < 10
    with pytest.raises(RowsTimeout, match="no end of the stream within"):
        made.drain()
    release.set()


def test_an_error_of_the_stream_reaches_the_trainer_as_it_is() -> None:
    def failing() -> Iterator[pa.Table]:
        yield block(1, 0)
        raise KeyError("reward function")

    with pytest.raises(KeyError, match="reward function"):
        feed(failing()).next(1)


def test_the_stream_is_not_read_far_ahead() -> None:
    asked = []

    def counted() -> Iterator[pa.Table]:
        for row in range(100):
            asked.append(row)
            yield block(1, row)

    made = feed(counted())
    made.next(1)
    time.sleep(0.1)
    # Two were handed out, one waits in the queue, one in the thread's hand.
    assert len(asked) <= 4


def test_drain_reads_to_the_end_and_refuses_rows() -> None:
    made = feed(iter([block(1, 0), block(1, 1), EMPTY, EMPTY]))
    made.next(1)
    made.drain()
    with pytest.raises(RuntimeError, match="2 rows came after the last iteration"):
        feed(iter([EMPTY, block(2, 0, 1)])).drain()


def test_what_comes_before_the_first_block_is_waited_for() -> None:
    release = threading.Event()

    def blocks() -> Iterator[pa.Table]:
        release.wait(WAIT)
        yield block(1, 0)
        yield block(1, 1)

    rows = TimedIterator(blocks(), WAIT, lambda: "")
    looks = iter([None, None, "greeting"])
    assert rows.wait(lambda: next(looks), "greeting") == "greeting"
    release.set()
    # The block came without it; it is still there.
    assert rows.wait(lambda: None, "greeting") is None
    assert RowsFeed(rows, 2).next(1)["row"].to_pylist() == [0, 1]  # type: ignore[index]


def test_a_wait_ends_with_the_streams_error_and_at_the_deadline() -> None:
    def failing() -> Iterator[pa.Table]:
        raise KeyError("engine")
        yield

    with pytest.raises(KeyError, match="engine"):
        TimedIterator(failing(), WAIT, lambda: "").wait(lambda: None, "greeting")
    release = threading.Event()

    def silent() -> Iterator[pa.Table]:
        release.wait(WAIT)
        yield block(1, 0)

    with pytest.raises(RowsTimeout, match="no greeting within 0 s: 3 in admission"):
        TimedIterator(silent(), 0.3, lambda: "3 in admission").wait(lambda: None, "greeting")
    release.set()
