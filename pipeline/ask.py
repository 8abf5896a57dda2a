"""Questions to the policy store that it answers at once."""

import time
from typing import Any

import ray

from pipeline.store import StoreTimeout

ANSWER_S = 60.0
"""Seconds the policy store may take to answer what it can answer at once."""
PAUSE_S = 0.5
"""Between attempts to reach a store that is restarting."""


def ask(store: Any, method: str, *args: Any, timeout: float = ANSWER_S) -> Any:
    """What `method` of the store gives.

    Raises:
        StoreTimeout: it did not answer in time.
        ray.exceptions.RayActorError: it has died, or is restarting.
    """
    try:
        return ray.get(getattr(store, method).remote(*args), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise StoreTimeout(
            f"{method}: the policy store gave no answer within {timeout:.0f} s; its process, or the network to it, is "
            "held up"
        ) from None


def reach(store: Any, patience: float) -> None:
    """Wait until the store answers, which may be restarting.

    Raises:
        StoreTimeout: it did not within `patience` seconds (`trainer.deadlines.store`).
    """
    deadline = time.monotonic() + patience
    while True:
        left = deadline - time.monotonic()
        try:
            ask(store, "status", timeout=max(1.0, left))
            return
        except ray.exceptions.RayActorError as error:
            if left <= PAUSE_S:
                raise StoreTimeout(gone(patience, error)) from error
        time.sleep(PAUSE_S)


def gone(seconds: float, error: BaseException) -> str:
    """The sentence on a store that does not come back."""
    last = " ".join(str(error).split("\n")[0].split())
    return (
        f"the policy store is gone: it has not answered for {seconds:.0f} s (trainer.deadlines.store); {last}. "
        "Start the same command again"
    )
