"""A tracker that is down, slow or picky costs warnings, never the run."""

import logging
import threading
import time

import pytest

from pipeline.track.sender import Rejected, Sender


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

    sender = Sender("tracker", first_pause_s=0.01, longest_pause_s=0.02)
    sender.start()
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            sender.put(f"record {number}", lambda number=number: send(number))
        until = _soon()
        while len(tries) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        assert set(tries) == {0} and got == []
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1 and "refused" in warnings[0].getMessage() and "record 0" in warnings[0].getMessage()
        up.set()
        assert sender.close(_soon()) is None
    assert got == list(range(50))


def test_pauses_between_tries_grow() -> None:
    tries: list[float] = []

    def send() -> None:
        tries.append(time.monotonic())
        raise ConnectionError("refused")

    sender = Sender("tracker", first_pause_s=0.05, longest_pause_s=10.0)
    sender.start()
    sender.put("a record", send)
    until = _soon()
    while len(tries) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert tries[1] - tries[0] >= 0.05 and tries[2] - tries[1] >= 0.1 and tries[3] - tries[2] >= 0.2
    sender.close(time.monotonic())


def test_hanging_tracker_never_blocks_and_the_end_has_a_deadline() -> None:
    never = threading.Event()
    sender = Sender("tracker")
    sender.start()
    began = time.monotonic()
    for number in range(1000):
        sender.put(f"record {number}", lambda: never.wait(60))
    assert time.monotonic() - began < 1.0
    lacking = sender.close(time.monotonic() + 0.3)
    assert 0.3 <= time.monotonic() - began < 3.0
    assert lacking is not None and "1000 still waited" in lacking
    never.set()


def test_closing_does_not_wait_out_a_long_pause() -> None:
    up = threading.Event()
    failed = threading.Event()

    def send() -> None:
        if not up.is_set():
            failed.set()
            raise ConnectionError("refused")

    sender = Sender("tracker", first_pause_s=1000.0, longest_pause_s=1000.0)
    sender.start()
    sender.put("a record", send)
    assert failed.wait(20)
    up.set()
    assert sender.close(_soon()) is None


def test_memory_is_bounded_and_the_start_is_never_dropped() -> None:
    got: list[str] = []
    sender = Sender("tracker", capacity=10)
    sender.put("the start", lambda: got.append("start"), keep=True)
    for number in range(100):
        sender.put(f"record {number}", lambda number=number: got.append(str(number)))
    sender.start()
    lacking = sender.close(_soon())
    assert got == ["start", *map(str, range(91, 100))]
    assert lacking is not None and "91 were dropped" in lacking


def test_refused_record_is_dropped_and_the_next_follows(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    def refuse() -> None:
        raise Rejected("bad name")

    sender = Sender("tracker")
    sender.put("a bad record", refuse)
    sender.put("a good record", lambda: got.append(1))
    sender.start()
    lacking = sender.close(_soon())
    assert got == [1]
    assert lacking is not None and "1 were refused" in lacking
    assert any("bad name" in record.getMessage() for record in caplog.records)


def test_only_the_latest_drawing_waits() -> None:
    got: list[int] = []
    sender = Sender("plot")
    for number in range(5):
        sender.put("a drawing", lambda number=number: got.append(number), latest=True)
    sender.start()
    assert sender.close(_soon()) is None
    assert got == [4]
