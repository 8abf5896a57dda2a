"""The driver's watch over a run: it reads the policy store's events until training has ended.

The store may die and come back, empty: the driver then asks again what it wants (a stop that was requested), and waits
for the train workers, which restart from their newest checkpoint. It waits for either no longer than a deadline.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray

from pipeline.config.trainer import DeadlineConfig
from pipeline.store.client import PAUSE_S, StoreClient, store_lost
from pipeline.store.errors import StoreTimeout
from pipeline.store.events import AttemptFailed
from pipeline.store.policy_store import PolicyStore
from pipeline.track.follow import Follower
from pipeline.track.watchdog import Watchdog


class Notices(Protocol):
    """The part of `Tracker` that is used here."""

    def notice(self, text: str) -> None: ...


def follow(
    store: Any,
    follower: Follower,
    training: threading.Thread,
    tracker: Notices,
    deadlines: DeadlineConfig,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[bool, str | None]:
    """Handle events until training has ended.

    Args:
        store: handle of the policy store.
        follower: takes the events.
        training: the thread in which Ray Train runs.
        tracker: shows what has to be seen.
        deadlines: how long the store (`store`) and the train workers (`train_start`) may be away.
        clock: seconds that pass.

    Returns:
        whether Ctrl-C was pressed, and why training cannot go on, where it has not ended.
    """
    client = StoreClient(store)
    read, interrupted, watchdog = 0, False, Watchdog(clock=clock)
    silent_since: float | None = None
    idle_since = clock()
    while True:
        try:
            alive = training.is_alive()
            try:
                last, events = client.ask(PolicyStore.read_events, read, 1.0)
                status = client.ask(PolicyStore.status)
                if interrupted and not status.stopping:
                    client.ask(PolicyStore.stop)
            except (ray.exceptions.RayActorError, StoreTimeout) as error:
                if not alive:
                    return interrupted, None
                now = clock()
                if silent_since is None:
                    silent_since, idle_since = now, now
                    follower.handle(AttemptFailed("the policy store died"))
                    tracker.notice("the policy store does not answer; Ray starts it again")
                if now - silent_since > deadlines.store:
                    return interrupted, store_lost(now - silent_since, error)
                time.sleep(PAUSE_S)
                continue
            silent_since = None
            # What is interrupted while it is handled comes again.
            for number, event in enumerate(events, start=last - len(events) + 1):
                follower.handle(event)
                read = number
                watchdog.moved()
            if text := watchdog.look(status):
                tracker.notice(text)
            # One more read after the end: the last events came before it.
            if not alive:
                return interrupted, None
            if follower.training:
                idle_since = clock()
            elif clock() - idle_since > deadlines.train_start:
                return interrupted, _no_workers(deadlines.train_start)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            tracker.notice("stopping after this iteration; Ctrl-C again ends the run at once")


def _no_workers(seconds: float) -> str:
    free = ", ".join(
        f"{number:g} {name}" for name, number in sorted(ray.available_resources().items()) if name in ("CPU", "GPU")
    )
    return (
        f"the train workers have not begun for {seconds:.0f} s (trainer.deadlines.train_start): they wait for nodes, "
        f"or load models and a checkpoint; free in the cluster are {free or 'no CPUs'}"
    )
