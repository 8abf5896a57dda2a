"""Engines that come and go during a run.

Ray Data holds a pool of actors between two sizes and would choose one by the tasks that actors have in hand. In a
strictly on-policy run these say little: the next iteration's chunks fill every engine while they wait for the update.
So admitted chunks alone reach the engines of an elastic pool (`Gate`), and the pool grows and shrinks with the time for
which the trainer waits for them (`Sizing`): the time for which engines have work and the trainer has no rows.

What is generated does not depend on how many engines there are: requests are seeded by prompt and sample, and chunks
keep their order. Groups that overtake others (`first_come.py`) do so within an engine.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from ray.data import DataContext
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.context import AutoscalingConfig

from pipeline.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from pipeline.rollout.stage import Policy

LOOK_S = 0.5
"""Seconds between two looks at the pool."""
WAITS = 2
"""Waits of the trainer that are measured before an engine is removed, however long that takes."""
STARTS = 3
"""Engines in a row that may fail to start before the run ends; of a pool of one size, none may."""
SETTINGS = "slipstream.elastic_engines"


class Gate:
    """Lets chunks pass when they are admitted, in their order."""

    def __init__(self, policy: "Policy"):
        self._policy = policy

    async def __call__(self, table: pa.Table) -> pa.Table:
        split, chunk, version = (table[name][0].as_py() for name in ("split", "chunk", "iteration"))
        await self._policy.admit(split, chunk, version)
        return table


@dataclass(frozen=True)
class Bounds:
    """What an elastic pool may be, all times in seconds."""

    fewest: int
    most: int
    scale_up_s: float
    scale_down_s: float


class Sizing:
    """How many engines to add or to remove, from looks at the pool."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._wait_began: float | None = None
        self._grow_from = 0.0
        self._lost_at: float | None = None
        self._window_from: float | None = None
        self._longest, self._waits = 0.0, 0

    def look(self, now: float, chunks: int, fed: bool, size: int, starting: int, restarting: int) -> int:
        """Engines to add, or if negative to remove.

        Args:
            now: time of the look.
            chunks: admitted chunks that are not done yet.
            fed: whether there are rows that the trainer has not taken: where engines generate ahead, it has enough.
            size: engines of the pool, those included that start.
            starting: engines that start, or wait for a place.
            restarting: engines that died and start again, or wait for a place.
        """
        bounds = self._bounds
        if restarting:
            # Their chunks wait for them, whatever the others do.
            self._begin_window(None)
            self._grow_from = now
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now - self._lost_at >= bounds.scale_down_s and size > bounds.fewest:
                self._lost_at = now
                return -1
            return 0
        self._lost_at = None
        if chunks:
            if self._wait_began is None:
                self._wait_began = self._grow_from = now
            if starting or fed:
                self._grow_from = now
            elif now - self._grow_from >= bounds.scale_up_s and size < bounds.most:
                self._grow_from = now
                self._begin_window(None)
                return min(size, bounds.most - size)
            return 0
        if self._wait_began is not None:
            self._longest = max(self._longest, now - self._wait_began)
            self._waits += 1
            self._wait_began = None
        if self._window_from is None:
            self._begin_window(now)
        elif now - self._window_from >= bounds.scale_down_s and self._waits >= WAITS:
            spare = size > bounds.fewest and self._longest * size < bounds.scale_up_s * (size - 1)
            self._begin_window(now)
            return -1 if spare else 0
        return 0

    def _begin_window(self, now: float | None) -> None:
        """Measure waits from `now` on; with None from the end of the wait that goes on."""
        self._window_from, self._longest, self._waits = now, 0.0, 0


class EngineScaler(ExecutionCallback):
    """Looks at the elastic pool at each step of Ray Data's loop and resizes it."""

    def __init__(self) -> None:
        self._sizing: Sizing | None = None
        self._next_look = 0.0

    def on_execution_step(self, executor: Any) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if self._sizing is None:
            self._sizing = Sizing(executor._data_context.get_config(SETTINGS))
        *_, last = executor._topology.values()
        fed = last.output_queue.num_blocks > 0
        for op, state in executor._topology.items():
            for pool in op.get_autoscaling_actor_pools():
                # The engines' pool is the only one of two sizes. When no chunk comes any more, Ray Data empties it.
                if pool.min_size() == pool.max_size() or op._inputs_complete:
                    continue
                chunks = pool.num_tasks_in_flight() + state.total_enqueued_input_blocks()
                counts = pool.current_size(), pool.num_pending_actors(), pool.num_restarting_actors()
                delta = self._sizing.look(now, chunks, fed, *counts)
                if delta > 0:
                    pool.scale(ActorPoolScalingRequest.upscale(delta=delta, reason="the trainer waits for rows"))
                elif delta < 0:
                    pool.scale(ActorPoolScalingRequest.downscale(delta=delta, reason="an engine is not needed"))


def watch(context: DataContext, rollout: RolloutConfig) -> None:
    """Have the streams of `context` resize an elastic pool of engines by what the trainer waits for."""
    others = [kind for kind in context.custom_execution_callback_classes if kind is not EngineScaler]
    context.custom_execution_callback_classes = [*others, *([EngineScaler] if rollout.elastic else [])]
    context.autoscaling_config = AutoscalingConfig()
    context.max_consecutive_actor_init_deaths = STARTS if rollout.elastic else 0
    if rollout.elastic:
        # Ray Data keeps the pool between its two sizes and leaves the rest to the scaler.
        context.autoscaling_config = AutoscalingConfig(
            actor_pool_util_upscaling_threshold=float("inf"), actor_pool_util_downscaling_threshold=-1.0
        )
        context.set_config(SETTINGS, Bounds(rollout.fewest, rollout.most, rollout.scale_up_s, rollout.scale_down_s))
