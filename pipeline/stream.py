"""The stream: every stage a row passes, in order.

    pages ─► prompts ─► rollout ─► [reward model] ─► reward ─► [validation] ─►
                           ▲                                   (ends here)
                           │   [baseline ─► filter ─► reference ─► value ─► policy] ─► advantage ─► record ─►
                           │                               ▲
                           └──────── policy store ◄────────┴─────── train workers

Stages in brackets exist only where something reads what they write (`pipeline/derived.py`). In a replay, recorded rows
enter at the reward stages.

One streaming execution serves the whole run, so engines start once and stay warm. Three rules keep it exact:

- A block is a chunk. `batch_size=None` hands a stage whole blocks (a number would bundle several into one task, and a
  strictly on-policy run would wait for a chunk that waits for it), and `repartition(strict=True)` cuts them exactly
  where a stage's input is not a chunk.
- A failed row stays, with its error and a reason why it does not train. Equal blocks in a kept order are dealt to the
  train workers in turn, so each gets the same number of rows of every iteration. Where dynamic sampling takes groups
  out, the rows behind it are cut into whole chunks again.
- Blocks are never shaped by size (`target_max_block_size=None`): a group that is split over two blocks has no mean.
"""

from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset

from pipeline.advantage.baseline import Baseline
from pipeline.advantage.stage import Advantage
from pipeline.config import Config
from pipeline.config.scoring import ScorerConfig
from pipeline.derived import (
    uses_baselines,
    uses_critic,
    uses_engines,
    uses_filter,
    uses_policy_scores,
    uses_reference,
    uses_reward_model,
)
from pipeline.dynamic_sampling.filter import Filter
from pipeline.dynamic_sampling.ledger import FilterRules
from pipeline.executor import shorten_waits
from pipeline.prompts.stage import Prompts, Schedule
from pipeline.replay.stage import Replay
from pipeline.reward.stage import Reward, SingleReward
from pipeline.rollout import tensor_parallel
from pipeline.rollout.elastic import Gate, set_autoscaling
from pipeline.rollout.policy_source import StorePolicy
from pipeline.rollout.stage import Rollout, sections
from pipeline.sampling import row_limits
from pipeline.scoring.policy import PolicyScore
from pipeline.scoring.reference import Reference
from pipeline.scoring.reward_model import RewardModelScore
from pipeline.scoring.value import Value
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.threads import compute_threads
from pipeline.track.trajectories import Record
from pipeline.track.validation import Validation

SOURCE_CPUS = 0.1
"""Ray CPUs of the prompt source and of rate-limited rewards, which mostly wait."""
WHOLE: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
"""A stage is handed whole blocks."""


def build(
    config: Config, schedule: Schedule, store: Any, run_dir: str, rollout_stage: type[Rollout] = Rollout
) -> Dataset:
    """The stream of one attempt. Ray Train calls this again whenever its workers restart.

    Args:
        config: the run's configuration.
        schedule: which iterations and validations there are.
        store: handle of the policy store.
        run_dir: where trajectories are recorded.
        rollout_stage: class of the rollout stage; benchmarks put a stand-in here.
    """
    # Ray Train builds the stream in its controller, which the driver's context does not reach.
    set_context()
    set_autoscaling(DataContext.get_current(), config.rollout.elastic)
    shorten_waits(DataContext.get_current())
    client = StoreClient(store, StoreClient(store).ask(PolicyStore.new_attempt))
    rollout, together = config.rollout, max(2, schedule.chunks_per_iteration)
    placed, deadlines = config.trainer.placed, config.trainer.deadlines
    advantage = Advantage(config.algorithm, client, deadlines.admission)
    iteration_rows, chunk_rows = config.data.train_batch_size * rollout.n, schedule.chunk_prompts * rollout.n

    policy = StorePolicy(client, deadlines.admission)
    gate = several(together) | {"num_cpus": SOURCE_CPUS, "label_selector": placed("prompts")}

    if uses_engines(config):
        args: tuple = (config.data, config.model, config.trainer, row_limits(config), schedule, client, run_dir)
        stream = source(schedule.pages, schedule.chunk_prompts, Prompts, args, config)
        if rollout.elastic:
            stream = stream.map_batches(Gate, fn_constructor_args=(policy,), **gate, **WHOLE)
        in_flight = rollout.in_flight(schedule.chunks_per_iteration)
        resources = engines(config, rollout.num_engines, in_flight, (rollout.fewest, rollout.most))
        args = (*sections(config), policy)
        stream = stream.map_batches(rollout_stage, fn_constructor_args=args, **resources, **WHOLE)
    else:
        args = (config.data, uses_baselines(config), schedule, client, deadlines)
        stream = source(schedule.pages, chunk_rows, Replay, args, config)
    stream = rewarded(stream, config, together)
    # Equal resources let Ray run neighbours as one task: a chunk then costs one task after its engine, not four.
    light: dict[str, Any] = {"num_cpus": config.reward.num_cpus, "label_selector": placed("reward"), **WHOLE}
    if schedule.validation:
        stream = stream.map_batches(Validation(run_dir, client), **light)
    if uses_baselines(config):
        stream = stream.map_batches(Baseline(), **light)
    if uses_filter(config):
        # One after the other, as they come: the number of a group depends on those before it.
        alone = several(1) | {"num_cpus": SOURCE_CPUS, "label_selector": placed("prompts")}
        rules = FilterRules.of(config, schedule.iterations)
        args = (rules, client, deadlines.engine_start)
        stream = stream.map_batches(Filter, fn_constructor_args=args, **alone, **WHOLE)
        stream = stream.repartition(target_num_rows_per_block=chunk_rows, strict=True)
    if uses_reference(config):
        stream = scored(stream, Reference, config, "reference", config.actor, rollout.temperature)
    if uses_critic(config):
        stream = scored(stream, Value, config, "value", config.critic, client, deadlines)
    if uses_policy_scores(config):
        args = (config.actor, rollout.temperature, client, deadlines)
        stream = scored(stream, PolicyScore, config, "policy", *args)
    if config.algorithm.use_kl_in_reward and not uses_engines(config):
        # Recorded rows come before the KL coefficient of their version is there. Tasks that wait for it would keep the
        # CPUs from those that bring earlier rows to the train workers.
        stream = stream.map_batches(Gate, fn_constructor_args=(policy,), **gate, **WHOLE)
    if advantage.scope == "batch":
        stream = stream.repartition(target_num_rows_per_block=iteration_rows, strict=True)
    stream = stream.map_batches(advantage, **light)
    if advantage.scope == "batch":
        stream = stream.repartition(target_num_rows_per_block=chunk_rows, strict=True)
    return stream.map_batches(Record(run_dir), **light)


def source(pages: int, chunk_rows: int, stage: type, args: tuple, config: Config) -> Dataset:
    """Chunks of `chunk_rows` rows, made by one actor of class `stage`, which is handed one page number after the other.

    A page is a block whose column `id` holds its number, from 0. No task makes these blocks.
    """
    numbers = ray.data.from_blocks([pa.table({"id": [page]}) for page in range(pages)])
    made = numbers.map_batches(
        stage,
        fn_constructor_args=args,
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=1),
        num_cpus=SOURCE_CPUS,
        label_selector=config.trainer.placed("prompts"),
        **WHOLE,
    )
    return made.repartition(target_num_rows_per_block=chunk_rows, strict=True)


def set_context() -> None:
    """Ray Data's rules for a stream whose blocks are chunks and that is not held back but by what it waits for."""
    context = DataContext.get_current()
    context.target_max_block_size = None
    context.enable_progress_bars = False
    # Ray Data would set CPUs aside stage by stage, the first stages first, and trust that a stage left without any gets
    # them when earlier ones end: here none ends before the run does. The policy store paces the stream instead.
    context.op_resource_reservation_enabled = False
    # Without those shares Ray Data would hold a stage back as soon as finished blocks pile up before the train workers,
    # who take none until the whole iteration is there: both sides would wait for ever.
    context.downstream_capacity_backpressure_ratio = None
    context.execution_options.preserve_order = True
    # A thread that looks at a task's memory costs a short task milliseconds.
    context.memory_usage_poll_interval_s = None


def rewarded(stream: Dataset, config: Config, together: int) -> Dataset:
    """`stream` with the stages that score responses.

    Args:
        stream: rows of whole chunks as the rollout stage leaves them.
        config: the run's configuration.
        together: chunks that are scored at the same time where calls are counted.
    """
    if uses_reward_model(config):
        judge = config.reward.model.path
        stream = scored(stream, RewardModelScore, config, "reward_model", config.actor.fsdp, judge)
    reward, longest = config.reward, config.data.max_response_length
    where: dict[str, Any] = {"label_selector": config.trainer.placed("reward")}
    if not reward.rate_limit.used:
        return stream.map_batches(Reward(reward, longest), num_cpus=reward.num_cpus, **where, **WHOLE)
    # Calls are counted where they are made, so they are made in one place, for several chunks at a time.
    args = (reward, longest, together)
    return stream.map_batches(
        SingleReward, fn_constructor_args=args, num_cpus=SOURCE_CPUS, **several(together), **where, **WHOLE
    )


def several(chunks: int, size: int = 1, between: tuple[int, int] | None = None) -> dict[str, Any]:
    """A pool of `size` asynchronous actors, each of which works on `chunks` chunks at a time.

    Args:
        chunks: of an actor at a time.
        size: actors; of a pool that changes, those at the start.
        between: smallest and largest size of a pool that changes.
    """
    # Equal numbers: tasks in flight alone would wait in the actor's queue, one behind the other.
    tasks: dict[str, Any] = {"max_tasks_in_flight_per_actor": chunks, "max_concurrent_calls_per_actor": chunks}
    fewest, most = between or (size, size)
    return {"compute": ActorPoolStrategy(min_size=fewest, max_size=most, initial_size=size, **tasks)}


def engines(config: Config, size: int, chunks: int, between: tuple[int, int] | None = None) -> dict[str, Any]:
    """Resources of the rollout stage: `size` engines with `chunks` chunks in flight in each, or a number of them that
    changes `between` two."""
    rollout = config.rollout
    gives: dict[str, Any] = {"num_cpus": rollout.num_cpus, "num_gpus": rollout.num_gpus}
    gives["label_selector"] = config.trainer.placed("rollout")
    if rollout.tensor_parallel_size > 1:
        gives = tensor_parallel.actor_args(config)
    return several(chunks, size, between) | gives | {"runtime_env": {"env_vars": engine_env(config)}}


def scored(stream: Dataset, stage: type, config: Config, name: str, *args: Any) -> Dataset:
    """`stream` with the stage of the pool `scoring.<name>`, which gets the model, that section and `args`.

    Each replica takes one chunk at a time, and has threads where Ray gives it one.
    """
    scorer: ScorerConfig = getattr(config.scoring, name)
    threads = compute_threads(scorer.num_threads, scorer.num_cpus)
    return stream.map_batches(
        stage,
        fn_constructor_args=(config.model, scorer, *args),
        # A second chunk waits in the replica's queue while the first is scored.
        compute=ActorPoolStrategy(size=scorer.num_workers, max_tasks_in_flight_per_actor=2),
        num_cpus=scorer.num_cpus,
        num_gpus=scorer.num_gpus,
        label_selector=config.trainer.placed(name),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        **WHOLE,
    )


def engine_env(config: Config) -> dict[str, str]:
    """Environment of an engine's process. Ray would give it one compute thread."""
    threads = compute_threads(config.rollout.num_threads, config.rollout.num_cpus)
    env = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    if config.rollout.tensor_parallel_size > 1:
        env |= tensor_parallel.ENV
    if config.rollout.num_gpus == 0 and config.rollout.enforce_eager:
        # vLLM compiles one function of its sampler even then: seconds of the first generation, and a C++ compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env
