"""The stream: all stages of the pipeline that a row passes, in order.

    pages ─► prompts ─► rollout ─► [reward model] ─► reward ─► [validation] ─►
                           ▲                                   (ends here)
                           │   [baseline ─► filter ─► reference ─► teachers ─► value ─► policy] ─► advantage ─►
                           │                                           ▲                  record ─►
                           └────────────── policy store ◄──────────────┴─────── train workers

A stage in brackets exists only if the settings need its output (`pipeline/derived.py`). In a replay, recorded rows
enter at the reward stages.

One streaming execution serves all iterations of an attempt, so engines start once and stay warm. Three rules:

- One block is one chunk. `batch_size=None` hands a stage whole blocks. A number would bundle several chunks into one
  task, and a strictly on-policy run would deadlock: the update would wait for a task that waits for the update. If a
  stage's output is not in chunks, `repartition(strict=True)` cuts it into chunks.
- A failed row stays, with its error and a `drop_reason`, so all blocks have the same size. Ray Data keeps their order
  and deals them to the train workers in turn, so each worker gets the same number of rows of every iteration. If
  dynamic sampling removes groups, the stream cuts the remaining rows into whole chunks again.
- Ray Data never splits blocks by size (`target_max_block_size=None`): the mean of a group needs all its rows at once.
"""

from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset

from pipeline.advantage.baseline import Baseline
from pipeline.advantage.stage import Advantage
from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.config import Config
from pipeline.config.scoring import ScorerConfig
from pipeline.derived import (
    reads_teacher,
    scorers,
    shards_teacher,
    teachers,
    uses_agent,
    uses_baselines,
    uses_critic,
    uses_engines,
    uses_filter,
    uses_images,
    uses_policy_scores,
    uses_reference,
    uses_reward_model,
    uses_turn_rewards,
)
from pipeline.dynamic_sampling.filter import Filter
from pipeline.dynamic_sampling.ledger import FilterRules
from pipeline.prompts.stage import Prompts, Schedule
from pipeline.replay.stage import Replay
from pipeline.reward.stage import Reward, SingleReward
from pipeline.rollout.elastic import set_autoscaling
from pipeline.rollout.engines.vllm import process, tensor_parallel
from pipeline.rollout.gate import Gate
from pipeline.rollout.policy_source import StorePolicy
from pipeline.rollout.stage import Rollout, sections
from pipeline.sampling import row_limits
from pipeline.scoring.policy import PolicyScore
from pipeline.scoring.reference import Reference
from pipeline.scoring.reward_model import RewardModelScore
from pipeline.scoring.served_teacher import ServedTeacher
from pipeline.scoring.teacher import Teacher
from pipeline.scoring.value import Value
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.teachers import TeacherRows
from pipeline.threads import compute_threads
from pipeline.track.trajectories import Record
from pipeline.track.validation import Validation
from pipeline.upstream.ray_waits import shorten_waits

SOURCE_CPUS = 0.1
"""Ray CPUs of an actor that mostly waits: the prompt source, the gate, the filter, rate-limited rewards."""
WHOLE: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
"""Arguments of `map_batches` for a stage that gets whole blocks."""


def build(
    config: Config,
    schedule: Schedule,
    store: Any,
    run_dir: str,
    rollout_stage: type[Rollout] = Rollout,
    hosts: Hosts = BESIDE_ENGINES,
) -> Dataset:
    """Build the stream of one attempt. Ray Train calls this again whenever its workers restart.

    Args:
        config: the run's configuration.
        schedule: the iterations and validations of the run.
        store: handle of the policy store.
        run_dir: folder for recorded trajectories.
        rollout_stage: class of the rollout stage; benchmarks pass a substitute.
        hosts: run the processes of episodes, and outlive the attempt.
    """
    # Ray Train calls this in its controller's process, which does not have the driver's `DataContext`.
    set_context()
    set_autoscaling(DataContext.get_current(), config.rollout.elastic)
    shorten_waits(DataContext.get_current())
    client = StoreClient(store, StoreClient(store).ask(PolicyStore.new_attempt))
    rollout, concurrent = config.rollout, max(2, schedule.chunks_per_iteration)
    placed, deadlines = config.trainer.placed, config.trainer.deadlines
    taught = reads_teacher(config) and not shards_teacher(config)
    advantage = Advantage(config.algorithm, client, deadlines.admission, uses_turn_rewards(config), taught)
    iteration_rows, chunk_rows = config.data.train_batch_size * rollout.n, schedule.chunk_prompts * rollout.n

    policy = StorePolicy(client, deadlines.admission)
    gate = several(concurrent) | {"num_cpus": SOURCE_CPUS, "label_selector": placed("prompts")}

    if uses_engines(config):
        args: tuple = (config.data, config.model, config.trainer, row_limits(config), schedule, client, run_dir)
        stream = source(schedule.pages, schedule.chunk_prompts, Prompts, args, config)
        if rollout.elastic:
            stream = stream.map_batches(Gate, fn_constructor_args=(policy,), **gate, **WHOLE)
        in_flight = rollout.in_flight(schedule.chunks_per_iteration, schedule.chunk_prompts)
        resources = engines(config, rollout.num_engines, in_flight, (rollout.fewest, rollout.most))
        args = (*sections(config), policy, hosts)
        stream = stream.map_batches(rollout_stage, fn_constructor_args=args, **resources, **WHOLE)
    else:
        kinds = uses_baselines(config), uses_agent(config), uses_images(config)
        args = (config.data, *kinds, schedule, client, deadlines)
        stream = source(schedule.pages, chunk_rows, Replay, args, config)
    stream = rewarded(stream, config, concurrent, client)
    # Ray Data fuses neighbouring stages of equal resources: after the engine a chunk costs one task, not four.
    light: dict[str, Any] = {"num_cpus": config.reward.num_cpus, "label_selector": placed("reward"), **WHOLE}
    if schedule.validation:
        stream = stream.map_batches(Validation(run_dir, client), **light)
    if uses_baselines(config):
        stream = stream.map_batches(Baseline(), **light)
    if uses_filter(config):
        # One chunk after the other, in order: the number of a group depends on the groups before it.
        one_actor = several(1) | {"num_cpus": SOURCE_CPUS, "label_selector": placed("prompts")}
        rules = FilterRules.of(config, schedule.iterations)
        args = (rules, client, deadlines.engine_start)
        stream = stream.map_batches(Filter, fn_constructor_args=args, **one_actor, **WHOLE)
        stream = stream.repartition(target_num_rows_per_block=chunk_rows, strict=True)
    longest, told = config.data.longest_row, (client, deadlines.admission)
    if uses_reference(config):
        stream = scored(stream, Reference, config, "reference", config.actor, rollout.temperature, longest, *told)
    for name, pool in teachers(config).items():
        served = pool.get("") or next(iter(pool.values()))
        args = (name, pool, TeacherRows.of(config.teacher), config.data, config.actor, rollout.temperature, longest)
        stream = scored(stream, ServedTeacher if served.url else Teacher, config, name, *args, *told)
    if uses_critic(config):
        stream = scored(stream, Value, config, "value", config.critic, client, deadlines, longest)
    if uses_policy_scores(config):
        args = (config.actor, rollout.temperature, client, deadlines, longest)
        stream = scored(stream, PolicyScore, config, "policy", *args)
    if config.algorithm.use_kl_in_reward and not uses_engines(config):
        # Recorded rows can arrive before their version, and so its KL coefficient, is published. Tasks that wait for it
        # would occupy the CPUs that the tasks of earlier rows need.
        stream = stream.map_batches(Gate, fn_constructor_args=(policy,), **gate, **WHOLE)
    if advantage.scope == "batch":
        stream = stream.repartition(target_num_rows_per_block=iteration_rows, strict=True)
    stream = stream.map_batches(advantage, **light)
    if advantage.scope == "batch":
        stream = stream.repartition(target_num_rows_per_block=chunk_rows, strict=True)
    return stream.map_batches(Record(run_dir), **light)


def source(pages: int, chunk_rows: int, stage: type, args: tuple, config: Config) -> Dataset:
    """Return the first stage of the stream: a single actor makes the rows of one page after the other, which are cut
    into chunks.

    The input of the actor has one block per page; the column `id` holds the number of the page, from 0.

    Args:
        pages: number of pages.
        chunk_rows: number of rows in a chunk.
        stage: class of the actor.
        args: arguments of the constructor of `stage`.
        config: settings of the run.
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
    """Configure Ray Data for the stream: a block is a chunk, and only the policy store limits the pace."""
    context = DataContext.get_current()
    context.target_max_block_size = None
    context.enable_progress_bars = False
    # Ray Data would reserve CPUs for the first stages first, and a stage without CPUs would get some when an earlier
    # stage ends. Here no stage ends before the run does. The policy store paces the stream instead.
    context.op_resource_reservation_enabled = False
    # Without reservations Ray Data would pause a stage as soon as finished blocks pile up before the train workers.
    # These take no block until the whole iteration is complete, so both sides would wait forever.
    context.downstream_capacity_backpressure_ratio = None
    context.execution_options.preserve_order = True
    # The thread that polls a task's memory would add milliseconds to each short task.
    context.memory_usage_poll_interval_s = None


def rewarded(stream: Dataset, config: Config, concurrent: int, store: StoreClient | None = None) -> Dataset:
    """Return `stream` with the stages that score responses.

    Args:
        stream: whole chunks, as the rollout stage returns them.
        config: settings of the run.
        concurrent: number of chunks that the single reward actor scores at the same time, if `reward.rate_limit` is
            set.
        store: client of the policy store; None in an evaluation.
    """
    if uses_reward_model(config):
        model = config.actor.fsdp, config.reward.model.path, config.data.longest_row
        told = store, config.trainer.deadlines.admission
        stream = scored(stream, RewardModelScore, config, "reward_model", *model, *told)
    reward, longest, scored_by = config.reward, config.data.max_response_length, config.agent.scored_by_name()
    where: dict[str, Any] = {"label_selector": config.trainer.placed("reward")}
    if not reward.rate_limit.used:
        return stream.map_batches(Reward(reward, longest, scored_by), num_cpus=reward.num_cpus, **where, **WHOLE)
    # One actor counts calls against the limit, so it makes all of them, for several chunks at the same time.
    args = (reward, longest, scored_by, concurrent)
    return stream.map_batches(
        SingleReward, fn_constructor_args=args, num_cpus=SOURCE_CPUS, **several(concurrent), **where, **WHOLE
    )


def several(chunks: int, size: int = 1, between: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return arguments of `map_batches` for a pool of asynchronous actors.

    Args:
        chunks: number of chunks that an actor works on at the same time.
        size: number of actors; in an elastic pool, the number at the start.
        between: (minimum, maximum) number of actors of an elastic pool; None for a fixed number.
    """
    # The first limit would only lengthen the actor's queue; the second lets an actor work on all of them at once.
    tasks: dict[str, Any] = {"max_tasks_in_flight_per_actor": chunks, "max_concurrent_calls_per_actor": chunks}
    fewest, most = between or (size, size)
    return {"compute": ActorPoolStrategy(min_size=fewest, max_size=most, initial_size=size, **tasks)}


def engines(config: Config, size: int, chunks: int, between: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return arguments of `map_batches` for the rollout stage.

    Args:
        config: settings of the run.
        size: number of engines; in an elastic pool, the number at the start.
        chunks: number of chunks that an engine works on at the same time.
        between: (minimum, maximum) number of engines of an elastic pool; None for a fixed number.
    """
    rollout = config.rollout
    resources: dict[str, Any] = {"num_cpus": rollout.num_cpus, "num_gpus": rollout.num_gpus}
    resources["label_selector"] = config.trainer.placed("rollout")
    if rollout.tensor_parallel_size > 1:
        resources = tensor_parallel.actor_args(config)
    return several(chunks, size, between) | resources | {"runtime_env": {"env_vars": engine_env(config)}}


def scored(stream: Dataset, stage: type, config: Config, name: str, *args: Any) -> Dataset:
    """Return `stream` with a scoring stage added.

    A replica scores one chunk after the other. Its number of compute threads is set here; Ray would set it to 1.

    Args:
        stream: whole chunks.
        stage: class of the replicas; the constructor gets the section `model`, the pool's settings, and then `args`.
        config: settings of the run.
        name: name of the pool, a key of `derived.scorers`.
        args: further arguments of the constructor.
    """
    scorer: ScorerConfig = scorers(config)[name]
    threads = compute_threads(scorer.num_threads, scorer.num_cpus)
    return stream.map_batches(
        stage,
        fn_constructor_args=(config.model, scorer, *args),
        # A second chunk waits in the replica's queue while the first is scored.
        compute=ActorPoolStrategy(size=scorer.num_workers, max_tasks_in_flight_per_actor=2),
        num_cpus=scorer.num_cpus,
        num_gpus=scorer.num_gpus,
        label_selector=config.trainer.placed(name.partition(".")[0]),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        **WHOLE,
    )


def engine_env(config: Config) -> dict[str, str]:
    """Return the environment variables of an engine's process, such as its number of compute threads (Ray would set
    1)."""
    threads = compute_threads(config.rollout.num_threads, config.rollout.num_cpus)
    env = {"OMP_NUM_THREADS": str(threads)}
    return env | process.environment(config.rollout) if config.rollout.name == "vllm" else env
