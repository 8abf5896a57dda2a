"""Which failures of the train workers are answered by a restart, and what is said about them."""

import pickle
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.train import ControllerError, WorkerGroupError

from pipeline.errors import FinalError
from pipeline.store import StaleGeneration, StoreTimeout
from pipeline.train import faults
from pipeline.train.faults import Restarts, RunEnded, sentence, told


class Health(Exception):
    """As Ray Train reports a dead worker."""

    def __init__(self, cause: Exception):
        super().__init__("A worker health check failed.\nWorker info: Worker(...)")
        self.health_check_failure = cause


GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
DEAD = Health(RayActorError(error_msg="The actor died unexpectedly before finishing this task."))


class Store:
    """What is asked of the policy store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int = 5, base: int = 2):
        self.version, self.base, self.told, self.away = version, base, [], False
        monkeypatch.setattr(faults, "ask", self.ask)

    def ask(self, store: Any, method: str, *args: Any, timeout: float) -> Any:
        if self.away:
            raise ActorUnavailableError("away", None)
        if method == "failed":
            return self.told.append(args[0])
        assert method == "status"
        return {"version": self.version, "base": self.base}


def fail(restarts: Restarts, *errors: Exception) -> None:
    restarts.after_exception(None, dict(enumerate(errors)))


def save(restarts: Restarts) -> None:
    restarts.after_report(None, [{"version": 6}], object())


def test_restarts_are_counted_from_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    Store(monkeypatch)
    restarts = Restarts(None, 2)
    for _ in range(5):
        for _ in range(2):
            fail(restarts, DEAD)
        restarts.after_report(None, [{}], None)  # no checkpoint: no progress
        save(restarts)
    for _ in range(2):
        fail(restarts, ValueError("storage"))
    with pytest.raises(RunEnded) as ended:
        fail(restarts, ValueError("storage"))
    assert str(ended.value) == (
        "ValueError: storage (after 2 restarts without a checkpoint between them, trainer.max_failures)"
    )


def test_no_restarts_and_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Store(monkeypatch)
    with pytest.raises(RunEnded, match="^ValueError: storage$"):
        fail(Restarts(None, 0), ValueError("storage"))
    restarts = Restarts(None, -1)
    for _ in range(99):
        fail(restarts, DEAD)


@pytest.mark.parametrize(
    "error",
    [
        FinalError("the reward failed for 100% of the rows"),
        FloatingPointError("the gradient norm of the actor was nan"),
        # As the error of an engine comes through Ray Data: text in another error's message.
        RuntimeError("task failed\nTraceback ...\npipeline.errors.FinalError: engine e loaded checksum 1"),
    ],
)
def test_what_would_come_again_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    store = Store(monkeypatch)
    restarts = Restarts(None, -1)
    save(restarts)
    with pytest.raises(RunEnded, match=str(error).split(": ")[-1].split("\n")[0]):
        fail(restarts, GLOO, error)
    assert store.told == []


@pytest.mark.parametrize(
    ("error", "restarted"),
    [
        (OSError(2, "no model.safetensors in /models/x"), False),
        (TimeoutError("the rollout engine did not start within 900 s"), False),
        (DEAD, True),
        (GLOO, True),
        (StaleGeneration("generation 1 of the stream has ended"), True),
        (RayActorError(error_msg="the store"), True),
    ],
    ids=["no model", "no engine", "dead", "peer of a dead one", "stale", "store"],
)
def test_only_deaths_are_survived_before_the_first_iteration(
    monkeypatch: pytest.MonkeyPatch, error: Exception, restarted: bool
) -> None:
    store = Store(monkeypatch, version=2, base=2)
    restarts = Restarts(None, 3)
    if restarted:
        fail(restarts, error)
    else:
        with pytest.raises(RunEnded):
            fail(restarts, error)
    # With an iteration trained, or a checkpoint, all are tried again.
    store.version = 3
    fail(Restarts(None, 3), error)
    store.version, saved = 2, Restarts(None, 3)
    save(saved)
    fail(saved, error)


def test_the_cause_is_told_and_not_what_its_survivors_met(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    fail(Restarts(None, 3), GLOO, DEAD, GLOO)
    fail(Restarts(None, 3), StaleGeneration("old"), OSError(28, "No space left on device"))
    fail(Restarts(None, 3), GLOO)
    assert store.told == [
        "the process of train rank 1 ended: The actor died unexpectedly before finishing this task.",
        "OSError: [Errno 28] No space left on device",
        f"RuntimeError: {GLOO}",
    ]


def test_the_stores_own_death_is_a_reason_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.away = True
    fail(Restarts(None, 1), ActorUnavailableError("the store is restarting", None))


def test_sentences() -> None:
    assert sentence(ControllerError(RunEnded("what happened"))) == "what happened"
    assert sentence(WorkerGroupError("text", {1: StoreTimeout("pace: waited")})) == "StoreTimeout: pace: waited"
    assert sentence(TimeoutError()) == "TimeoutError: it says no more"
    inner = "ray.exceptions.RayTaskError(X): task\nTraceback\nValueError: the row\nray.data.Bad: outer"
    assert sentence(RuntimeError(inner)) == "ValueError: the row"
    assert told(3, ValueError("v")) == "ValueError: v"
    listed = "The actor died.\n\tclass_name: Worker\n\tpid: 7\n\tip: 10.0.0.3\nKilled: no memory."
    ended = told(3, Health(RayActorError(error_msg=listed)))
    assert ended == "the process of train rank 3 ended (ip: 10.0.0.3): The actor died. Killed: no memory."
    assert str(pickle.loads(pickle.dumps(RunEnded("kept")))) == "kept"


def test_a_callback_that_raises_ends_ray_trains_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Restarts` builds on: Ray Train tries no error of a callback again."""
    from ray.train import FailureConfig
    from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy, FailureDecision

    policy = DefaultFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(ControllerError(RunEnded("x"))) == FailureDecision.RAISE
    assert policy.make_decision(WorkerGroupError("x", {0: DEAD})) == FailureDecision.RETRY


def test_reaching_a_store_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import ask

    answers: list[Any] = [RayActorError(error_msg="d"), ActorUnavailableError("u", None), {"version": 0}]

    class Asked:
        class status:
            @staticmethod
            def remote() -> Any:
                future: Future = Future()
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
                return future

    monkeypatch.setattr(ask, "PAUSE_S", 0.01)
    monkeypatch.setattr(ray, "get", lambda future, timeout: future.result(timeout))
    ask.reach(Asked, 5.0)
    answers[:] = [RayActorError(error_msg="it was killed")]
    with pytest.raises(StoreTimeout, match=r"the policy store is gone: .* for 0 s \(trainer.deadlines.store\)"):
        ask.reach(Asked, 0.1)

    def late(future: Any, timeout: float) -> None:
        raise GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(StoreTimeout, match="^status: the policy store gave no answer within 7 s"):
        ask.ask(Asked, "status", timeout=7.0)
