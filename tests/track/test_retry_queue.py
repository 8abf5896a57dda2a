"""A tracker that is down, slow or picky costs warnings, never the run."""

import logging
import threading
import time

import pytest

from pipeline.track.retry_queue import Rejected, RetryQueue


def _soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_records_arrive_in_order_after_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []
    up = threading.Event()
    tries = []

    def send(number: int) -> None:
        tries.append(number)
        if not up.is_set():
            raise ConnectionError("refused")
        got.append(number)

    queue = RetryQueue("tracker", first_pause_s=0.01, longest_pause_s=0.02)
    queue.start()
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            queue.put(f"record {number}", lambda number=number: send(number))
        until = _soon()
        while len(tries) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        assert set(tries) == {0} and got == []
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1 and "refused" in warnings[0].getMessage() and "record 0" in warnings[0].getMessage()
        up.set()
        assert queue.close(_soon()) is None
    assert got == list(range(50))


def test_pauses_between_tries_grow() -> None:
    tries: list[float] = []

    def send() -> None:
        tries.append(time.monotonic())
        raise ConnectionError("refused")

    queue = RetryQueue("tracker", first_pause_s=0.05, longest_pause_s=10.0)
    queue.start()
    queue.put("a record", send)
    until = _soon()
    while len(tries) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert tries[1] - tries[0] >= 0.05 and tries[2] - tries[1] >= 0.1 and tries[3] - tries[2] >= 0.2
    queue.close(time.monotonic())


def test_hanging_tracker_never_blocks_and_the_end_has_a_deadline() -> None:
    never = threading.Event()
    queue = RetryQueue("tracker")
    queue.start()
    began = time.monotonic()
    for number in range(1000):
        queue.put(f"record {number}", lambda: never.wait(60))
    assert time.monotonic() - began < 30
    lacking = queue.close(time.monotonic() + 0.3)
    assert 0.3 <= time.monotonic() - began < 30
    assert lacking is not None and "1000 still waited" in lacking
    never.set()


def test_closing_does_not_wait_out_a_long_pause() -> None:
    up = threading.Event()
    failed = threading.Event()

    def send() -> None:
        if not up.is_set():
            failed.set()
            raise ConnectionError("refused")

    queue = RetryQueue("tracker", first_pause_s=1000.0, longest_pause_s=1000.0)
    queue.start()
    queue.put("a record", send)
    assert failed.wait(20)
    up.set()
    assert queue.close(_soon()) is None


def test_memory_is_bounded_and_the_start_is_never_dropped() -> None:
    got: list[str] = []
    queue = RetryQueue("tracker", capacity=10)
    queue.put("the start", lambda: got.append("start"), keep=True)
    for number in range(100):
        queue.put(f"record {number}", lambda number=number: got.append(str(number)))
    queue.start()
    lacking = queue.close(_soon())
    assert got == ["start", *map(str, range(91, 100))]
    assert lacking is not None and "91 were dropped" in lacking


def test_refused_record_is_dropped_and_the_next_follows(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    def refuse() -> None:
        raise Rejected("bad name")

    queue = RetryQueue("tracker")
    queue.put("a bad record", refuse)
    queue.put("a good record", lambda: got.append(1))
    queue.start()
    lacking = queue.close(_soon())
    assert got == [1]
    assert lacking is not None and "1 were refused" in lacking
    assert any("bad name" in record.getMessage() for record in caplog.records)


def test_a_call_with_a_limit_of_tries_makes_way_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def fail(name: str) -> None:
        tries.append(name)
        raise ConnectionError("no answer")

    def fail_once() -> None:
        tries.append("record")
        if tries.count("record") == 1:
            raise ConnectionError("no answer")

    queue = RetryQueue("tracker", first_pause_s=0.01, longest_pause_s=0.02)
    queue.put("a trace", fail, "trace", tries=3)
    queue.put("a record", fail_once)
    queue.put("another trace", fail, "other", tries=2)
    queue.start()
    lacking = queue.close(_soon())
    assert tries == ["trace", "record", "record", "other", "trace", "other", "trace"]
    assert lacking == "tracker lacks records: 2 were given up (last error: ConnectionError: no answer)"
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.split(" (")[0] for message in messages] == [
        "tracker could not take a trace",
        "tracker could not take another trace",
        "tracker did not take another trace",
    ]


def test_only_the_latest_drawing_waits() -> None:
    got: list[int] = []
    queue = RetryQueue("plot")
    for number in range(5):
        queue.put("a drawing", lambda number=number: got.append(number), latest=True)
    queue.start()
    assert queue.close(_soon()) is None
    assert got == [4]
