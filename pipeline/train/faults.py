"""What becomes of a run whose train workers fail: restarted from the newest checkpoint, or ended with a sentence.

an error that would come again (`FinalError`, too many steps without a finite gradient)      the run ends
any error but a death, before the first iteration was trained: settings, model, start        the run ends
whatever else: a dead process or node, a deadline, storage that stayed away                   restart,
    but not more than `trainer.max_failures` times without a checkpoint in between            the run ends
"""

import re
from collections.abc import Mapping
from typing import Any

import ray
from ray.train import UserCallback

from pipeline.ask import ask

ENDINGS = ("Error", "Exception", "Timeout", "Dead", "StaleGeneration", "Interrupt", "Exit")
RAISED = re.compile(r"^(?:\x1b\[\d+m)*((?:\w+\.)*\w+): (.+)$", re.MULTILINE)
"""A traceback's last line: the exception's class and message."""
FINAL = re.compile(r"\b(FinalError|FloatingPointError)\b")
"""Classes of errors that would come again."""
DEATH = re.compile(
    r"\b(RayActorError|Actor(Died|Unavailable)Error|NodeDiedError|OwnerDiedError|Object\w*(Lost|Reconstruction)\w*Error|"
    r"ObjectFetchTimedOutError|WorkerCrashedError|WorkerHealthCheck\w+|StaleGeneration|Dist\w*Error)\b|"
    r"gloo|Connection (closed|reset)"
)
"""Of a process or a node, as whoever dealt with it sees it."""
ECHO = re.compile(r"StaleGeneration|Dist\w*Error|gloo|Connection (closed|reset)")
"""What the survivors of a death meet."""
STATUS_S = 10.0
"""Seconds to ask the store how far a generation came."""


class RunEnded(RuntimeError):
    """Ends a run; the message is its sentence."""


class Restarts(UserCallback):
    """Decides about failures of the train workers; lives in Ray Train's controller.

    Ray Train restarts the workers after every error that this lets pass, and none after one that is raised here.

    Args:
        store: handle of the policy store.
        max_failures: restarts without a checkpoint between them; -1 for any number.
    """

    def __init__(self, store: Any, max_failures: int):
        self._store, self._max_failures = store, max_failures
        self._in_a_row = 0
        self._trained = False

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """A checkpoint is whole."""
        if checkpoint is not None:
            self._in_a_row, self._trained = 0, True

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Train workers failed, by rank.

        Raises:
            RunEnded: they are not to be restarted.
        """
        errors = dict(sorted(worker_exceptions.items(), key=lambda item: _rank_of_interest(item[1])))
        reason = next(told(rank, error) for rank, error in errors.items())
        texts = [whole(error) for error in errors.values()]
        if any(FINAL.search(text) for text in texts):
            raise RunEnded(reason)
        self._trained = self._trained or self._has_trained()
        if not self._trained and not any(DEATH.search(text) for text in texts):
            raise RunEnded(reason)
        self._in_a_row += 1
        if 0 <= self._max_failures < self._in_a_row:
            again = (
                f" (after {self._max_failures} restarts without a checkpoint between them, trainer.max_failures)"
                if self._max_failures
                else ""
            )
            raise RunEnded(f"{reason}{again}")
        try:
            ask(self._store, "failed", reason, timeout=STATUS_S)
        except (ray.exceptions.RayActorError, TimeoutError):
            # The store's own death is the reason; the driver sees that itself.
            return

    def _has_trained(self) -> bool:
        """Whether an iteration has been trained since the workers began."""
        try:
            status = ask(self._store, "status", timeout=STATUS_S)
        except (ray.exceptions.RayActorError, TimeoutError):
            return False
        return status["version"] > status["base"] >= 0


def whole(error: BaseException) -> str:
    """Class, message and, where Ray handed it on as text, the stack of an error and of those it came from."""
    parts, seen = [], set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        parts.append(f"{type(cause).__name__}: {cause}")
        cause = getattr(cause, "health_check_failure", None) or cause.__cause__
    return "\n".join(parts)


def _rank_of_interest(error: BaseException) -> int:
    text = whole(error)
    return 0 if FINAL.search(text) else 2 if ECHO.search(text) else 1


def told(rank: int, error: BaseException) -> str:
    """What went wrong on a rank."""
    if (death := getattr(error, "health_check_failure", None)) is not None:
        # Ray lists names and numbers of the actor, a line each; the address is what helps.
        lines = str(death).splitlines()
        why = " ".join(" ".join(line for line in lines if not line.startswith("\t")).split())[:300]
        node = next((line.strip() for line in lines if line.startswith("\tip:")), None)
        return f"the process of train rank {rank} ended{f' ({node})' if node else ''}: {why}"
    return sentence(error)


def sentence(error: BaseException) -> str:
    """What went wrong, without the stacks of the processes it passed through.

    Ray hands exceptions on as text inside others; the last one in it that is not Ray's own is the one that says most.
    """
    if isinstance(ended := getattr(error, "controller_failure", error), RunEnded):
        return str(ended)
    failures = getattr(error, "worker_failures", None)
    if failures:
        error = next(iter(failures.values()))
    text = f"{type(error).__name__}: {error}"
    raised = [
        (name.split(".")[-1], message)
        for name, message in RAISED.findall(text)
        if name.split(".")[-1].endswith(ENDINGS) and not name.startswith("ray.")
    ]
    name, message = (
        raised[-1] if raised else (type(error).__name__, (str(error).strip().splitlines() or ["it says no more"])[-1])
    )
    return f"{name}: {message}"
