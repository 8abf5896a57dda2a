"""How the executor of a stream waits for its tasks."""

import inspect
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import ray
from ray.data import DataContext
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher, ThreadedMetadataFetcher
from ray.data._internal.execution.streaming_executor import StreamingExecutor

from pipeline.executor import PAUSE_S, AnswersAtOnce, _WaitsForTheFirst, answer_at_once


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Ray Data's module after an execution has begun, and as it was afterwards."""
    monkeypatch.setattr(streaming_executor_state, "ray", ray)
    monkeypatch.setattr(streaming_executor_state, "time", time)
    AnswersAtOnce().before_execution_starts(SimpleNamespace(_topology={}))
    return streaming_executor_state


def test_ray_data_waits_as_this_expects() -> None:
    source = inspect.getsource(streaming_executor_state.process_completed_tasks)
    assert source.count("ray.wait(") == 1 and "num_returns=len(active_tasks)" in source
    waiting = inspect.getsource(streaming_executor_state.OpState.get_output_blocking)
    assert inspect.getsource(streaming_executor_state).count("time.sleep(") == waiting.count("time.sleep(") == 1


def test_everything_but_waiting_is_rays(patched: ModuleType) -> None:
    assert patched.ray.get is ray.get and patched.ray.wait is not ray.wait
    assert patched.time.time is time.time and patched.time.sleep is not time.sleep


def test_blocks_are_not_described_by_a_thread(patched: ModuleType) -> None:
    executor = StreamingExecutor(DataContext())
    assert type(executor._metadata_fetcher) is ThreadedMetadataFetcher
    AnswersAtOnce().before_execution_starts(executor)
    assert type(executor._metadata_fetcher) is InlineMetadataFetcher


def test_the_context_names_it_once() -> None:
    context = DataContext()
    for _ in range(2):
        answer_at_once(context)
    assert context.custom_execution_callback_classes.count(AnswersAtOnce) == 1


def test_it_does_not_wait_where_a_block_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ray, "wait", lambda refs, *, timeout, **_: (asked.append(timeout), ([], refs))[1])
    ready, waiting = (SimpleNamespace(has_next=lambda answer=answer: answer) for answer in (True, False))
    for operators in ([waiting, ready], [waiting]):
        _WaitsForTheFirst(SimpleNamespace(_topology=operators)).wait([0], timeout=0.1)
    assert asked == [0, 0.1, 0]


@pytest.mark.parametrize(("blocked", "pauses"), [(0.0, [PAUSE_S]), (2 * PAUSE_S, [])])
def test_it_pauses_only_where_something_was_ready(
    monkeypatch: pytest.MonkeyPatch, blocked: float, pauses: list[float]
) -> None:
    clock, slept = iter([0.0, blocked]), []
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr("pipeline.executor.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=slept.append))
    _WaitsForTheFirst(SimpleNamespace(_topology=[])).wait([0], timeout=0.1)
    assert slept == pauses


def test_who_waits_for_rows_looks_after_each_step(patched: ModuleType) -> None:
    begun = time.monotonic()
    waiter = threading.Thread(target=patched.time.sleep, args=(30.0,))
    waiter.start()
    while waiter.is_alive() and time.monotonic() < begun + 20:
        AnswersAtOnce().on_execution_step(SimpleNamespace())
        waiter.join(0.01)
    assert not waiter.is_alive() and time.monotonic() - begun < 20
    patched.time.sleep(0.01)  # also ends without a step


@pytest.mark.ray
def test_it_comes_back_with_the_first_and_all_that_are_ready(patched: ModuleType, ray_session: None) -> None:
    @ray.remote(num_cpus=0)
    def sleep(seconds: float) -> None:
        time.sleep(seconds)

    ray.get(sleep.remote(0))  # the worker is there
    done, slow = ray.put(1), sleep.remote(3)
    begun = time.monotonic()
    ready, waiting = patched.ray.wait([slow, done], num_returns=2, fetch_local=False, timeout=2.0)
    assert time.monotonic() - begun < 1 and ready == [done] and waiting == [slow]
    assert patched.ray.wait([slow], num_returns=1, fetch_local=False, timeout=0.05) == ([], [slow])
