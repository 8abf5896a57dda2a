"""The stream of an evaluation: the stages that a validation row passes in training, and no others.

    pages ─► prompts ─► rollout ─► [reward model] ─► reward ─► driver

What `pipeline/stream.py` says on blocks and order holds here too. A chunk's rows come to the driver as one block.
"""

from typing import Any

from ray.data import ActorPoolStrategy, Dataset

from pipeline.config import Config
from pipeline.evaluate.prompts import EvaluationPrompts, Pages
from pipeline.evaluate.rollout import EvaluationRollout
from pipeline.evaluate.settings import in_flight
from pipeline.stream import SOURCE_CPUS, WHOLE, engines, numbered, rewarded, set_context


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
    set_context()
    rollout, chunks = config.rollout, in_flight(config)
    size = min(rollout.num_engines, max(1, pages.chunks - len(pages.done)))
    stream = numbered(pages.count)
    stream = stream.map_batches(
        EvaluationPrompts,
        fn_constructor_args=(config, pages, iteration, pace, out),
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=1),
        num_cpus=SOURCE_CPUS,
        **WHOLE,
    )
    stream = stream.repartition(target_num_rows_per_block=rollout.chunk_prompts, strict=True)
    args = (config, iteration)
    stream = stream.map_batches(rollout_stage, fn_constructor_args=args, **engines(config, size, chunks), **WHOLE)
    return rewarded(stream, config, chunks * size)
