"""The driver's monitor of a run: reads the policy store's events and makes one record of metrics per iteration.

The metrics of an iteration come from several processes: the train workers, the engines (when they loaded a version),
the prompt stage, the validation stage. If the store dies and comes back empty, the driver repeats its request to stop,
and waits for the train workers, which restart from their newest checkpoint.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from pipeline.config.trainer import DeadlineConfig
from pipeline.run.begin import gone
from pipeline.run.watchdog import Watchdog
from pipeline.stats import reduce
from pipeline.store.client import PAUSE_S, StoreClient, store_lost
from pipeline.store.errors import StoreTimeout
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    CheckpointSaved,
    Event,
    IterationTrained,
    Noted,
    PromptsMade,
    TrainingEnded,
    Trouble,
    ValidationAnnounced,
    ValidationScored,
    VersionLoaded,
)
from pipeline.store.policy_store import PolicyStore
from pipeline.track.metrics import without_metric
from pipeline.track.validation import validation_metrics
from pipeline.upstream import apart

if TYPE_CHECKING:
    from pipeline.prompts.stage import Schedule
    from pipeline.run.checkpoint_keeper import CheckpointKeeper
    from pipeline.track.tracker import Tracker

SAMPLES_EVERY = 10
"""Number of iterations from one table of training samples to the next."""
LEFT_OUT = ("reward/parts_left_out", "agent/tools_left_out")
"""Metrics that count names (of reward parts, of tools) that have no metric of their own."""
MISSING = "/missing_rate"
"""Suffix of the metrics that give the fraction of rows in which a number of the reward is missing."""
ROWS_FOR_NAMES = 64
"""Number of recorded rows that are read to find the names without a metric."""


@dataclass
class _Validation:
    """The validation of one policy version."""

    responses: int
    parts: dict[str, ValidationScored] = field(default_factory=dict)
    """Results so far, by the uid of their first prompt: a task that Ray repeats reports its prompts again."""
    metrics: dict[str, float] | None = None
    """Metrics of the validation; None until all responses are scored."""


@dataclass
class _Loads:
    """Metrics of the engines that have loaded weights for one iteration."""

    metrics: dict[str, float] = field(default_factory=lambda: {"rollout/engines_loaded": 0})
    idle_s: float = 0.0
    total_s: float = 0.0

    def add(self, event: VersionLoaded) -> None:
        # The slowest engine counts.
        for name, value in (("timing_s/update_weights", event.update_s), ("timing_s/load_weights", event.load_s)):
            if value is not None:
                self.metrics[name] = max(self.metrics.get(name, 0.0), value)
        self.metrics["rollout/engines_loaded"] += 1
        self.idle_s += event.idle_s
        self.total_s += event.idle_s + event.busy_s
        if self.total_s and event.update_s is not None:
            self.metrics["perf/rollout_idle"] = self.idle_s / self.total_s


class RunMonitor:
    """The monitor of one run.

    Args:
        tracker: receives the records.
        keeper: receives checkpoints, and the records by which it ranks them.
        schedule: determines the versions to validate.
        val_n: number of responses per validation prompt.
        log_samples: number of rows in a table of samples.
        log_traces: number of rows per iteration, and per validation, that are sent to MLflow as traces.
        samples: function of `(split, iteration, count)` that returns `count` recorded rows.
    """

    def __init__(
        self,
        tracker: "Tracker",
        keeper: "CheckpointKeeper",
        schedule: "Schedule",
        val_n: int,
        log_samples: int,
        log_traces: int,
        samples: Callable[[str, int, int], list[dict[str, Any]]],
    ):
        self._tracker, self._keeper, self._schedule = tracker, keeper, schedule
        self._val_n, self._log_samples, self._log_traces, self._samples = val_n, log_samples, log_traces, samples
        self._records: dict[int, dict[str, float]] = {}
        """Records of trained iterations that are not logged yet, and the last logged one."""
        self._prompts: dict[int, dict[str, float]] = {}
        self._loads: dict[int, _Loads] = defaultdict(_Loads)
        self._validations: dict[int, _Validation] = {}
        self._logged = self._trained = self._loaded = -1
        self._attempts = 0
        self._reason: str | None = None
        self._names_told = False
        self._noted: set[str] = set()
        self._missing_told: set[str] = set()
        self.training = False
        """True if the train workers have begun, and have not failed since."""
        self.begun = False
        """True if rows have been generated or trained; a stop then waits for the end of the iteration."""
        self.ended: TrainingEnded | None = None

    def watch(
        self,
        store: Any,
        training: threading.Thread,
        deadlines: DeadlineConfig,
        clock: Callable[[], float] = time.monotonic,
        lost: Callable[[], str | None] = lambda: None,
        news: Callable[[], Iterable[str]] = tuple,
    ) -> tuple[bool, str | None]:
        """Handle events until training has ended.

        Args:
            store: handle of the policy store.
            training: the thread in which Ray Train runs.
            deadlines: maximum seconds without the store (`store`) and without train workers (`train_start`).
            clock: returns the time in seconds.
            lost: returns the reason if the run must end at once, else None.
            news: returns notices to show, such as on processes that were killed.

        Returns:
            (True if a signal requested a stop, the reason why training cannot go on or None).
        """
        client, watchdog = StoreClient(store), Watchdog(clock)
        read, interrupted = 0, False
        unwritten: str | None = None
        silent_since: float | None = None
        idle_since = clock()
        while True:
            try:
                if (problem := lost()) is not None:
                    return interrupted, problem
                if (program := apart.dead()) is not None:
                    return interrupted, gone(program)
                alive = training.is_alive()
                try:
                    last, events = client.ask(PolicyStore.read_events, read, 1.0)
                    status = client.ask(PolicyStore.status)
                    if (interrupted or unwritten) and not status.stopping:
                        client.ask(PolicyStore.stop)
                except (ray.exceptions.RayActorError, StoreTimeout) as error:
                    if not alive:
                        return interrupted, unwritten
                    now = clock()
                    if silent_since is None:
                        silent_since = idle_since = now
                        self.handle(AttemptFailed("the policy store died"))
                        self._tracker.notice("the policy store does not answer; Ray starts it again")
                    if now - silent_since > deadlines.store:
                        return interrupted, store_lost(now - silent_since, error)
                    time.sleep(PAUSE_S)
                    continue
                silent_since = None
                for notice in news():
                    self._tracker.notice(notice)
                # An event whose handling Ctrl-C interrupts is read again.
                for number, event in enumerate(events, start=last - len(events) + 1):
                    try:
                        self.handle(event)
                    except OSError as error:
                        if unwritten is None:
                            unwritten = f"the run's records cannot be written: {error}"
                            self._tracker.notice(f"{unwritten}; stopping after this iteration")
                    read = number
                    watchdog.moved()
                if text := watchdog.look(status):
                    self._tracker.notice(text)
                # One more read after the end: the last events came before it.
                if not alive:
                    return interrupted, unwritten
                if self.training:
                    idle_since = clock()
                elif clock() - idle_since > deadlines.train_start:
                    return interrupted, _no_workers(deadlines.train_start)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                if not self.begun:
                    self._tracker.notice("stopped before the first iteration of this start, so nothing is lost")
                    return interrupted, None
                self._tracker.notice("stopping after this iteration; Ctrl-C again ends the run at once")

    def handle(self, event: Event) -> None:
        """Handle one event of the policy store."""
        match event:
            case AttemptFailed(reason):
                # The first failure reported is the cause; later ones are usually consequences.
                self._reason = self._reason or reason
                self.training = False
            case AttemptBegun(version):
                self._begin(version)
            case PromptsMade(iteration, metrics):
                self._prompts[iteration] = self._prompts.get(iteration, {}) | metrics
            case VersionLoaded(version):
                self.begun, self._loaded = True, max(version, self._loaded)
                # It generates the next iteration, or a later one if the trainer already has the rows of the next.
                self._loads[max(version, self._trained) + 1].add(event)
                if self._pending(version):
                    self._tracker.status(f"validating policy version {version}")
                # The last version generates only its validation.
                if version < self._schedule.iterations:
                    self._tracker.status(f"iteration {version + 1}: generating")
            case IterationTrained():
                self._iteration(event)
            case ValidationAnnounced(version, prompts):
                self._validations[version] = _Validation(prompts * self._val_n)
                # Announcements come early: the version may still be trained.
                if version == self._loaded:
                    self._tracker.status(f"validating policy version {version}")
            case ValidationScored():
                self._scored(event)
            case CheckpointBegun(version):
                # A run that resumes from it never sees this iteration again. Its validation may still come.
                if version > self._logged and version in self._records:
                    self._tracker.keep(version, self._records[version])
            case CheckpointSaved(version, rank, ranks):
                self._keeper.saved(version, rank, ranks)
            case Trouble(text):
                self._tracker.notice(text)
            case Noted(text):
                if text not in self._noted:
                    self._noted.add(text)
                    self._tracker.notice(text)
            case TrainingEnded():
                self.ended = event
                # A run that was stopped does not validate its last version.
                for number in sorted(i for i in self._records if i > self._logged):
                    self._log(number)

    def _begin(self, version: int) -> None:
        """Reset the state for workers that begin with `version`; later iterations are trained again."""
        if self._attempts:
            self._tracker.notice(
                f"restarted the train workers from iteration {version} because {self._reason or 'they failed'}"
            )
            self._prompts.clear()
            self._loads.clear()
            self._loaded = -1
        elif version:
            self._tracker.notice(f"continuing from iteration {version}")
        self._keeper.forget_after(version)
        # A validation that was cut off is repeated.
        self._validations = {
            i: validation for i, validation in self._validations.items() if i <= version and validation.metrics
        }
        self._records = {i: record for i, record in self._records.items() if i <= version}
        if version not in self._records and (recorded := self._tracker.recorded(version)) is not None:
            self._records[version] = recorded
        self._logged = min(self._logged, version) if self._attempts else max(self._records, default=-1)
        self._attempts += 1
        self._trained = version
        self._reason, self.training = None, True

    def _iteration(self, event: IterationTrained) -> None:
        self.begun = True
        iteration = self._trained = event.iteration
        record = self._prompts.pop(iteration, {})
        if iteration in self._loads:
            record |= self._loads.pop(iteration).metrics
        record |= event.metrics
        # A version is published before its iteration is reported, so a quick validation comes first.
        if (validation := self._validations.get(iteration)) and validation.metrics:
            record |= validation.metrics
        self._records[iteration] = record
        self._log_complete()
        if self._log_samples and iteration % SAMPLES_EVERY == 0:
            self._tracker.samples(iteration, self._samples("train", iteration, self._log_samples))
        self._tracker.traces("train", iteration, self._log_traces)
        self._tell_missing(record)
        if not self._names_told and any(record.get(name) for name in LEFT_OUT):
            self._names_told = True
            names = without_metric(self._samples("train", iteration, ROWS_FOR_NAMES))
            self._tracker.notice(f"without a metric of their own, and only in trajectories/: {names}")

    def _tell_missing(self, metrics: dict[str, float]) -> None:
        """Show a notice, once for each metric `.../missing_rate` above 0: some rows lack that number of the reward."""
        for name, share in metrics.items():
            if share and name.endswith(MISSING) and name not in self._missing_told:
                self._missing_told.add(name)
                of_validation = name.startswith("val-")
                means = "they count as not right" if of_validation else "its mean is over the others"
                self._tracker.notice(f"{name.removesuffix(MISSING)} is missing in {share:.1%} of the rows: {means}")

    def _scored(self, event: ValidationScored) -> None:
        version = event.version
        validation = self._validations.get(version)
        if validation is None or validation.metrics:
            return
        validation.parts[event.prompts[0].uid] = event
        prompts = [prompt for part in validation.parts.values() for prompt in part.prompts]
        if sum(prompt.responses for prompt in prompts) < validation.responses:
            return
        episodes = [part.episodes for part in validation.parts.values()]
        validation.metrics = reduce([validation_metrics(prompts), *episodes])
        # All chunks of a validation start together, so the slowest one's time is the time of the validation.
        validation.metrics["timing_s/testing"] = max(part.generate_s for part in validation.parts.values())
        validation.parts.clear()
        self._tell_missing(validation.metrics)
        if version in self._records or version == 0:
            self._records[version] = self._records.get(version, {}) | validation.metrics
            if version <= self._logged:
                self._log(version)
            self._log_complete()
        if self._log_samples:
            self._tracker.samples(version, self._samples("val", version, self._log_samples))
        self._tracker.traces("val", version, self._log_traces)

    def _pending(self, version: int) -> bool:
        """Return True if the validation of `version` has been announced and is not complete."""
        validation = self._validations.get(version)
        return validation is not None and not validation.metrics

    def _awaits_validation(self, version: int) -> bool:
        validation = self._validations.get(version)
        if validation is not None and validation.metrics:
            return False
        # Later iterations than these are not trained before it is recorded; a restart cut it off.
        if max(self._records) > version + self._schedule.validation_lag:
            return False
        return validation is not None or self._schedule.validates(version, version == self._schedule.iterations)

    def _log_complete(self) -> None:
        """Log the records that are complete, in the order of their iterations."""
        for number in sorted(i for i in self._records if i > self._logged):
            if self._awaits_validation(number):
                break
            self._log(number)

    def _log(self, iteration: int) -> None:
        self._tracker.log(iteration, self._records[iteration])
        self._keeper.record(iteration, self._records[iteration])
        self._logged = max(self._logged, iteration)
        # The last one stays: at an early end of the data, its validation may be announced after it.
        self._records = {i: record for i, record in self._records.items() if i >= self._logged}


def _no_workers(seconds: float) -> str:
    free = ", ".join(
        f"{number:g} {name}" for name, number in sorted(ray.available_resources().items()) if name in ("CPU", "GPU")
    )
    return (
        f"the train workers have not begun for {seconds:.0f} s (trainer.deadlines.train_start): they wait for nodes, "
        f"or load models and a checkpoint; free in the cluster are {free or 'no CPUs'}"
    )
