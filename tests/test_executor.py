"""How the executor of a stream waits for its tasks."""

import inspect
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import ray
from ray.data import DataContext
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.callbacks.resource_allocator_prometheus_callback import (
    ResourceAllocatorPrometheusCallback,
)
from ray.data._internal.execution.interfaces import PhysicalOperator
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher, ThreadedMetadataFetcher
from ray.data._internal.execution.streaming_executor import StreamingExecutor

from pipeline.executor import PAUSE_S, AnswersAtOnce, _seldom, _WaitsForTheFirst, answer_at_once


def counted() -> None:
    """What an executor counts and reports."""


def executor_of(*operators: SimpleNamespace) -> SimpleNamespace:
    """What the callback sees of an executor."""
    usages = SimpleNamespace(update_usages=counted)
    gauges = SimpleNamespace(_topology=operators, _callbacks=[ResourceAllocatorPrometheusCallback()])
    return SimpleNamespace(**vars(gauges), _resource_manager=usages, update_metrics=counted)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Ray Data's module after an execution has begun, and as it was afterwards."""
    monkeypatch.setattr(streaming_executor_state, "ray", ray)
    monkeypatch.setattr(streaming_executor_state, "time", time)
    AnswersAtOnce().before_execution_starts(executor_of())
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
    executor._topology, executor._resource_manager = {}, SimpleNamespace(update_usages=counted)
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
        AnswersAtOnce().on_execution_step(SimpleNamespace(_output_node=(SimpleNamespace(has_next=bool), None)))
        waiter.join(0.01)
    assert not waiter.is_alive() and time.monotonic() - begun < 20
    patched.time.sleep(0.01)  # also ends without a step


def test_what_is_counted_and_reported_is_so_now_and_then(patched: ModuleType) -> None:
    executor = executor_of()
    gauges = executor._callbacks[0].on_execution_step
    AnswersAtOnce().before_execution_starts(executor)
    for now in (executor._resource_manager.update_usages, executor.update_metrics):
        assert now is not counted
    assert executor._callbacks[0].on_execution_step != gauges
    # These are the names that the executor calls, in each step.
    loop = inspect.getsource(StreamingExecutor.run) + inspect.getsource(StreamingExecutor._scheduling_loop_step)
    assert "self.update_metrics(" in loop and "self._resource_manager.update_usages()" in loop
    assert "callback.on_execution_step(self)" in loop


def test_seldom_is_at_once_and_then_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = SimpleNamespace(now=100.0), []
    monkeypatch.setattr("pipeline.executor.time", SimpleNamespace(monotonic=lambda: clock.now))
    call = _seldom(called.append, 2.0)
    for now in (100.0, 101.9, 102.0, 103.0, 104.5):
        clock.now = now
        call(now)
    assert called == [100.0, 102.0, 104.5]


def test_tasks_leave_the_logging_of_their_process_alone(patched: ModuleType) -> None:
    """Ray Data sets it up anew for each task of a stream whose log file has a name, which the context tells tasks."""
    operators = [SimpleNamespace(data_context=DataContext(dataset_logger_id="stream")) for _ in range(2)]
    AnswersAtOnce().before_execution_starts(executor_of(*operators))
    assert [operator.data_context.dataset_logger_id for operator in operators] == [None, None]
    assert "dataset_logger_id" in inspect.getsource(DataContext._set_current)
    assert isinstance(PhysicalOperator.data_context, property)


def test_what_a_step_gives_to_the_last_stage_is_handed_out_with_it(patched: ModuleType) -> None:
    ready, out = [1, 2], []
    last = SimpleNamespace(has_next=lambda: bool(ready), get_next=lambda: ready.pop(0))
    AnswersAtOnce().on_execution_step(SimpleNamespace(_output_node=(last, SimpleNamespace(add_output=out.append))))
    assert out == [1, 2] and not ready


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
