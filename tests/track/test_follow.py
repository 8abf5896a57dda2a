"""From events to records: a recording tracker instead of the real one, no Ray."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from pipeline.prompts.stage import Schedule
from pipeline.stats import reduce
from pipeline.store.events import (
    AttemptBegun,
    AttemptFailed,
    CheckpointBegun,
    CheckpointSaved,
    IterationTrained,
    PromptsMade,
    TrainingEnded,
    ValidationAnnounced,
    ValidationScored,
    VersionLoaded,
)
from pipeline.track.follow import Follower
from pipeline.track.validation import prompt_scores, validation_metrics

CORE = "val-core/countdown/reward/mean@2"


class Log:
    """Keeps what a tracker is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.sampled: list[tuple[int, list[dict[str, Any]]]] = []
        self.said: list[str] = []
        self.kept: list[tuple[int, dict[str, float]]] = []
        self.noticed: list[str] = []

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        self.logged.append((iteration, dict(metrics)))

    def keep(self, iteration: int, metrics: dict[str, float]) -> None:
        self.kept.append((iteration, dict(metrics)))

    def recorded(self, iteration: int) -> dict[str, float] | None:
        return dict(self.kept + self.logged).get(iteration)

    def notice(self, text: str) -> None:
        self.noticed.append(text)

    def samples(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        self.sampled.append((iteration, rows))

    def status(self, text: str) -> None:
        self.said.append(text)


class Kept:
    """Keeps what a keeper of checkpoints is told."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.parts: list[tuple[int, int, int]] = []
        self.restarts = 0

    def restarted(self) -> None:
        self.restarts += 1

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.recorded.append(iteration)

    def saved(self, version: int, rank: int, ranks: int) -> None:
        self.parts.append((version, rank, ranks))


class Run:
    """A follower and the events of a run."""

    def __init__(self, iterations: int = 3, test_freq: int = -1, validation: bool = False, log_samples: int = 0):
        self.tracker, self.keeper = Log(), Kept()
        schedule = Schedule(iterations, 2, 4, validation, True, test_freq)
        self.follower = Follower(
            self.tracker,
            self.keeper,
            schedule,
            val_n=2,
            log_samples=log_samples,
            samples=lambda split, iteration, count: [{split: iteration, "number": i} for i in range(count)],
        )

    def prompts(self, iteration: int) -> None:
        metrics = {"prompts/truncated": float(iteration)}
        self.follower.handle(PromptsMade(iteration, metrics))

    def loaded(
        self, version: int, load_s: float = 0.1, update_s: float | None = 1.0, spent: dict[str, float] | None = None
    ) -> None:
        times = {"idle_s": 0.0, "busy_s": 0.0} | (spent or {})
        self.follower.handle(VersionLoaded(version, "e", load_s, update_s, **times))

    def iteration(self, iteration: int, score: float = 0.5) -> None:
        self.follower.handle(IterationTrained(iteration, {"critic/score/mean": score}))

    def announce(self, version: int, prompts: int = 4) -> None:
        self.follower.handle(ValidationAnnounced(version, prompts))

    def validated(self, version: int, prompts: range = range(4), score: float = 1.0) -> pa.Table:
        rows = [
            {
                "iteration": version,
                "data_source": "countdown",
                "uid": f"val-{prompt}",
                "prompt": "[]",
                "response": f"answer {prompt}.{sample}",
                "score": score * (prompt % 2),
                "reward_parts": None,
                "reward_error": None,
                "generate_s": 1.0 + prompt,
            }
            for prompt in prompts
            for sample in range(2)
        ]
        table = pa.Table.from_pylist(rows)
        seconds = max(row["generate_s"] for row in rows)
        self.follower.handle(ValidationScored(version, prompt_scores(table), seconds))
        return table

    def begun(self, version: int) -> None:
        self.follower.handle(AttemptBegun(version))

    def failed(self, reason: str) -> None:
        self.follower.handle(AttemptFailed(reason))

    def saving(self, version: int) -> None:
        self.follower.handle(CheckpointBegun(version))

    def done(self, version: int, stopped: bool = False) -> None:
        self.follower.handle(TrainingEnded(version, stopped))

    @property
    def numbers(self) -> list[int]:
        return [iteration for iteration, _ in self.tracker.logged]

    @property
    def records(self) -> dict[int, dict[str, float]]:
        return dict(self.tracker.logged)


def test_one_complete_record_per_iteration() -> None:
    run = Run()
    for iteration in (1, 2, 3):
        run.prompts(iteration)
        run.loaded(iteration - 1, load_s=0.1, update_s=3.0)
        run.loaded(iteration - 1, load_s=0.4, update_s=2.0)
        run.iteration(iteration, score=iteration / 10)
        assert run.numbers[-1] == iteration
    run.done(3)
    assert run.numbers == [1, 2, 3]
    assert run.records[2] == {
        "prompts/truncated": 2.0,
        "timing_s/update_weights": 3.0,
        "timing_s/load_weights": 0.4,
        "rollout/engines_loaded": 2,
        "critic/score/mean": 0.2,
    }
    assert run.follower.done is not None and run.follower.done.version == 3


def test_validation_is_merged_into_its_iteration() -> None:
    run = Run(iterations=3, test_freq=2, validation=True)
    run.announce(0)
    run.validated(0, range(2))
    assert run.numbers == []
    run.validated(0, range(2, 4))
    assert run.numbers == [0]  # the initial policy has no iteration of its own
    run.iteration(1)
    assert run.numbers == [0, 1] and CORE not in run.records[1]
    run.announce(2)
    run.iteration(2)
    run.validated(2, range(3))
    assert run.numbers == [0, 1]
    run.validated(2, range(3, 4))
    assert run.numbers == [0, 1, 2]
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5
    assert run.records[2]["timing_s/testing"] == 4.0
    run.iteration(3)
    run.announce(3)
    run.validated(3)
    run.done(3)
    assert run.numbers == [0, 1, 2, 3]
    assert run.records[3]["critic/score/mean"] == 0.5 and run.records[3][CORE] == 0.5


def test_chunks_of_a_validation_count_as_one() -> None:
    run = Run(validation=True)
    run.announce(0)
    parts = [run.validated(0, range(1)), run.validated(0, range(1, 4))]
    expected = reduce([validation_metrics(prompt_scores(pa.concat_tables(parts)))])
    assert run.records[0] == expected | {"timing_s/testing": 4.0}


def test_a_validation_quicker_than_its_iterations_message_is_not_lost() -> None:
    run = Run(iterations=4, test_freq=2, validation=True)
    run.iteration(1)
    run.announce(2)
    run.validated(2)
    assert run.numbers == [1]
    run.iteration(2)
    assert run.numbers == [1, 2]
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5
    run.iteration(3)
    assert run.numbers == [1, 2, 3]


@pytest.mark.parametrize("announced_first", [True, False])
def test_data_that_ends_early(announced_first: bool) -> None:
    run = Run(iterations=100, validation=True)
    run.iteration(1)
    if announced_first:
        run.announce(2)
        run.iteration(2)
        assert run.numbers == [1]
    else:
        run.iteration(2)
        run.announce(2)
    run.validated(2)
    run.done(2)
    assert run.numbers[-1] == 2 and set(run.numbers) == {1, 2}
    assert run.records[2]["critic/score/mean"] == 0.5 and run.records[2][CORE] == 0.5


def test_a_stopped_run_logs_the_iteration_whose_validation_never_comes() -> None:
    run = Run(iterations=9, test_freq=2, validation=True)
    run.iteration(1)
    run.announce(2)
    run.iteration(2)
    run.validated(2, range(1))
    assert run.numbers == [1]
    run.done(2, stopped=True)
    run.done(2, stopped=True)  # every train worker says so
    assert run.numbers == [1, 2]
    assert run.records[2] == {"critic/score/mean": 0.5}


def test_restarted_train_workers_repeat_iterations() -> None:
    run = Run(iterations=9, test_freq=2, validation=True)
    run.iteration(1)
    run.announce(2)
    run.iteration(2)
    run.validated(2)
    run.iteration(3)
    run.announce(4)
    run.iteration(4, score=0.1)
    run.validated(4, range(3), score=9.0)  # cut off: the workers restart from version 2
    run.iteration(3)
    run.announce(4)
    run.validated(4, range(2))
    run.iteration(4, score=0.7)
    run.validated(4, range(2, 4))
    assert run.numbers == [1, 2, 3, 3, 4]
    assert run.records[4]["critic/score/mean"] == 0.7 and run.records[4][CORE] == 0.5


def test_an_iteration_is_logged_even_when_a_restart_cut_its_validation_off() -> None:
    run = Run(iterations=9, test_freq=2, validation=True)
    run.iteration(1)
    run.announce(2)
    run.iteration(2)
    # The workers restart from version 2, which is not validated again.
    run.iteration(3)
    assert run.numbers == [1, 2, 3]


def ahead(staleness: int, dynamic: int | None = None) -> Run:
    run = Run()
    schedule = Schedule(9, 2, 4, True, True, 2, staleness, dynamic)
    run.follower = Follower(run.tracker, run.keeper, schedule, 2, 0, lambda split, iteration, count: [])
    return run


def test_records_stay_in_order_while_the_trainer_is_ahead_of_a_validation() -> None:
    run = ahead(staleness=2)
    run.iteration(1)
    run.announce(2)
    for iteration in (2, 3):
        run.iteration(iteration, score=iteration / 10)
    assert run.numbers == [1]
    run.validated(2)
    assert run.numbers == [1, 2, 3]
    assert CORE in run.records[2] and CORE not in run.records[3]
    # The next one is due at version 4, whose record comes before and after those of others.
    run.announce(4)
    for iteration in (4, 5, 6):
        run.iteration(iteration)
    assert run.numbers == [1, 2, 3]
    run.validated(4)
    assert run.numbers == [1, 2, 3, 4, 5]  # 6 is validated too
    assert CORE in run.records[4] and run.records[4]["critic/score/mean"] == 0.5


@pytest.mark.parametrize(("dynamic", "lag"), [(None, 2), (3, 3)])
def test_a_validation_that_a_restart_cut_off_is_not_waited_for(dynamic: int | None, lag: int) -> None:
    run = ahead(staleness=2, dynamic=dynamic)
    for iteration in range(1, 3 + lag):
        run.iteration(iteration)
    assert run.numbers == [1]
    run.iteration(3 + lag)
    # Nothing later than this can be trained before version 2 has been validated.
    assert run.numbers[:3] == [1, 2, 3]


def test_what_an_engine_loads_late_belongs_to_the_next_record() -> None:
    run = ahead(staleness=1)
    run.iteration(1)
    run.loaded(0, load_s=0.7)  # the trainer has the rows of iteration 2, and of more, already
    run.loaded(1, load_s=0.3)
    run.iteration(2)
    run.announce(2)
    run.validated(2)
    assert run.records[2]["timing_s/load_weights"] == 0.7 and run.records[2]["rollout/engines_loaded"] == 2


def test_idle_engines_are_counted_together() -> None:
    run = Run()
    run.loaded(0, update_s=None, spent={"idle_s": 50.0, "busy_s": 1.0})
    run.iteration(1)
    run.loaded(1, spent={"idle_s": 1.0, "busy_s": 3.0})
    run.loaded(1, spent={"idle_s": 4.0, "busy_s": 2.0})
    run.iteration(2)
    assert "perf/rollout_idle" not in run.records[1], "engines were starting"
    assert run.records[2]["perf/rollout_idle"] == 0.5


def test_samples() -> None:
    run = Run(iterations=20, validation=True, log_samples=3)
    run.announce(0)
    run.validated(0)
    assert run.tracker.sampled == [(0, [{"val": 0, "number": i} for i in range(3)])]
    for iteration in range(1, 20):
        run.iteration(iteration)
    assert run.tracker.sampled[1:] == [(10, [{"train": 10, "number": i} for i in range(3)])]
    silent = Run(iterations=20, validation=True, log_samples=0)
    silent.announce(0)
    silent.validated(0)
    silent.iteration(10)
    assert silent.tracker.sampled == []


def test_the_status_says_what_is_going_on() -> None:
    run = Run(validation=True)
    run.announce(0)
    run.loaded(0)
    assert run.tracker.said == ["validating policy version 0", "iteration 1: generating"]
    run.announce(3)
    run.loaded(3)
    assert run.tracker.said[2:] == ["validating policy version 3"]


def test_checkpoints_and_records_reach_their_keeper() -> None:
    run = Run()
    run.iteration(1)
    for rank in (1, 0):
        run.follower.handle(CheckpointSaved(1, rank, 2))
    run.iteration(2)
    assert run.keeper.recorded == run.numbers == [1, 2] and run.keeper.parts == [(1, 1, 2), (1, 0, 2)]


# restarted train workers


def test_a_restart_is_told_with_the_first_reason() -> None:
    run = Run()
    assert not run.follower.training
    run.begun(0)
    assert run.follower.training and not run.tracker.noticed
    run.failed("the process of train rank 1 ended")
    assert not run.follower.training
    run.failed("StaleAttempt: a consequence")
    run.begun(4)
    assert run.tracker.noticed == [
        "restarted the train workers from iteration 4 because the process of train rank 1 ended"
    ]
    assert run.follower.training and run.keeper.restarts == 1
    run.begun(4)
    assert run.tracker.noticed[1] == "restarted the train workers from iteration 4 because they failed"


def test_repeated_iterations_are_told_as_if_there_had_been_no_restart() -> None:
    def half(run: Run, upto: int) -> None:
        for iteration in range(1, upto + 1):
            run.prompts(iteration)
            run.loaded(iteration - 1)
            run.iteration(iteration)

    whole, killed = Run(), Run()
    whole.begun(0)
    half(whole, 3)
    killed.begun(0)
    half(killed, 2)
    # Parts of iteration 3 are known when the workers fail.
    killed.prompts(3)
    killed.loaded(2)
    killed.failed("a reason")
    killed.begun(1)
    for iteration in (2, 3):
        killed.prompts(iteration)
        killed.loaded(iteration - 1)
        killed.iteration(iteration)
    assert killed.records == whole.records
    assert killed.numbers == [1, 2, 2, 3]


def test_what_a_checkpoint_covers_is_recorded_before_it_is_saved() -> None:
    """Also where the validation is still awaited: a run that goes on from there trains that iteration no more."""
    run = Run(iterations=4, test_freq=2, validation=True)
    run.begun(0)
    run.iteration(1)
    run.saving(1)
    assert run.numbers == [1] and run.tracker.kept == []
    run.announce(2)
    run.iteration(2, score=0.25)
    run.saving(2)
    assert run.numbers == [1] and run.tracker.kept == [(2, {"critic/score/mean": 0.25})]
    run.validated(2)
    assert run.numbers == [1, 2] and run.records[2][CORE] == 0.5 and run.records[2]["critic/score/mean"] == 0.25


@pytest.mark.parametrize("same_driver", [True, False])
def test_a_validation_that_was_cut_off_is_made_again_and_joins_its_iteration(same_driver: bool) -> None:
    run = Run(iterations=4, test_freq=2, validation=True)
    run.begun(0)
    run.iteration(1)
    run.announce(2)
    run.iteration(2, score=0.25)
    run.saving(2)
    run.validated(2, range(0, 2))
    run.iteration(3)
    if not same_driver:
        other = Run(iterations=4, test_freq=2, validation=True)
        other.tracker.kept = run.tracker.kept
        run = other
    run.begun(2)
    run.announce(2)
    run.validated(2)
    assert run.records[2] == {"critic/score/mean": 0.25} | {
        name: value for name, value in run.records[2].items() if name != "critic/score/mean"
    }
    assert run.records[2][CORE] == 0.5
    run.iteration(3)
    assert run.numbers[-2:] == [2, 3]
