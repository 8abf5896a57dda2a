"""The records that the driver's monitor makes of a run's events; no Ray."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from pipeline.prompts.stage import Schedule
from pipeline.run.monitor import RunMonitor
from pipeline.stats import mean, reduce
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    CheckpointSaved,
    IterationTrained,
    PromptScores,
    PromptsMade,
    TrainingEnded,
    ValidationAnnounced,
    ValidationScored,
    VersionLoaded,
)
from pipeline.track.validation import prompt_scores, validation_metrics

CORE = "val-core/countdown/reward/mean@2"


class Run:
    """A monitor that has this object as tracker and as keeper of checkpoints, and the events of a run."""

    def __init__(
        self, iterations: int = 3, test_freq: int = -1, log_samples: int = 0, log_traces: int = 0, **schedule: Any
    ):
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.kept: list[tuple[int, dict[str, float]]] = []
        self.sampled: list[tuple[int, list[dict[str, Any]]]] = []
        self.traced: list[tuple[str, int, int]] = []
        self.statuses: list[str] = []
        self.notices: list[str] = []
        self.recorded_for_keeper: list[int] = []
        self.parts: list[tuple[int, int, int]] = []
        self.kept_from: list[int] = []
        self.monitor = RunMonitor(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Schedule(
                iterations, 2, 4, **{"validation": True, "val_before_train": True, "test_freq": test_freq} | schedule
            ),
            val_n=2,
            log_samples=log_samples,
            log_traces=log_traces,
            samples=lambda split, iteration, count: [{split: iteration, "number": i} for i in range(count)],
        )
        self.handle = self.monitor.handle

    # The tracker.

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        self.logged.append((iteration, dict(metrics)))

    def traces(self, split: str, iteration: int, count: int) -> None:
        self.traced.append((split, iteration, count))

    def keep(self, iteration: int, metrics: dict[str, float]) -> None:
        self.kept.append((iteration, dict(metrics)))

    def recorded(self, iteration: int) -> dict[str, float] | None:
        return dict(self.kept + self.logged).get(iteration)

    def samples(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        self.sampled.append((iteration, rows))

    def status(self, text: str) -> None:
        self.statuses.append(text)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    # The keeper of checkpoints.

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.recorded_for_keeper.append(iteration)

    def saved(self, version: int, rank: int, ranks: int) -> None:
        self.parts.append((version, rank, ranks))

    def forget_after(self, version: int) -> None:
        self.kept_from.append(version)

    # Events.

    def loaded(
        self, version: int, load_s: float = 0.1, update_s: float | None = 1.0, idle_s: float = 0.0, busy_s: float = 0.0
    ) -> None:
        self.handle(VersionLoaded(version, "e", load_s, update_s, idle_s, busy_s))

    def prompts(self, iteration: int) -> None:
        self.handle(PromptsMade(iteration, {"prompts/truncated": float(iteration)}))

    def iteration(self, iteration: int, score: float = 0.5) -> None:
        self.handle(IterationTrained(iteration, {"critic/score/mean": score}))

    def announce(self, version: int) -> None:
        self.handle(ValidationAnnounced(version, prompts=4))

    def validated(self, version: int, prompts: range = range(4), score: float = 1.0) -> pa.Table:
        rows = [
            {
                "data_source": "countdown",
                "uid": f"val-{prompt}",
                "response": f"answer {prompt}.{sample}",
                "score": score * (prompt % 2),
            }
            for prompt in prompts
            for sample in range(2)
        ]
        table = pa.Table.from_pylist(rows)
        self.handle(ValidationScored(version, prompt_scores(table), generate_s=1.0 + prompts[-1]))
        return table

    def begun(self, version: int) -> None:
        self.handle(AttemptBegun(version))

    def end(self, version: int, stopped: bool = False) -> None:
        self.handle(TrainingEnded(version, stopped))

    @property
    def numbers(self) -> list[int]:
        return [iteration for iteration, _ in self.logged]

    @property
    def records(self) -> dict[int, dict[str, float]]:
        return dict(self.logged)


def test_one_complete_record_per_iteration() -> None:
    run = Run(validation=False)
    for iteration in (1, 2, 3):
        run.prompts(iteration)
        run.loaded(iteration - 1, load_s=0.1, update_s=3.0)
        run.loaded(iteration - 1, load_s=0.4, update_s=2.0)
        run.iteration(iteration, score=iteration / 10)
        assert run.numbers[-1] == iteration
    run.handle(CheckpointSaved(3, 1, 2))
    run.end(3)
    assert run.numbers == run.recorded_for_keeper == [1, 2, 3] and run.parts == [(3, 1, 2)]
    assert run.records[2] == {
        "prompts/truncated": 2.0,
        "timing_s/update_weights": 3.0,
        "timing_s/load_weights": 0.4,
        "rollout/engines_loaded": 2,
        "critic/score/mean": 0.2,
    }
    assert run.monitor.ended is not None and run.monitor.ended.version == 3


def test_validation_is_merged_into_its_iteration() -> None:
    run = Run(iterations=3, test_freq=2)
    run.announce(0)
    parts = [run.validated(0, range(2))]
    assert run.numbers == []
    parts.append(run.validated(0, range(2, 4)))
    assert run.numbers == [0]  # the initial policy has no iteration of its own
    # The parts of a validation count as one.
    assert run.records[0] == reduce([validation_metrics(prompt_scores(pa.concat_tables(parts)))]) | {
        "timing_s/testing": 4.0
    }
    run.iteration(1)
    assert run.numbers == [0, 1] and CORE not in run.records[1]
    run.announce(2)
    run.iteration(2)
    run.validated(2, range(3))
    run.validated(2, range(3))  # a task that Ray repeats
    assert run.numbers == [0, 1]
    run.validated(2, range(3, 4))
    assert run.numbers == [0, 1, 2]
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5
    run.iteration(3)
    run.announce(3)
    run.validated(3)
    run.end(3)
    assert run.numbers == [0, 1, 2, 3]
    assert run.records[3]["critic/score/mean"] == 0.5 and run.records[3][CORE] == 0.5


def test_episodes_of_all_parts_of_a_validation_count_together() -> None:
    run = Run(test_freq=2)
    run.announce(0)
    for uids, turns in ((("a", "b", "c"), 6.0), (("d",), 4.0)):
        prompts = [PromptScores("s", uid, 2, [1.0, 0.0], [0, 1]) for uid in uids]
        run.handle(ValidationScored(0, prompts, 1.0, {"val-agent/turns/mean": mean(turns, len(uids) * 2)}))
    assert run.records[0]["val-agent/turns/mean"] == 10 / 8


def test_a_validation_quicker_than_the_report_of_its_iteration_is_not_lost() -> None:
    run = Run(iterations=4, test_freq=2)
    run.iteration(1)
    run.announce(2)
    run.validated(2)
    assert run.numbers == [1]
    run.iteration(2)
    assert run.numbers == [1, 2]
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5


@pytest.mark.parametrize("announced_first", [True, False])
def test_data_that_ends_early(announced_first: bool) -> None:
    run = Run(iterations=100)
    run.iteration(1)
    if announced_first:
        run.announce(2)
        run.iteration(2)
        assert run.numbers == [1]
    else:
        run.iteration(2)
        run.announce(2)
    run.validated(2)
    run.end(2)
    assert run.numbers[-1] == 2 and set(run.numbers) == {1, 2}
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5


def test_a_stopped_run_logs_the_iteration_whose_validation_never_comes() -> None:
    run = Run(iterations=9, test_freq=2)
    run.iteration(1)
    run.announce(2)
    run.iteration(2)
    run.validated(2, range(1))
    assert run.numbers == [1]
    run.end(2, stopped=True)
    run.end(2, stopped=True)  # every train worker says so
    assert run.numbers == [1, 2]
    assert run.records[2] == {"critic/score/mean": 0.5}


def test_records_stay_in_order_while_the_trainer_is_ahead_of_a_validation() -> None:
    run = Run(iterations=9, test_freq=2, max_staleness=2)
    run.iteration(1)
    run.announce(2)
    for iteration in (2, 3):
        run.iteration(iteration, score=iteration / 10)
    assert run.numbers == [1]
    run.validated(2)
    assert run.numbers == [1, 2, 3]
    assert CORE in run.records[2] and CORE not in run.records[3]
    run.announce(4)
    for iteration in (4, 5, 6):
        run.iteration(iteration)
    assert run.numbers == [1, 2, 3]
    run.validated(4)
    assert run.numbers == [1, 2, 3, 4, 5]  # 6 is validated too
    assert CORE in run.records[4] and run.records[4]["critic/score/mean"] == 0.5


@pytest.mark.parametrize(("batches", "lag"), [(None, 2), (3, 3)])
def test_a_validation_that_a_restart_cut_off_is_not_waited_for(batches: int | None, lag: int) -> None:
    run = Run(iterations=9, test_freq=2, max_staleness=2, max_num_gen_batches=batches)
    for iteration in range(1, 3 + lag):
        run.iteration(iteration)
    assert run.numbers == [1]
    run.iteration(3 + lag)
    # Nothing later than this can be trained before version 2 has been validated.
    assert run.numbers[:3] == [1, 2, 3]


def test_what_an_engine_loads_late_belongs_to_the_next_record() -> None:
    run = Run(iterations=9, max_staleness=1)
    run.iteration(1)
    run.loaded(0, load_s=0.7)  # the trainer has the rows of iteration 2, and of more, already
    run.loaded(1, load_s=0.3)
    run.iteration(2)
    assert run.records[2]["timing_s/load_weights"] == 0.7 and run.records[2]["rollout/engines_loaded"] == 2


def test_idle_engines_are_counted_together() -> None:
    run = Run()
    run.loaded(0, update_s=None, idle_s=50.0, busy_s=1.0)
    run.iteration(1)
    run.loaded(1, idle_s=1.0, busy_s=3.0)
    run.loaded(1, idle_s=4.0, busy_s=2.0)
    run.iteration(2)
    assert "perf/rollout_idle" not in run.records[1], "engines were starting"
    assert run.records[2]["perf/rollout_idle"] == 0.5


def test_samples() -> None:
    run, silent = Run(iterations=20, log_samples=3), Run(iterations=20)
    for each in (run, silent):
        each.announce(0)
        each.validated(0)
        for iteration in range(1, 20):
            each.iteration(iteration)
    of_validation, of_training = (
        [{split: version, "number": i} for i in range(3)] for split, version in (("val", 0), ("train", 10))
    )
    assert run.sampled == [(0, of_validation), (10, of_training)] and silent.sampled == []


def test_names_without_a_metric_are_told_once() -> None:
    run = Run()
    rows = [{"reward_parts": '{"%s": 1, "b": 2}' % ("a" * 201), "episode": None}]
    run.monitor._samples = lambda split, iteration, count: rows
    for iteration in (1, 2):
        run.handle(IterationTrained(iteration, {"reward/parts_left_out": 1.0}))
    assert [f"trajectories/: parts of the reward: {'a' * 201}" in notice for notice in run.notices] == [True]


def test_numbers_that_some_rows_lack_are_told_once() -> None:
    run = Run()
    run.handle(ValidationAnnounced(0, 3))
    right = PromptScores("s", "val-0", 2, [1.0, 0.0], [0, 1], [1.0, None])
    others = [PromptScores("s", f"val-{number}", 2, [0.0, 0.0], [0, 0], [0.0, 0.0]) for number in (1, 2)]
    run.handle(ValidationScored(0, [right, *others], 0.1))
    for iteration in (1, 2):
        run.handle(IterationTrained(iteration, {"reward/format/missing_rate": 0.25, "reward/acc/missing_rate": 0.0}))
    assert run.notices == [
        "val-aux/s/acc is missing in 16.7% of the rows: they count as not right",
        "reward/format is missing in 25.0% of the rows: its mean is over the others",
    ]


def test_traces_of_every_iteration_and_validation() -> None:
    run = Run(log_traces=2)
    run.announce(0)
    run.validated(0)
    for iteration in (1, 2):
        run.iteration(iteration)
    assert run.traced == [("val", 0, 2), ("train", 1, 2), ("train", 2, 2)]


def test_the_status_says_what_is_going_on() -> None:
    run = Run()
    run.announce(0)
    run.loaded(0)
    run.announce(3)
    run.loaded(3)
    said = ["validating policy version 0", "iteration 1: generating", "validating policy version 3"]
    assert run.statuses == said


def test_a_version_is_validated_when_an_engine_has_it() -> None:
    run = Run()
    run.announce(0)
    run.announce(3)
    assert not run.statuses, "an announcement comes before its version is trained"
    run.loaded(0)
    run.loaded(3)
    run.announce(3)
    assert run.statuses[-2:] == ["validating policy version 3"] * 2


def test_a_run_that_continues_says_from_where() -> None:
    run = Run(iterations=9)
    run.begun(3)
    assert run.notices == ["continuing from iteration 3"]
    new = Run()
    new.begun(0)
    assert not new.notices


# Restarted train workers.


def test_restarted_train_workers_repeat_iterations() -> None:
    run = Run(iterations=9, test_freq=2)
    run.begun(0)
    run.iteration(1)
    run.announce(2)
    run.iteration(2)
    run.validated(2)
    run.iteration(3)
    run.announce(4)
    run.iteration(4, score=0.1)
    run.validated(4, range(3), score=9.0)  # cut off
    run.begun(2)
    run.iteration(3)
    run.announce(4)
    run.validated(4, range(2))
    run.iteration(4, score=0.7)
    run.validated(4, range(2, 4))
    assert run.numbers == [1, 2, 3, 3, 4]
    assert run.records[4]["critic/score/mean"] == 0.7 and run.records[4][CORE] == 0.5


def test_a_restart_is_reported_with_the_first_reason() -> None:
    run = Run()
    assert not run.monitor.training
    run.begun(0)
    assert run.monitor.training and not run.notices
    run.handle(AttemptFailed("the process of train rank 1 ended"))
    assert not run.monitor.training
    run.handle(AttemptFailed("StaleAttempt: a consequence"))
    run.begun(4)
    assert run.notices == ["restarted the train workers from iteration 4 because the process of train rank 1 ended"]
    assert run.monitor.training and run.kept_from == [0, 4]
    run.begun(4)
    assert run.notices[1] == "restarted the train workers from iteration 4 because they failed"


def test_repeated_iterations_are_recorded_as_if_there_had_been_no_restart() -> None:
    def train(run: Run, first: int, last: int) -> None:
        for iteration in range(first, last + 1):
            run.prompts(iteration)
            run.loaded(iteration - 1)
            run.iteration(iteration)

    whole, killed = Run(validation=False), Run(validation=False)
    whole.begun(0)
    train(whole, 1, 3)
    killed.begun(0)
    train(killed, 1, 2)
    # Parts of iteration 3 are known when the workers fail.
    killed.prompts(3)
    killed.loaded(2)
    killed.handle(AttemptFailed("a reason"))
    killed.begun(1)
    train(killed, 2, 3)
    assert killed.records == whole.records
    assert killed.numbers == [1, 2, 2, 3]


def test_what_a_checkpoint_covers_is_recorded_before_it_is_saved() -> None:
    """Also where the validation is still awaited: a run that resumes there does not train that iteration again."""
    run = Run(iterations=4, test_freq=2)
    run.begun(0)
    run.iteration(1)
    run.handle(CheckpointBegun(1))
    assert run.numbers == [1] and run.kept == []
    run.announce(2)
    run.iteration(2, score=0.25)
    run.handle(CheckpointBegun(2))
    assert run.numbers == [1] and run.kept == [(2, {"critic/score/mean": 0.25})]
    run.validated(2)
    assert run.numbers == [1, 2] and run.records[2][CORE] == 0.5 and run.records[2]["critic/score/mean"] == 0.25


@pytest.mark.parametrize("same_driver", [True, False])
def test_a_validation_that_was_cut_off_is_repeated_and_joins_its_iteration(same_driver: bool) -> None:
    run = Run(iterations=4, test_freq=2)
    run.begun(0)
    run.iteration(1)
    run.announce(2)
    run.iteration(2, score=0.25)
    run.handle(CheckpointBegun(2))
    run.validated(2, range(0, 2))
    run.iteration(3)
    if not same_driver:
        kept = run.kept
        run = Run(iterations=4, test_freq=2)
        run.kept = kept
    run.begun(2)
    run.announce(2)
    run.validated(2)
    assert run.records[2]["critic/score/mean"] == 0.25 and run.records[2][CORE] == 0.5
    run.iteration(3)
    assert run.numbers[-2:] == [2, 3]
