"""The stream of an evaluation: the stages that a validation row passes in training, and no others.

    pages ─► prompts ─► rollout ─► [reward model] ─► reward ─► driver

What `pipeline/stream.py` says on blocks and order holds here too. A chunk's rows come to the driver as one block.
"""

from typing import Any

import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset

from pipeline.config import Config
from pipeline.evaluate.prompts import EvaluationPrompts, Pages
from pipeline.evaluate.rollout import EvaluationRollout
from pipeline.evaluate.settings import in_flight
from pipeline.reward.stage import Reward, SingleReward
from pipeline.scoring.reward_model import RewardModelScore
from pipeline.stages import uses_reward_model
from pipeline.stream import SOURCE_CPUS, engine_env, pool


def build(
    config: Config,
    pages: Pages,
    iteration: int,
    pace: Any,
    out: str,
    rollout_stage: type[EvaluationRollout] = EvaluationRollout,
) -> Dataset:
    """The stream of one evaluation.

    Args:
        config: what `settings.used` returned.
        pages: which chunks there are, and which of them are done.
        iteration: the policy version that is evaluated.
        pace: handle of `Pace`.
        out: where unusable prompts are set aside.
        rollout_stage: class of the rollout stage; tests put a stand-in here.
    """
    context = DataContext.get_current()
    context.target_max_block_size = None
    context.enable_progress_bars = False
    context.op_resource_reservation_enabled = False
    context.downstream_capacity_backpressure_ratio = None
    context.execution_options.preserve_order = True

    rollout, chunks = config.rollout, in_flight(config)
    engines = min(rollout.num_engines, max(1, pages.chunks - len(pages.done)))
    whole: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}

    stream = ray.data.range(pages.count, override_num_blocks=pages.count)
    stream = stream.map_batches(
        EvaluationPrompts,
        fn_constructor_args=(config, pages, iteration, pace, out),
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=1),
        num_cpus=SOURCE_CPUS,
        **whole,
    )
    stream = stream.repartition(target_num_rows_per_block=rollout.chunk_prompts, strict=True)
    stream = stream.map_batches(
        rollout_stage,
        fn_constructor_args=(config, iteration),
        compute=ActorPoolStrategy(
            size=engines, max_tasks_in_flight_per_actor=chunks, max_concurrent_calls_per_actor=chunks
        ),
        num_cpus=rollout.num_cpus,
        num_gpus=rollout.num_gpus,
        runtime_env={"env_vars": engine_env(config)},
        **whole,
    )
    if uses_reward_model(config):
        stream = stream.map_batches(
            RewardModelScore, fn_constructor_args=(config,), **pool(config.scoring.reward_model), **whole
        )
    longest = config.data.max_response_length
    if not config.reward.rate_limit.used:
        return stream.map_batches(Reward(config.reward, longest), num_cpus=config.reward.num_cpus, **whole)
    together = chunks * engines
    return stream.map_batches(
        SingleReward,
        fn_constructor_args=(config.reward, longest, together),
        compute=ActorPoolStrategy(
            size=1, max_tasks_in_flight_per_actor=together, max_concurrent_calls_per_actor=together
        ),
        num_cpus=SOURCE_CPUS,
        **whole,
    )
