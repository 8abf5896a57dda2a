"""The actor between the train workers and the driver of a supervised job: it passes on events, and the request to
stop."""

from pipeline.store.events import Event, EventLog


class Progress:
    """Events for the driver, in order, and whether the run shall stop."""

    def __init__(self) -> None:
        self._log, self._stopping = EventLog(), False

    async def post(self, event: Event) -> bool:
        """Add an event. Returns True if the run shall stop."""
        self._log.append(event)
        return self._stopping

    async def read(self, after: int, timeout: float) -> tuple[int, list[Event]]:
        """Return the number of the last event and the events after number `after`; see `EventLog.read`."""
        return await self._log.read(after, timeout)

    async def flush(self, timeout: float) -> bool:
        """Wait until the driver has recorded all events so far; see `EventLog.flush`."""
        return await self._log.flush(timeout)

    async def stop(self) -> None:
        """Request the workers to stop after their step."""
        self._stopping = True
