"""Engines that join during a run (`rollout.min_engines`, `rollout.max_engines`).

Ray Data adds an actor to a pool as long as its actors have as many chunks as they take. In a strictly on-policy run the
next iteration's chunks would fill every engine while they wait for the update. So only admitted chunks reach the
engines of an elastic pool (`gate.py`), and the pool grows while these fill it. It does not shrink: every engine is idle
during an update, and starting one again costs more than keeping it. Rows do not depend on the number of engines:
requests are seeded by prompt and sample, and chunks keep their order.
"""

from ray.data import DataContext
from ray.data.context import AutoscalingConfig

STARTS = 3
"""Consecutive engines of an elastic pool that may fail to start before the run ends; in a fixed pool none may."""
FULL = 1.0
"""A pool grows when its engines have this share of the chunks that they can take."""
NEVER = -1.0


def set_autoscaling(context: DataContext, elastic: bool) -> None:
    """Set how Ray Data resizes the engine pool of the streams of `context`."""
    context.max_consecutive_actor_init_deaths = STARTS if elastic else 0
    context.autoscaling_config = AutoscalingConfig()
    if elastic:
        context.autoscaling_config = AutoscalingConfig(
            actor_pool_util_upscaling_threshold=FULL, actor_pool_util_downscaling_threshold=NEVER
        )
