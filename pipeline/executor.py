"""Ray Data's loop looks as soon as something happens.

A stream's executor waits for its tasks in `ray.wait`, for all of them and a tenth of a second at most. Some task always
waits here, an engine for the next version or the prompt source for its turn, so each of the steps that a chunk takes
after its engine would cost that tenth. `AnswersAtOnce` has the executor wait for the first task instead, and not at all
where blocks are ready that come from no task. It also has it fetch the description of a finished block itself: the
thread that does so otherwise cannot end that wait, and the block would be handed on with the next one. Those who wait
for the stream's rows look for them after each step, not every hundredth of a second.

A quarter of a step went into counting what every operator uses, which Ray Data does several times in each, and into
gauges of it. Nothing here is held back by these numbers, so they are brought up to date now and then.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.data import DataContext
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.callbacks.resource_allocator_prometheus_callback import (
    ResourceAllocatorPrometheusCallback,
)
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher

PAUSE_S = 0.002
"""Before a look at what was ready already: what may not be taken yet must not keep a core busy."""
USAGES_S = 0.1
"""Between two counts of what operators use, which Ray Data ranks them by."""
GAUGES_S = 1.0
"""Between two reports of what operators use."""


class _WaitsForTheFirst:
    """The module `ray` with another `wait`, for one executor."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def wait(self, refs: list[Any], *, num_returns: int = 1, timeout: float | None = None, **more: Any) -> Any:
        # What a step has made ready without a task is handed on by the next one.
        if not any(operator.has_next() for operator in self._executor._topology):
            begun = time.monotonic()
            ray.wait(refs, num_returns=1, timeout=timeout, **more)
            if time.monotonic() - begun < PAUSE_S:
                time.sleep(PAUSE_S)
        return ray.wait(refs, num_returns=num_returns, timeout=0, **more)


class _SleepsForAStep:
    """The module `time` whose `sleep` ends with a step of the executor; in it sleeps who waits for rows."""

    def __init__(self) -> None:
        self._steps = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        with self._steps:
            self._steps.wait(seconds)

    def wake(self) -> None:
        with self._steps:
            self._steps.notify_all()


_CLOCK = _SleepsForAStep()


def _seldom(function: Callable[..., None], seconds: float) -> Callable[..., None]:
    """`function`, which does nothing if it ran less than so many seconds ago."""
    due = 0.0

    def call(*args: Any) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + seconds
            function(*args)

    return call


class AnswersAtOnce(ExecutionCallback):
    """Makes the loop of the process that executes a stream answer at once."""

    def before_execution_starts(self, executor: Any) -> None:
        streaming_executor_state.ray = _WaitsForTheFirst(executor)  # type: ignore[assignment]
        streaming_executor_state.time = _CLOCK  # type: ignore[assignment]
        for operator in executor._topology:
            # With a name of its own for this stream's log file, each task would set up its process's logging anew.
            operator.data_context.dataset_logger_id = None
        executor._metadata_fetcher = InlineMetadataFetcher()
        usages = executor._resource_manager
        usages.update_usages = _seldom(usages.update_usages, USAGES_S)
        executor.update_metrics = _seldom(executor.update_metrics, GAUGES_S)
        for callback in executor._callbacks:
            if isinstance(callback, ResourceAllocatorPrometheusCallback):
                callback.on_execution_step = _seldom(callback.on_execution_step, GAUGES_S)  # type: ignore[method-assign]

    def on_execution_step(self, executor: Any) -> None:
        # What a step has given to the split among the trainers comes out of it now, not with the next step.
        operator, state = executor._output_node
        while operator.has_next():
            state.add_output(operator.get_next())
        _CLOCK.wake()


def answer_at_once(context: DataContext) -> None:
    """Have the streams of `context` hand on what is done at once."""
    others = [kind for kind in context.custom_execution_callback_classes if kind is not AnswersAtOnce]
    context.custom_execution_callback_classes = [*others, AnswersAtOnce]
