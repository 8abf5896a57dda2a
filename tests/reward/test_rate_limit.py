"""Rate limits, on a clock of the test's own."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rate_limit import WINDOW_S, RateLimit


def test_calls_under_way() -> None:
    limit = RateLimit(2, None)
    for _ in range(2):
        assert limit.may_begin(0.0)
        limit.begin(0.0)
    assert not limit.may_begin(1e9)
    limit.end()
    assert limit.may_begin(0.0)


@given(st.integers(1, 5), st.lists(st.floats(0, 40), min_size=1, max_size=60))
def test_no_window_of_a_minute_holds_more_than_the_limit(most: int, pauses: list[float]) -> None:
    limit, now = RateLimit(None, most), 0.0
    begun: list[float] = []
    for pause in pauses:
        now += pause
        if limit.may_begin(now):
            limit.begin(now)
            limit.end()
            begun.append(now)
        else:
            # It is held back for a reason: the window is full.
            assert sum(now - WINDOW_S < time <= now for time in begun) == most
    for time in begun:
        assert sum(time <= other < time + WINDOW_S for other in begun) <= most
