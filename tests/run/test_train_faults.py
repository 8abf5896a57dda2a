"""Which failures of the train workers are answered by a restart, and what is said about them."""

import asyncio
import pickle
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, OutOfMemoryError, RayActorError
from ray.train import ControllerError, WorkerGroupError

from pipeline.errors import FinalError, PeerDied
from pipeline.run.faults import Restarts, RunEnded, describe_failure, sentence
from pipeline.store import client
from pipeline.store.client import StoreClient
from pipeline.store.errors import StaleAttempt, StoreTimeout
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import StoreStatus
from tests.upstream.test_ray_memory import MESSAGE


class Health(Exception):
    """As Ray Train reports a dead worker."""

    def __init__(self, cause: Exception):
        super().__init__("A worker health check failed.\nWorker info: Worker(...)")
        self.health_check_failure = cause


GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
DEAD = Health(RayActorError(error_msg="The actor died unexpectedly before finishing this task."))


class Store:
    """What is asked of the policy store."""

    def __init__(self, version: int = 5, base: int = 2):
        self.version, self.base, self.away = version, base, False
        self.told: list[str] = []

    def ask(self, method: Any, *args: Any) -> Any:
        if self.away:
            raise ActorUnavailableError("away", None)
        if method is PolicyStore.report_failure:
            return self.told.append(args[0])
        assert method is PolicyStore.status
        return StoreStatus(1, self.base, self.version, False, {}, 0.0, "x")


def fail(restarts: Restarts, *errors: Exception) -> None:
    restarts.after_exception(None, dict(enumerate(errors)))


def save(restarts: Restarts) -> None:
    restarts.after_report(None, [{"version": 6}], object())


def test_restarts_are_counted_from_the_last_checkpoint() -> None:
    restarts = Restarts(Store(), 2)
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


def test_no_restarts_and_any_number() -> None:
    store = Store()
    with pytest.raises(RunEnded, match="^ValueError: storage$"):
        fail(Restarts(store, 0), ValueError("storage"))
    restarts = Restarts(store, -1)
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
def test_what_would_come_again_ends_the_run_at_once(error: Exception) -> None:
    store = Store()
    restarts = Restarts(store, -1)
    save(restarts)
    with pytest.raises(RunEnded, match=str(error).split(": ")[-1].split("\n")[0]):
        fail(restarts, GLOO, error)
    assert store.told == []


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("outer")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "restarted"),
    [
        (OSError(2, "no model.safetensors in /models/x"), False),
        (TimeoutError("the rollout engine did not start within 900 s"), False),
        (DEAD, True),
        (GLOO, True),
        (StaleAttempt("attempt 1 of the stream has ended"), True),
        (wrapped(RayActorError(error_msg="died")), True),
        (wrapped(PeerDied("the memory of train rank 0 cannot be read")), True),
        (type("Backend", (torch.distributed.DistBackendError,), {})("NCCL"), True),
        (RuntimeError("task\nTraceback ...\npipeline.errors.PeerDied: weights: the memory of train rank 0"), True),
        (RuntimeError(f"task\nTraceback ...\nRuntimeError: {GLOO}"), True),
        # Words in a message are no death.
        (FileNotFoundError("/data/igloo/train.parquet"), False),
        (ValueError("Connection closed by the judge"), False),
        (ConnectionError("Connection reset by peer"), False),
        (OutOfMemoryError(MESSAGE), True),
        (Health(OutOfMemoryError(MESSAGE)), True),
        (RuntimeError(f"task\nTraceback ...\nray.exceptions.OutOfMemoryError: {MESSAGE}"), True),
        # Memory of a GPU.
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("task\nTraceback ...\ntorch.OutOfMemoryError: CUDA out of memory"), False),
        (RuntimeError("a reward function said: gloo and RayActorError: are words"), False),
        (type("DistanceError", (ValueError,), {})("bad metric"), False),
    ],
)
def test_only_deaths_are_survived_before_the_first_iteration(error: Exception, restarted: bool) -> None:
    store = Store(version=2, base=2)
    with nullcontext() if restarted else pytest.raises(RunEnded):
        fail(Restarts(store, 3), error)
    assert len(store.told) == restarted
    # With an iteration trained, or a checkpoint, all are tried again.
    store.version = 3
    fail(Restarts(store, 3), error)
    store.version, saved = 2, Restarts(store, 3)
    save(saved)
    fail(saved, error)


def test_the_cause_is_told_and_not_what_its_survivors_met() -> None:
    store = Store()
    fail(Restarts(store, 3), GLOO, DEAD, GLOO)
    fail(Restarts(store, 3), StaleAttempt("old"), OSError(28, "No space left on device"))
    fail(Restarts(store, 3), GLOO)
    assert store.told == [
        "the process of train rank 1 ended: The actor died unexpectedly before finishing this task.",
        "OSError: [Errno 28] No space left on device",
        f"RuntimeError: {GLOO}",
    ]


def test_the_stores_own_death_is_a_reason_to_restart() -> None:
    store = Store()
    store.away = True
    fail(Restarts(store, 1), ActorUnavailableError("the store is restarting", None))


def test_sentences() -> None:
    assert sentence(ControllerError(RunEnded("what happened"))) == "what happened"
    assert sentence(WorkerGroupError("text", {1: StoreTimeout("pace: waited")})) == "StoreTimeout: pace: waited"
    assert sentence(TimeoutError()) == "TimeoutError: no further message"
    assert sentence(ControllerError(TimeoutError())) == "TimeoutError: no further message"
    inner = "ray.exceptions.RayTaskError(X): task\nTraceback\nValueError: the row\nray.data.Bad: outer"
    assert sentence(RuntimeError(inner)) == "ValueError: the row"
    assert describe_failure(3, ValueError("v")) == "ValueError: v"
    listed = "The actor died.\n\tclass_name: Worker\n\tpid: 7\n\tip: 10.0.0.3\nKilled: no memory."
    ended = describe_failure(3, Health(RayActorError(error_msg=listed)))
    assert ended == "the process of train rank 3 ended (ip: 10.0.0.3): The actor died. Killed: no memory."
    assert str(pickle.loads(pickle.dumps(RunEnded("kept")))) == "kept"


def test_a_callback_that_raises_ends_ray_trains_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Restarts` builds on: Ray Train tries no error of a callback again."""
    from ray.train import FailureConfig
    from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy, FailureDecision

    policy = DefaultFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(ControllerError(RunEnded("x"))) == FailureDecision.RAISE
    assert policy.make_decision(WorkerGroupError("x", {0: DEAD})) == FailureDecision.RETRY


class Asked:
    """An actor whose `status` gives these answers, the last one for ever."""

    def __init__(self, *answers: Any):
        self.answers = list(answers)

    @property
    def status(self) -> Any:
        def remote() -> Future:
            future: Future = Future()
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
            return future

        return SimpleNamespace(remote=remote)


def test_a_store_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setattr(ray, "get", lambda future, timeout: future.result(timeout))
    status = StoreStatus(1, 0, 0, False, {}, 0.0, "x")
    StoreClient(Asked(RayActorError(error_msg="d"), ActorUnavailableError("u", None), status)).wait_until_ready(5.0)
    with pytest.raises(StoreTimeout, match=r"the policy store is lost: .* for 0 s \(trainer.deadlines.store\)"):
        StoreClient(Asked(RayActorError(error_msg="it was killed"))).wait_until_ready(0.1)


def test_every_call_ends_where_the_store_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)

    class Frozen:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *args: Future())

    def get(future: Future, timeout: float) -> Any:
        try:
            return future.result(timeout)
        except TimeoutError:
            raise GetTimeoutError("Get timed out") from None

    monkeypatch.setattr(ray, "get", get)
    store = StoreClient(Frozen(), 1)
    for call in (
        lambda: store.ask(PolicyStore.status),
        lambda: store.call(PolicyStore.kl_coef, 1),
        lambda: store.wait(PolicyStore.trainer_state, 1e9),
    ):
        with pytest.raises(StoreTimeout, match=r"^\w+: the policy store gave no answer within 0 s; its process, or"):
            call()

    async def admitted() -> None:
        monkeypatch.setattr(client, "_result", lambda never: asyncio.sleep(1e6))
        await store.awaited(PolicyStore.admit, 0, 1e9)

    with pytest.raises(StoreTimeout, match="gave no answer"):
        asyncio.run(asyncio.wait_for(admitted(), 30.0))


def test_a_wait_goes_on_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([GetTimeoutError("late"), "status", GetTimeoutError("late"), "status", 7])

    def get(ref: Any, timeout: float) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    handle = SimpleNamespace(**dict.fromkeys(("trainer_state", "status"), SimpleNamespace(remote=lambda *args: None)))
    assert StoreClient(handle, 1).wait(PolicyStore.trainer_state, 1.0) == 7


KILLED = "ended: Ray's memory monitor killed it when node 10.0.0.7 used 22.51 GB of memory (limit 95.0% of 23.54 GB)"


def test_a_kill_of_the_memory_monitor_is_named() -> None:
    killed = OutOfMemoryError(MESSAGE)
    assert describe_failure(1, Health(killed)) == f"the process of train rank 1 {KILLED}"
    for error in (killed, wrapped(killed), RuntimeError(f"task\nTraceback ...\nray.exceptions.X: {MESSAGE}")):
        assert describe_failure(0, error) == sentence(error) == f"a process of the run {KILLED}"


def test_a_call_that_is_told_is_not_waited_for() -> None:
    told: list[Any] = []
    handle = SimpleNamespace(beat=SimpleNamespace(remote=lambda *args: told.append(args)))
    StoreClient(handle, 3).tell(PolicyStore.beat, "engine a:1")
    assert told == [(3, "engine a:1")]
