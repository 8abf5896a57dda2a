"""Ray Data's loop looks for finished tasks every 5 to 50 ms, not every 100 ms.

The loop calls `ray.wait` for all of its tasks with a timeout of a tenth of a second. In this stream some task always
waits, for a policy version or for its turn, so every step of a chunk would cost that tenth. Each look takes about 1 ms
of CPU, which engines and trainer lack on a small machine: the timeout is short while blocks move from stage to stage,
and grows while none does. Ray Data (2.60) has no setting for it, only the constant `WAIT_FOR_TASK_COMPLETION_TIMEOUT_S`
of ray/data/_internal/execution/streaming_executor_state.py: https://github.com/ray-project/ray/issues/42377. If another
version of Ray lacks it, a warning is printed once and the stream runs at stock speed.

The second half is the environment variable `RAY_DATA_METADATA_PREFETCH_ON_THREAD=0` (`pipeline/run/cluster.py`).
Without it a thread fetches the description of a finished block; it cannot end that wait, so the block would leave with
the next one.
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
    """Callback that sets the timeout in the process that executes the stream."""

    def __init__(self) -> None:
        self._moved = 0
        """Blocks that have left a stage, of all stages."""

    def before_execution_starts(self, executor: Any) -> None:
        setattr(streaming_executor_state, CONSTANT, SHORTEST_S)

    def on_execution_step(self, executor: Any) -> None:
        # If Ray calls its stages otherwise, no block is seen to move, and the timeout is the longest.
        stages = getattr(executor, "_topology", None) or ()
        before, self._moved = self._moved, sum(stage.metrics.num_outputs_taken for stage in stages)
        longer = min(GROWTH * getattr(streaming_executor_state, CONSTANT), LONGEST_S)
        setattr(streaming_executor_state, CONSTANT, longer if self._moved == before else SHORTEST_S)


def shorten_waits(context: DataContext) -> None:
    """Make the streams of `context` check for finished tasks more often."""
    callbacks = getattr(context, "custom_execution_callback_classes", None)
    if callbacks is None or not hasattr(streaming_executor_state, CONSTANT):
        print(f"this version of Ray Data has no {CONSTANT}: each iteration takes about 0.5 s longer", file=sys.stderr)
    elif ShortWaits not in callbacks:
        context.custom_execution_callback_classes = [*callbacks, ShortWaits]
