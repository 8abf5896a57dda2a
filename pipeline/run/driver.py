"""The driver: starts all parts of a run in order, waits for the end, and returns how the run ended.

    check all that can be checked ─► Ray ─► policy store ─► TorchTrainer (train loop + stream) ─► RunMonitor ─► summary

Training runs in a thread; the main thread reads the run's events and the signals that stop it. At the first signal the
current iteration ends and is saved, then the run stops; the second signal ends the run at once.
"""

import itertools
import os
import threading
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline import stream
from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.config import Config, save_yaml
from pipeline.derived import chunk_prompts, uses_engines, uses_filter
from pipeline.plan.plan import Plan
from pipeline.prompts.stage import Schedule
from pipeline.run import cluster
from pipeline.run.begin import gone
from pipeline.run.checkpoint_keeper import CheckpointKeeper
from pipeline.run.faults import Restarts, sentence
from pipeline.run.memory_kills import MemoryKills
from pipeline.run.monitor import RunMonitor
from pipeline.storage import checkpoints
from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.fingerprints import Fingerprints
from pipeline.store.admission import Admission
from pipeline.store.client import StoreClient
from pipeline.store.events import TrainingEnded, milliseconds
from pipeline.store.policy_store import PolicyStore
from pipeline.track.history import read_history
from pipeline.track.tracker import Tracker
from pipeline.track.trajectories import read_trajectories
from pipeline.train import ranks
from pipeline.train.entry import train_loop
from pipeline.train.loop_settings import LoopSettings
from pipeline.upstream import apart
from pipeline.upstream.ray_memory import killed, own_job


@dataclass
class RunResult:
    """How a run ended: `status` is `finished`, `interrupted` or `failed`; `error` is the reason for a failure."""

    status: str
    error: str | None = None
    ray_gone: bool = False
    """True if Ray ended before the run did."""
    restarted: dict[str, str] = field(default_factory=dict)
    """Lines of the summary on processes that ended for lack of memory, by label."""


def start_ray(config: Config) -> bool:
    """Join or start Ray; returns False if this process was using Ray already."""
    trainer = config.trainer
    return cluster.start(trainer.ray_num_cpus, trainer.object_store_gb, trainer.env_vars)


def what_remains(place: str) -> str:
    """Describe how to continue a run that was cut off; `place` is the folder or URL of its checkpoints."""
    try:
        saved = checkpoints.newest(place)
    except (OSError, ValueError) as error:
        return f"Which checkpoint remains cannot be read ({error}); the same command continues from the newest one"
    if saved is None:
        return "No checkpoint was saved; the same command begins again"
    return f"The newest checkpoint is {saved.place}; the same command continues from it"


def run(
    config: Config,
    plan: Plan,
    tracker: Tracker,
    run_dir: Path,
    kept: Fingerprints,
    policy: str | None = None,
    lost: Callable[[], str | None] = lambda: None,
) -> RunResult:
    """Train as `config` defines. Ray must be running, and everything must have been checked.

    Args:
        config: the resolved configuration; also written to the run's folder.
        plan: plan of the run, with the number of iterations.
        tracker: receives the metrics; the caller starts and finishes it.
        run_dir: the run's folder.
        kept: fingerprints of the files that the run reads, to be written to the run's folder.
        policy: folder or URL of another run's checkpoint, from which a new run takes the weights; None begins with the
            model.
        lost: returns the reason if this process may not write into the run's folder any more, else None.
    """
    assert plan.iterations is not None
    trainer, deadlines = config.trainer, config.trainer.deadlines
    save_yaml(config, run_dir / "config.yaml")
    kept.save(run_dir)
    schedule = Schedule.of(config, plan.iterations)
    admission = Admission(
        chunk_prompts(config),
        config.data.train_batch_size,
        config.algorithm.max_staleness,
        plan.iterations if uses_filter(config) else None,
    )
    # A soft affinity does not hold an actor that needs no CPU: Ray 2.60 places it on any node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    store: Any = (
        ray.remote(PolicyStore)
        # Many chunks wait inside the store at the same time, each in its own call. It is on the driver's node, which
        # the run needs anyway. Calls are not repeated: a new store lacks the state of the old one.
        .options(num_cpus=0, max_concurrency=10_000, max_restarts=-1, max_task_retries=0, scheduling_strategy=here)
        .remote(admission, milliseconds)
    )

    hosts = Hosts.start(config.agent, trainer) if uses_engines(config) else BESIDE_ENGINES

    def rollouts() -> ray.data.Dataset:
        StoreClient(store).wait_until_ready(deadlines.store)
        return stream.build(config, schedule, store, str(run_dir), hosts=hosts)

    with warnings.catch_warnings():
        # Ray's own default sets an option that Ray deprecates.
        warnings.simplefilter("ignore")
        options = DataConfig.default_ingest_options()
    options.preserve_order = True
    # Ray Train's own collectives have no deadline otherwise.
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = str(deadlines.collective)
    place = checkpoints.root(trainer, run_dir)
    filesystem, root = filesystem_of(place)

    def prepare() -> TorchTrainer:
        # Ray Train's own list of checkpoints is for restarts by one controller. For another controller the files
        # themselves show which checkpoints are whole; the list may be incomplete, or name deleted checkpoints.
        checkpoints.forget_list(place)
        return TorchTrainer(
            train_loop,  # type: ignore[arg-type]
            train_loop_config={
                "settings": LoopSettings(config, schedule, store, str(run_dir), uuid.uuid4().hex, policy)
            },
            datasets={"rollouts": rollouts},
            dataset_config=DataConfig(execution_options=options),
            torch_config=TorchConfig(ranks.backend(trainer.use_gpu), timeout_s=round(deadlines.collective)),
            scaling_config=ScalingConfig(
                num_workers=trainer.num_workers,
                use_gpu=trainer.use_gpu,
                resources_per_worker={"CPU": trainer.cpus_per_worker, "GPU": trainer.gpus},
                # mypy knows the classes of the first Ray Train.
                label_selector=trainer.placed("train"),  # type: ignore[call-arg]
            ),
            run_config=RunConfig(
                name=checkpoints.FOLDER,
                storage_path=root,
                storage_filesystem=filesystem,
                # `Restarts` counts failures, and ends a run that would only fail again.
                failure_config=FailureConfig(max_failures=-1),
                callbacks=[Restarts(StoreClient(store), trainer.max_failures)],  # type: ignore[list-item]
            ),
        )

    failure: list[BaseException] = []
    ends: list[TrainingEnded] = []
    over = threading.Event()

    def fit(torch_trainer: TorchTrainer) -> None:
        try:
            for attempt in itertools.count(1):
                try:
                    ends.append(torch_trainer.fit().return_value)  # type: ignore[attr-defined]
                    return
                except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
                    # Ray Train's controller died, and its workers with it.
                    if over.is_set() or 0 <= trainer.max_failures < attempt:
                        raise
                store.report_failure.remote("Ray Train's controller died")
                cluster.release_placement_groups()
                torch_trainer = prepare()
        except BaseException as error:  # noqa: BLE001 (handed to the main thread)
            failure.append(error)

    kills = MemoryKills(partial(killed, own_job()))

    def ended(status: str, error: str | None = None, ray_gone: bool = False) -> RunResult:
        return RunResult(status, error, ray_gone, kills.summary())

    thread = threading.Thread(target=fit, args=(prepare(),), name="fit", daemon=True)
    thread.start()
    engines = f"the engines ({config.rollout.name}) and " if uses_engines(config) else ""
    tracker.status(f"starting {engines}the train workers")
    keeper = CheckpointKeeper(run_dir, trainer.max_ckpt_to_keep, trainer.best_metric, trainer.best_metric_mode, place)
    for record in read_history(tracker.metrics_path):
        keeper.record(record["iteration"], record)
    monitor = RunMonitor(
        tracker,
        keeper,
        schedule,
        config.rollout.val_kwargs.n,
        trainer.log_samples,
        trainer.log_traces,
        lambda split, iteration, count: read_trajectories(str(run_dir), iteration, split).slice(0, count).to_pylist(),
    )
    try:
        interrupted, problem = monitor.watch(store, thread, deadlines, lost=lost, news=kills.news)
    except ray.exceptions.RayError:
        if apart.dead() is None:
            raise
    finally:
        over.set()
        if (program := apart.dead()) is None:
            hosts.end()
    if program is not None:
        apart.end()
        keeper.close()
        return ended("failed", f"{gone(program)}. {what_remains(place)}", ray_gone=True)
    if problem:
        # The rest of the run ends at its next call of the store.
        ray.kill(store)
        keeper.close()
        return ended("failed", problem)
    if ends and monitor.ended is None:
        # The event was lost with the store.
        monitor.handle(ends[0])
    if monitor.ended and not monitor.ended.stopped and not failure:
        keeper.finished()
    keeper.close()
    if failure:
        return ended("failed", sentence(failure[0]))
    if monitor.ended is None:
        return ended("interrupted") if interrupted else ended("failed", "the train workers ended without a word")
    return ended("interrupted" if monitor.ended.stopped else "finished")
