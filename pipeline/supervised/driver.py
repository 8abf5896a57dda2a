"""The driver of a supervised run: starts Ray Train, records the workers' events, and returns how the run ended.

Training runs in a thread; the main thread reads events and the signals that stop the run. At the first signal the
current step ends and a checkpoint is saved; the second signal ends the run at once.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config import ConfigError, save_yaml
from pipeline.config.supervised import SupervisedConfig
from pipeline.run import cluster
from pipeline.run.checkpoint_keeper import CheckpointKeeper
from pipeline.run.faults import sentence
from pipeline.storage import checkpoints
from pipeline.store.events import (
    AttemptBegun,
    CheckpointSaved,
    Event,
    IterationTrained,
    Noted,
    TrainingEnded,
    Trouble,
)
from pipeline.supervised.data import RowGroup, train_dataset
from pipeline.supervised.folder import Beginning
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings, train_loop
from pipeline.supervised.plan import SupervisedPlan
from pipeline.supervised.progress import Progress
from pipeline.track.tracker import Tracker
from pipeline.train import ranks

ANSWER_S = 60.0
# CPUs in addition to the workers': one for the reader, one for Ray Data's work on blocks.
DATA_CPUS = 2


@dataclass
class Training:
    """One start of a supervised run. Ray must be running, and everything must have been checked.

    `run` trains; a run that ended early can be started again, and continues.
    """

    loop: type[SupervisedLoop[Any]]
    plan: SupervisedPlan
    train_groups: list[RowGroup]
    val_groups: list[RowGroup]
    begin: Beginning
    tracker: Tracker
    lost: Callable[[], str | None]
    """Returns the reason if this process may not write into `out` any more, else None."""
    ended: TrainingEnded | None = None
    problem: str | None = None
    """The reason why the run ends early."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest value of each metric."""
    _begun: bool = False
    _keeper: CheckpointKeeper | None = None

    def run(self, out: Path) -> str:
        """Train, and save the model to the folder `out`. Returns `finished`, `interrupted` or `failed`."""
        config = self.plan.config
        save_yaml(config, out / "config.yaml")
        self.begin.kept.save(out)
        keeper = CheckpointKeeper(out, config.trainer.max_ckpt_to_keep, None, "max", str(out))
        self._keeper = keeper
        keeper.forget_after(self.begin.done)
        checkpoints.forget_list(str(out))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        progress: Any = ray.remote(Progress)
        progress = progress.options(num_cpus=0, max_concurrency=100, scheduling_strategy=here).remote()
        trainer, failure = self._trainer(out, progress), list[BaseException]()

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:  # noqa: BLE001 (handed to the main thread)
                failure.append(error)

        thread = threading.Thread(target=fit, name="fit", daemon=True)
        thread.start()
        self.tracker.status("starting the workers")
        try:
            interrupted = self._watch(progress, thread)
        finally:
            keeper.close()
        if self.ended is not None and not self.ended.stopped:
            return "finished"
        if failure:
            self.problem = self.problem or sentence(failure[0])
        elif self.problem is None and (interrupted or self.ended):
            return "interrupted"
        self.problem = self.problem or "the train workers ended without a word"
        return "failed"

    def _trainer(self, out: Path, progress: Any) -> TorchTrainer:
        config, done = self.plan.config, self.begin.done
        data, trainer, batch = config.data, config.trainer, config.data.train_batch_size
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(trainer.start_timeout)
        arguments = (
            *(self.train_groups, self.loop.encoder, config.model, data, trainer.seed, self.plan.epochs),
            batch // trainer.num_workers,
        )
        # A run whose steps are all done reads no rows, but a stream needs some.
        skipped = min(done, self.plan.steps - 1) * batch
        streams = {"train": train_dataset(*arguments, skipped)}
        if self.loop.first_pass:
            # Only whole batches, because Ray Train gives each worker the same number of rows.
            batches = min(self.plan.steps, -(-self.plan.rows // batch))
            streams["first_pass"] = train_dataset(*arguments).limit(batches * batch)
        for stream in streams.values():
            stream.context.enable_progress_bars = False
        resources = {"CPU": trainer.cpus_per_worker}
        if trainer.use_gpu:
            resources["GPU"] = 1
        settings = WorkerSettings(self.loop, config, self.plan.steps, self.val_groups, progress, done)
        return TorchTrainer(
            train_loop,
            train_loop_config={"settings": settings},
            torch_config=TorchConfig(ranks.backend(trainer.use_gpu), timeout_s=int(trainer.data_timeout)),
            scaling_config=ScalingConfig(
                num_workers=trainer.num_workers, use_gpu=trainer.use_gpu, resources_per_worker=resources
            ),
            datasets=dict(streams),
            # Without an order, blocks come in the order of their completion, and the run could not be repeated.
            dataset_config=DataConfig(execution_options=ray.data.ExecutionOptions(preserve_order=True)),
            run_config=RunConfig(
                name=checkpoints.FOLDER, storage_path=str(out), failure_config=FailureConfig(max_failures=0)
            ),
        )

    def _watch(self, progress: Any, thread: threading.Thread) -> bool:
        """Record events until training has ended. Returns True if a signal requested a stop."""
        read, interrupted = 0, False
        while True:
            try:
                if (lost := self.lost()) is not None:
                    self.problem = lost
                    return interrupted
                alive = thread.is_alive()
                try:
                    last, events = ray.get(progress.read.remote(read, 1.0), timeout=ANSWER_S)
                except ray.exceptions.GetTimeoutError:
                    continue  # A busy machine answers a moment later.
                # An event whose handling Ctrl-C interrupts is read again.
                for number, event in enumerate(events, start=last - len(events) + 1):
                    try:
                        self._handle(event)
                    except OSError as error:
                        if self.problem is None:
                            self.problem = f"the run's records cannot be written: {error}"
                            self.tracker.notice(f"{self.problem}; stopping after this step")
                            progress.stop.remote()
                    read = number
                # One more read after the end: the last events came before it.
                if not alive:
                    return interrupted
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                if not self._begun:
                    self.tracker.notice("stopped before the first step of this start, so nothing is lost")
                    return interrupted
                progress.stop.remote()
                self.tracker.notice("stopping after this step; Ctrl-C again ends the run at once")

    def _handle(self, event: Event) -> None:
        match event:
            case AttemptBegun():
                self.tracker.status("training")
            case IterationTrained(step, metrics):
                self._begun = True
                self.metrics |= {"step": step, **metrics}
                self.tracker.log(step, metrics)
            case CheckpointSaved(step, rank, ranks):
                assert self._keeper is not None
                self._keeper.saved(step, rank, ranks)
            case Noted(text):
                self.tracker.notice(f"note: {text}")
            case Trouble(text):
                self.tracker.notice(text)
            case TrainingEnded(step):
                self.ended = event
                self.metrics.setdefault("step", step)


def start_ray(config: SupervisedConfig) -> bool:
    """Join or start Ray; returns False if this process was using Ray already.

    Raises:
        ConfigError: Ray has too few CPUs or GPUs.
    """
    trainer = config.trainer
    cpus = trainer.num_workers * trainer.cpus_per_worker
    local_cpus = trainer.ray_num_cpus or max(os.cpu_count() or 1, round(cpus + 0.5) + DATA_CPUS)
    if not cluster.start(local_cpus, None, {}):
        return False
    available = ray.cluster_resources()
    for name, needed in (("CPU", cpus + 1), ("GPU", trainer.num_workers if trainer.use_gpu else 0)):
        if available.get(name, 0) < needed:
            raise ConfigError(
                f"the run needs {needed:g} {name}s (trainer.num_workers={trainer.num_workers}, "
                f"trainer.cpus_per_worker={trainer.cpus_per_worker:g}, and 1 CPU for the reader), but Ray has "
                f"{available.get(name, 0):g}; lower trainer.num_workers or add nodes."
            )
    return True
