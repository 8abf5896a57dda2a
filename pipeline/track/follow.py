"""From the run's events to its record: the driver reads the policy store's event log and tells the tracker.

An iteration's metrics come from several parties: the train workers, the engines (when they loaded a version), the
prompt source, the validation stage. `Follower` puts them together, one record per iteration, and nothing of Ray is in
it: events go in, calls of the tracker come out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.stats import reduce
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    CheckpointSaved,
    Event,
    IterationTrained,
    PromptsMade,
    TrainingEnded,
    ValidationAnnounced,
    ValidationScored,
    VersionLoaded,
)
from pipeline.track.validation import validation_metrics

SAMPLES_EVERY = 10

if TYPE_CHECKING:
    from pipeline.prompts.stage import Schedule


class Record(Protocol):
    """The part of `Tracker` that is used here."""

    def log(self, iteration: int, metrics: dict[str, float]) -> None: ...

    def keep(self, iteration: int, metrics: dict[str, float]) -> None: ...

    def recorded(self, iteration: int) -> dict[str, float] | None: ...

    def samples(self, iteration: int, rows: list[dict[str, Any]]) -> None: ...

    def status(self, text: str) -> None: ...

    def notice(self, text: str) -> None: ...


class Keeper(Protocol):
    """The part of `Retention` that is used here."""

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def saved(self, version: int, rank: int, ranks: int) -> None: ...

    def restarted(self) -> None: ...


class Follower:
    """Turns events into records.

    Args:
        tracker: where records go.
        keeper: is told of checkpoints and of the records that say how good they are.
        schedule: which versions are validated.
        val_n: responses per validation prompt.
        log_samples: rows of a table of samples.
        samples: `(split, iteration, count)` to that many recorded rows.
    """

    def __init__(
        self,
        tracker: Record,
        keeper: Keeper,
        schedule: "Schedule",
        val_n: int,
        log_samples: int,
        samples: Callable[[str, int, int], list[dict[str, Any]]],
    ):
        self._tracker, self._keeper, self._schedule = tracker, keeper, schedule
        self._val_n, self._log_samples, self._samples = val_n, log_samples, samples
        self._records: dict[int, dict[str, float]] = {}
        self._extra: dict[int, dict[str, float]] = defaultdict(dict)
        self._spent: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        """Idle seconds of all engines, and all their seconds, by iteration."""
        self._expected: dict[int, int] = {}
        self._validated_early: dict[int, dict[str, float]] = {}
        self._validated_versions: set[int] = set()
        self._logged = self._taken = -1
        self._scored: dict[int, dict[str, ValidationScored]] = defaultdict(dict)
        """Parts of a validation by the first prompt of each."""
        self._attempts = 0
        self._reason: str | None = None
        self.training = False
        """Whether the train workers have begun, and have not failed since."""
        self.done: TrainingEnded | None = None

    def handle(self, event: Event) -> None:
        """Take one event of the policy store."""
        match event:
            case AttemptFailed():
                self._failed(event)
            case AttemptBegun():
                self._begun(event)
            case PromptsMade():
                self._extra[event.iteration] |= event.metrics
            case VersionLoaded():
                self._loaded(event)
            case IterationTrained():
                self._iteration(event)
            case ValidationAnnounced():
                self._announced(event)
            case ValidationScored():
                self._validated(event)
            case CheckpointBegun():
                self._saving(event)
            case CheckpointSaved():
                self._keeper.saved(event.version, event.rank, event.ranks)
            case TrainingEnded():
                self._done(event)

    def _failed(self, event: AttemptFailed) -> None:
        # The first to speak knows best: the others tell what followed from it.
        self._reason = self._reason or event.reason
        self.training = False

    def _begun(self, event: AttemptBegun) -> None:
        version = event.version
        if self._attempts:
            self._tracker.notice(
                f"restarted the train workers from iteration {version} because {self._reason or 'they failed'}"
            )
            # What was told of the attempt before has no end, or is told again.
            for part in (self._extra, self._spent, self._expected, self._validated_early, self._scored):
                part.clear()
            self._keeper.restarted()
        self._records = {i: record for i, record in self._records.items() if i <= version}
        if version not in self._records and (recorded := self._tracker.recorded(version)) is not None:
            # A validation that was cut off is made again, and belongs to this record.
            self._records[version] = recorded
        self._logged = min(self._logged, version) if self._attempts else max(self._records, default=-1)
        self._attempts += 1
        self._taken = version
        self._reason, self.training = None, True

    def _loaded(self, event: VersionLoaded) -> None:
        # Version v generates iteration v + 1, or a later one where the trainer has that already; the slowest engine
        # counts.
        number = max(event.version, self._taken) + 1
        extra = self._extra[number]
        for name, value in (("timing_s/update_weights", event.update_s), ("timing_s/load_weights", event.load_s)):
            if value is not None:
                extra[name] = max(extra.get(name, 0.0), value)
        extra["rollout/engines_loaded"] = extra.get("rollout/engines_loaded", 0) + 1
        idle, whole = self._spent[number]
        self._spent[number] = idle, whole = idle + event.idle_s, whole + event.idle_s + event.busy_s
        if whole and event.update_s is not None:
            extra["perf/rollout_idle"] = idle / whole
        # What the last version generates is its validation, which says so itself.
        if event.version < self._schedule.iterations:
            self._tracker.status(f"iteration {event.version + 1}: generating")

    def _iteration(self, event: IterationTrained) -> None:
        iteration = event.iteration
        validation = self._validated_early.pop(iteration, {})
        # Restarted train workers repeat iterations: what is known of this one and later ones is void.
        self._records = {i: record for i, record in self._records.items() if i < iteration}
        self._validated_versions = {i for i in self._validated_versions if i < iteration}
        if validation:
            self._validated_versions.add(iteration)
        self._logged = min(self._logged, iteration - 1)
        self._taken = iteration
        self._spent.pop(iteration, None)
        self._records[iteration] = self._extra.pop(iteration, {}) | event.metrics | validation
        self._log_complete()
        if self._log_samples and iteration % SAMPLES_EVERY == 0:
            self._tracker.samples(iteration, self._samples("train", iteration, self._log_samples))

    def _announced(self, event: ValidationAnnounced) -> None:
        self._expected[event.version] = event.prompts * self._val_n
        self._scored.pop(event.version, None)
        self._validated_early.pop(event.version, None)
        self._tracker.status(f"validating policy version {event.version}")

    def _validated(self, event: ValidationScored) -> None:
        version = event.version
        if version not in self._expected:
            return
        parts = self._scored[version]
        # A task that Ray repeats reports its prompts again.
        parts[event.prompts[0].uid] = event
        prompts = [prompt for part in parts.values() for prompt in part.prompts]
        if sum(prompt.responses for prompt in prompts) < self._expected[version]:
            return
        validation = reduce([validation_metrics(prompts)])
        # All chunks of a validation start together, so the slowest one's time is the whole.
        validation["timing_s/testing"] = max(part.generate_s for part in parts.values())
        del self._scored[version], self._expected[version]
        if version in self._records or version == 0:
            self._records[version] = self._records.get(version, {}) | validation
            self._validated_versions.add(version)
            if version <= self._logged:
                self._log(version)
            self._log_complete()
        else:
            # A version is published before its iteration is reported, so a quick validation comes first.
            self._validated_early[version] = validation
        if self._log_samples:
            self._tracker.samples(version, self._samples("val", version, self._log_samples))

    def _saving(self, event: CheckpointBegun) -> None:
        # A run that goes on from the checkpoint never hears of this iteration again. Its validation may still come.
        version = event.version
        if version > self._logged and version in self._records:
            self._tracker.keep(version, self._records[version])

    def _done(self, event: TrainingEnded) -> None:
        self.done = event
        # A run that was stopped does not validate its last version.
        for number in sorted(i for i in self._records if i > self._logged):
            self._log(number)

    def _awaits_validation(self, version: int) -> bool:
        if version in self._validated_versions:
            return False
        # The version after it is held back until it is recorded. Where rows of that one are trained and it has not
        # come, a restart cut it off.
        if max(self._records) > version + self._schedule.validation_lag:
            return False
        return version in self._expected or self._schedule.validates(version, version == self._schedule.iterations)

    def _log_complete(self) -> None:
        """Log, in their order, the records that nothing is missing from."""
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
