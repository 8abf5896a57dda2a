"""When the watchdog speaks, and what it says."""

from pipeline.run.watchdog import Watchdog
from pipeline.store.status import StoreStatus


def status(alive_s: float) -> StoreStatus:
    return StoreStatus(1, 0, 4, False, {"admission": 3, "prompts": 0}, alive_s, "engine a:1")


def test_it_speaks_after_a_minute_and_then_less_and_less() -> None:
    now = [0.0]
    watchdog = Watchdog(clock=lambda: now[0])
    said = {}
    for second in range(1000):
        now[0] = float(second)
        if (text := watchdog.look(status(second))) is not None:
            said[second] = text
    assert list(said) == [60, 120, 240, 480, 960]
    assert said[120] == (
        "nothing has moved for 120 s: policy version 4 is current, store waits: 3 in admission, last heartbeat 120 s "
        "ago from engine a:1"
    )


def test_events_and_heartbeats_are_movements() -> None:
    now = [0.0]
    watchdog = Watchdog(clock=lambda: now[0])
    now[0] = 59.0
    watchdog.moved()
    now[0] = 118.0
    assert watchdog.look(status(118.0)) is None
    now[0] = 119.0
    assert watchdog.look(status(119.0)) is not None
    now[0] = 125.0
    assert watchdog.look(status(3.0)) is None
    now[0] = 181.0
    assert watchdog.look(status(59.0)) is None
    now[0] = 182.0
    assert watchdog.look(status(60.0)) is not None
