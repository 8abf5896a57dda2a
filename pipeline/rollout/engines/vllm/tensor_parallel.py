"""Engines that split their model over several GPUs (`rollout.tensor_parallel_size`).

Such an engine is the actor of the rollout stage and, for each GPU, one worker that vLLM starts through Ray, all in
their own placement group on one node. The actor holds the CPUs of the first bundle and no GPU, each worker the GPU of
one bundle. A group ends with the process that executes the stream, so a stream that starts over finds its GPUs free; an
engine that is started again returns to its group.
"""

from functools import partial
from typing import Any

from pipeline.config import Config

ENV = {
    # vLLM's other Ray executor pickles arguments itself, and Ray then keeps every object whose ref is among them: all
    # published weights.
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0",
    # Ray would hide the node's GPUs from an actor that has none, and vLLM would find no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment variables of the actor."""


def bundles(num_cpus: float, gpus: int) -> list[dict[str, float]]:
    """Return the Ray resources of one engine, a bundle for each GPU; the first is for the actor and the first
    worker."""
    return [{"CPU": num_cpus, "GPU": 1.0}, *[{"GPU": 1.0}] * (gpus - 1)]


def actor_args(config: Config) -> dict[str, Any]:
    """Return the arguments of `map_batches` for a pool of engines that split their model: resources and placement."""
    rollout = config.rollout
    return {
        "num_cpus": rollout.num_cpus,
        "num_gpus": 0,
        "ray_remote_args_fn": partial(
            _in_a_group_of_its_own,
            bundles(rollout.num_cpus, rollout.tensor_parallel_size),
            config.trainer.placed("rollout"),
        ),
    }


def engine_args(gpus: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that split an engine over `gpus` GPUs."""
    return {"tensor_parallel_size": gpus, "distributed_executor_backend": "ray"} if gpus > 1 else {}


def _in_a_group_of_its_own(wanted: list[dict[str, float]], labels: dict[str, str] | None) -> dict[str, Any]:
    """Create a placement group and return Ray's arguments for one actor in it; called for every actor that is added."""
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where: dict[str, Any] = {"bundle_label_selector": [labels] * len(wanted)} if labels else {}
    group = placement_group(wanted, strategy="STRICT_PACK", **where)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    return {"scheduling_strategy": strategy}
