"""Decides after a failure of train workers: restart from the newest checkpoint, or end the run.

an error that a restart would repeat (`FinalError`, too many non-finite steps)               the run ends
any error but a death, before the first iteration is trained: settings, model, start         the run ends
any other: a dead process or node, a deadline, storage that stayed away                      restart,
    but not more than `trainer.max_failures` times without a checkpoint in between           the run ends
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.train import UserCallback

from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.upstream import ray_memory

ENDINGS = ("Error", "Exception", "Timeout", "Dead", "Died", "StaleAttempt", "Interrupt", "Exit")
RAISED = re.compile(r"^(?:\x1b\[\d+m)*((?:\w+\.)*\w+): (.+)$", re.MULTILINE)
"""Pattern of a traceback's last line: the exception's class and message."""
GLOO = re.compile(r"\bgloo/transport/\w+/\w+\.\w+:\d+\]")
"""Pattern of the source file and line in gloo's messages; torch raises them as a plain `RuntimeError`."""
FINAL = {"FinalError", "FloatingPointError"}
"""Names of error classes that a restart would repeat."""
SECONDARY = {"StaleAttempt", "PeerDied", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "gloo"}
"""Names of errors that other processes raise because one has died."""
OUT_OF_MEMORY = "ray.exceptions.OutOfMemoryError"
"""Name of the error of calls to a process that Ray's memory monitor has killed. Torch has an error of the same class
name for a GPU's memory, which is not a death."""
DEATH = SECONDARY | {
    *("RayActorError", "ActorDiedError", "ActorUnavailableError", "NodeDiedError", "WorkerCrashedError"),
    *("OwnerDiedError", "ObjectLostError", "ObjectReconstructionFailedError", "ObjectFetchTimedOutError"),
    *("WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError"),
    OUT_OF_MEMORY,
}
"""Names of errors that show the death of a process or a node."""


class RunEnded(RuntimeError):
    """The run ends without a restart. The user reads the message as the reason."""


class Restarts(UserCallback):
    """Decides about failures of the train workers, as a callback in Ray Train's controller.

    Ray Train restarts the workers unless `after_exception` raises.

    Args:
        store: the policy store.
        max_failures: maximum number of restarts without a checkpoint between them; -1 for any number.
    """

    def __init__(self, store: StoreClient, max_failures: int):
        self._store, self._max_failures = store, max_failures
        self._in_a_row = 0
        self._trained = False

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Handle a report of all workers; one with a checkpoint resets the count of restarts."""
        if checkpoint is not None:
            self._in_a_row, self._trained = 0, True

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Decide on a restart, from the errors of the failed train workers, given by rank.

        Raises:
            RunEnded: the workers must not be restarted.
        """
        found = {rank: kinds(error) for rank, error in worker_exceptions.items()}
        # The most informative rank: one with a final error, else one whose error does not follow from another's death.
        rank = min(found, key=lambda rank: (not found[rank] & FINAL, bool(found[rank] & SECONDARY)))
        reason = describe_failure(rank, worker_exceptions[rank])
        every = set[str]().union(*found.values())
        self._trained = self._trained or self._has_trained()
        if every & FINAL or not (self._trained or every & DEATH):
            raise RunEnded(reason)
        self._in_a_row += 1
        if 0 <= self._max_failures < self._in_a_row:
            if self._max_failures:
                reason += (
                    f" (after {self._max_failures} restarts without a checkpoint between them, trainer.max_failures)"
                )
            raise RunEnded(reason)
        # If this fails, the store's own death is the reason, which the driver sees itself.
        with suppress(ray.exceptions.RayActorError, TimeoutError):
            self._store.ask(PolicyStore.report_failure, reason)

    def _has_trained(self) -> bool:
        """Return True if an iteration has been trained since the workers began."""
        try:
            status = self._store.ask(PolicyStore.status)
        except (ray.exceptions.RayActorError, TimeoutError):
            return False
        return status.version > status.base >= 0


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the chain of errors that caused it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = getattr(cause, "health_check_failure", None) or getattr(cause, "cause", None) or cause.__cause__


def kinds(error: BaseException) -> set[str]:
    """Return the class names of an error and of the errors that caused it, base classes included.

    Ray reports errors of other processes as text. In such text the name before the message in a traceback's last line
    counts as a class, and nothing else does. A message of gloo counts as the class `gloo`.
    """
    names: set[str] = set()
    for cause in causes(error):
        names |= {kind.__name__ for kind in type(cause).__mro__}
        lines = RAISED.findall(str(cause))
        names |= {name.split(".")[-1] for name, _ in lines}
        if isinstance(cause, ray.exceptions.OutOfMemoryError) or any(name == OUT_OF_MEMORY for name, _ in lines):
            names.add(OUT_OF_MEMORY)
        plain = [message for name, message in lines if name == "RuntimeError"]
        if type(cause) is RuntimeError:
            plain.append(str(cause))
        if any(GLOO.search(message) for message in plain):
            names.add("gloo")
    return names


def describe_failure(rank: int, error: BaseException) -> str:
    """Describe in a sentence how a train rank failed."""
    if (death := getattr(error, "health_check_failure", None)) is not None:
        if (why := ray_memory.reason(str(death))) is not None:
            return f"the process of train rank {rank} ended: {why}"
        # Ray lists names and numbers of the actor, a line each; the address is the useful one.
        lines = str(death).splitlines()
        why = " ".join(" ".join(line for line in lines if not line.startswith("\t")).split())[:300]
        node = next((line.strip() for line in lines if line.startswith("\tip:")), None)
        return f"the process of train rank {rank} ended{f' ({node})' if node else ''}: {why}"
    return sentence(error)


def sentence(error: BaseException) -> str:
    """Describe an error in a sentence without stacks: of the exceptions that Ray nests as text, the last that is not
    Ray's own."""
    error = getattr(error, "controller_failure", error)
    if isinstance(error, RunEnded):
        return str(error)
    failures = getattr(error, "worker_failures", None)
    if failures:
        error = next(iter(failures.values()))
    text = f"{type(error).__name__}: {error}"
    if (why := next(filter(None, (ray_memory.reason(str(cause)) for cause in causes(error))), None)) is not None:
        return f"a process of the run ended: {why}"
    raised = [
        (name.split(".")[-1], message)
        for name, message in RAISED.findall(text)
        if name.split(".")[-1].endswith(ENDINGS) and not name.startswith("ray.")
    ]
    name, message = (
        raised[-1]
        if raised
        else (type(error).__name__, (str(error).strip().splitlines() or ["no further message"])[-1])
    )
    return f"{name}: {message}"
