"""The driver: everything that starts, in order, and what becomes of it.

    check all that can be checked ─► Ray ─► policy store ─► TorchTrainer (train loop + stream) ─► follow ─► summary

Training runs in a thread of its own; the main thread reads the run's messages and Ctrl-C. The first Ctrl-C lets the
iteration in work end, saves and stops; the second one ends the run at once.
"""

import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from pipeline import checkpoints, cluster, stream
from pipeline.config import Config, save_yaml
from pipeline.plan import Plan
from pipeline.prompts.stage import ANSWER_S, Schedule
from pipeline.stages import uses_engines
from pipeline.store import Admission, PolicyStore
from pipeline.track.follow import Follower
from pipeline.track.history import read_history
from pipeline.track.retention import Retention
from pipeline.track.tracker import Tracker
from pipeline.track.trajectories import read_trajectories
from pipeline.track.watchdog import Watchdog
from pipeline.train.loop import LoopSettings, train_loop


@dataclass
class Outcome:
    """How a run ended: `finished`, `interrupted` or `failed`, and why it failed."""

    status: str
    version: int
    error: str | None = None


def start_ray(config: Config) -> bool:
    """Join or start Ray; False where this process was using Ray already."""
    trainer = config.trainer
    return cluster.start(trainer.ray_num_cpus, trainer.object_store_gb, trainer.env_vars)


def run(config: Config, plan: Plan, tracker: Tracker, run_dir: Path, checkpoint: str | None = None) -> Outcome:
    """Train as `config` says; Ray is running and everything has been checked.

    Args:
        config: the resolved configuration; also written to the run's folder.
        plan: what it amounts to, with the number of iterations.
        tracker: takes the metrics; started, and finished by the caller.
        run_dir: the run's folder.
        checkpoint: folder or URL of the checkpoint to begin with; None begins anew.
    """
    assert plan.iterations is not None
    trainer = config.trainer
    save_yaml(config, run_dir / "config.yaml")
    schedule = Schedule.of(config, plan.iterations)
    admission = Admission(config.rollout.chunk_prompts, config.data.train_batch_size, config.algorithm.max_staleness)
    # Many chunks wait inside the store at the same time, each in a call of its own.
    store = ray.remote(PolicyStore).options(num_cpus=0, max_concurrency=10_000).remote(admission)

    def rollouts() -> ray.data.Dataset:
        return stream.build(config, schedule, store, str(run_dir))

    with warnings.catch_warnings():
        # Ray's own default sets an option that Ray deprecates.
        warnings.simplefilter("ignore")
        options = DataConfig.default_ingest_options()
    options.preserve_order = True
    torch_trainer = TorchTrainer(
        train_loop,
        train_loop_config={"settings": LoopSettings(config, schedule, store, str(run_dir), checkpoint)},
        datasets={"rollouts": rollouts},
        dataset_config=DataConfig(execution_options=options),
        scaling_config=ScalingConfig(
            num_workers=trainer.num_workers,
            use_gpu=trainer.use_gpu,
            resources_per_worker={"CPU": trainer.cpus_per_worker} | ({"GPU": 1} if trainer.use_gpu else {}),
            # mypy knows the class of the first Ray Train.
            label_selector=trainer.placed("train"),  # type: ignore[call-arg]
        ),
        run_config=RunConfig(
            name=checkpoints.FOLDER,
            storage_path=str(run_dir),
            failure_config=FailureConfig(max_failures=trainer.max_failures),
        ),
    )
    # Ray Train's own list of checkpoints is for restarts within a run. Between runs the files themselves say what is
    # whole; the list may be half written, or name some that are gone.
    (run_dir / checkpoints.FOLDER / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            torch_trainer.fit()
        except BaseException as error:  # noqa: BLE001 (handed to the main thread)
            failure.append(error)

    thread = threading.Thread(target=fit, name="fit", daemon=True)
    thread.start()
    engines = "the engines and " if uses_engines(config) else ""
    tracker.status(f"starting {engines}the train workers")
    retention = Retention(run_dir, trainer.max_ckpt_to_keep, trainer.best_metric, trainer.best_metric_mode)
    for record in read_history(tracker.metrics_path):
        retention.record(record["iteration"], record)
    follower = Follower(
        tracker,
        retention,
        schedule,
        config.rollout.val_kwargs.n,
        trainer.log_samples,
        lambda iteration, count: read_trajectories(str(run_dir), iteration).slice(0, count).to_pylist(),
    )
    interrupted = _follow(store, follower, thread, tracker)
    retention.close()
    if failure:
        return Outcome("failed", -1, sentence(failure[0]))
    if follower.done is None:
        return Outcome("interrupted" if interrupted else "failed", -1, "the train workers ended without a word")
    return Outcome("interrupted" if follower.done["stopped"] else "finished", follower.done["version"])


def _follow(store: Any, follower: Follower, thread: threading.Thread, tracker: Tracker) -> bool:
    """Handle messages until training has ended; whether Ctrl-C was pressed."""
    read, interrupted, watchdog = 0, False, Watchdog()
    while True:
        try:
            alive = thread.is_alive()
            try:
                read, messages = ray.get(store.read.remote(read, 1.0), timeout=ANSWER_S)
                status = ray.get(store.status.remote(), timeout=ANSWER_S)
            except ray.exceptions.RayActorError:
                thread.join(timeout=ANSWER_S)
                return interrupted
            for message in messages:
                follower.handle(message)
                watchdog.moved()
            if text := watchdog.look(status):
                tracker.notice(text)
            # One more read after the end: the last messages came before it.
            if not alive:
                return interrupted
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            ray.get(store.stop.remote(), timeout=ANSWER_S)
            tracker.notice("stopping after this iteration; Ctrl-C again ends the run at once")


ENDINGS = ("Error", "Exception", "Timeout", "Dead", "StaleGeneration", "Interrupt", "Exit")
RAISED = re.compile(r"^(?:\x1b\[\d+m)*((?:\w+\.)*\w+): (.+)$", re.MULTILINE)
"""A traceback's last line: the exception's class and message."""


def sentence(error: BaseException) -> str:
    """What went wrong, without the stacks of the processes it passed through.

    Ray hands exceptions on as text inside others; the last one in it that is not Ray's own is the one that says most.
    """
    failures = getattr(error, "worker_failures", None)
    if failures:
        error = next(iter(failures.values()))
    text = f"{type(error).__name__}: {error}"
    raised = [
        (name.split(".")[-1], message)
        for name, message in RAISED.findall(text)
        if name.split(".")[-1].endswith(ENDINGS) and not name.startswith("ray.")
    ]
    name, message = raised[-1] if raised else (type(error).__name__, str(error).strip().splitlines()[-1])
    return f"{name}: {message}"
