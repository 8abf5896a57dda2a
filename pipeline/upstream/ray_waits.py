"""Lets Ray Data's loop check for finished tasks every 5 to 50 ms, instead of every 100 ms.

The loop calls `ray.wait` on all of its tasks, with a timeout of 100 ms. In this stream some task always waits, for a
policy version or for its turn, so every step of a chunk would take 100 ms. Each check costs about 1 ms of CPU, which
engines and trainer need on a small machine. So the timeout is short while blocks move from stage to stage, and grows
while none moves. Ray Data (2.60) has no setting for the timeout, only the constant `WAIT_FOR_TASK_COMPLETION_TIMEOUT_S`
in ray/data/_internal/execution/streaming_executor_state.py: https://github.com/ray-project/ray/issues/42377. If another
version of Ray lacks the constant, a warning is printed once, and the stream runs as slowly as by default.

This also needs the environment variable `RAY_DATA_METADATA_PREFETCH_ON_THREAD=0` (`pipeline/run/cluster.py`). Otherwise
a thread fetches the description of a finished block. The thread cannot end a `ray.wait`, so the block would move on
only after the next one.
"""

import sys
from typing import Any

from ray.data import DataContext

SHORTEST_S, LONGEST_S, GROWTH = 0.005, 0.05, 1.25
CONSTANT = "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S"

try:
    from ray.data._internal.execution import streaming_executor_state
    from ray.data._internal.execution.execution_callback import ExecutionCallback
except ImportError:
    streaming_executor_state, ExecutionCallback = None, object  # type: ignore[assignment, misc]


class ShortWaits(ExecutionCallback):
    """Callback of Ray Data that sets the timeout of the loop, in the process that runs it."""

    def __init__(self) -> None:
        self._moved = 0
        """Number of blocks that have left a stage so far, summed over all stages."""

    def before_execution_starts(self, executor: Any) -> None:
        setattr(streaming_executor_state, CONSTANT, SHORTEST_S)

    def on_execution_step(self, executor: Any) -> None:
        # If Ray calls its stages otherwise, no block is seen to move, and the timeout is the longest.
        stages = getattr(executor, "_topology", None) or ()
        before, self._moved = self._moved, sum(stage.metrics.num_outputs_taken for stage in stages)
        longer = min(GROWTH * getattr(streaming_executor_state, CONSTANT), LONGEST_S)
        setattr(streaming_executor_state, CONSTANT, longer if self._moved == before else SHORTEST_S)


def shorten_waits(context: DataContext) -> None:
    """Let Ray Data's streams with this `context` check for finished tasks more often."""
    callbacks = getattr(context, "custom_execution_callback_classes", None)
    if callbacks is None or not hasattr(streaming_executor_state, CONSTANT):
        print(f"this version of Ray Data has no {CONSTANT}: each iteration takes about 0.5 s longer", file=sys.stderr)
    elif ShortWaits not in callbacks:
        context.custom_execution_callback_classes = [*callbacks, ShortWaits]
