"""Settings of elastic engine pools, to which engines are added during a run (`rollout.min_engines`,
`rollout.max_engines`).

Ray Data adds an actor to a pool as long as all actors have as many chunks as they can take. In a strictly on-policy run
the next iteration's chunks would fill every engine while they wait for the update. So only admitted chunks reach the
engines of an elastic pool (`gate.py`), and the pool grows while these fill it. The pool does not shrink: every engine
is idle during an update, and starting an engine again costs more than keeping it. Rows do not depend on the number of
engines: requests are seeded by prompt and sample, and chunks keep their order.
"""

from ray.data import DataContext
from ray.data.context import AutoscalingConfig

STARTS = 3
"""Number of consecutive engines that may fail to start before the run ends, in an elastic pool; 0 in a fixed pool."""
FULL = 1.0
"""Utilisation of a pool (running chunks / chunks that its engines can take) from which on the pool grows."""
NEVER = -1.0


def set_autoscaling(context: DataContext, elastic: bool) -> None:
    """Set how Ray Data resizes the engine pool in the streams of `context`: it only grows, or has a fixed size."""
    context.max_consecutive_actor_init_deaths = STARTS if elastic else 0
    context.autoscaling_config = AutoscalingConfig()
    if elastic:
        context.autoscaling_config = AutoscalingConfig(
            actor_pool_util_upscaling_threshold=FULL, actor_pool_util_downscaling_threshold=NEVER
        )
