"""Limit the rate of calls of reward functions that use services."""

from collections import deque

WINDOW_S = 60.0


class RateLimit:
    """Limits the number of calls at the same time, and of calls that begin within any 60 seconds.

    The window slides: with `max_per_minute` = n, call k begins at least 60 seconds after call k - n. None: no limit.
    """

    def __init__(self, max_concurrent: int | None, max_per_minute: int | None) -> None:
        self._max_concurrent, self._max_per_minute = max_concurrent, max_per_minute
        self._under_way = 0
        self._begun: deque[float] = deque()

    def may_begin(self, now: float) -> bool:
        """Return True if a call may begin at the time `now`, in seconds of a monotonic clock."""
        if self._max_concurrent is not None and self._under_way >= self._max_concurrent:
            return False
        while self._begun and now - self._begun[0] >= WINDOW_S:
            self._begun.popleft()
        return self._max_per_minute is None or len(self._begun) < self._max_per_minute

    def begin(self, now: float) -> None:
        """Count a call that begins at the time `now`."""
        self._under_way += 1
        if self._max_per_minute is not None:
            self._begun.append(now)

    def end(self) -> None:
        """Count the end of a call, successful or not."""
        self._under_way -= 1
