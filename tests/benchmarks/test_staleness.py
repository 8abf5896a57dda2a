"""The parts of the staleness benchmark that need no Ray: its runs, what is read of them, and the verdict."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import staleness
from benchmarks.staleness_report import Case, Outcome, complaints, read_run, summaries
from jobs import demo
from pipeline.config import load_config
from pipeline.derived import rollout_correction
from pipeline.plan.checks import check
from tests.track.run_folders import write_run

ITERATIONS = 8
ACC, STEP = "val-core/countdown/acc/mean@1", "timing_s/step"


def records(gain: float, case: Case, seconds: float = 2.0, iterations: int = ITERATIONS) -> list[dict[str, Any]]:
    """A run of rising accuracy, all of whose rows are as old as they may be from the start."""
    made: list[dict[str, Any]] = [{"iteration": 0, ACC: 0.3}]
    for number in range(1, iterations + 1):
        share = {f"training/staleness/share/{case.max_staleness}": 1.0} if case.max_staleness else {}
        made.append(
            {
                "iteration": number,
                ACC: 0.3 + gain * number / iterations,
                "critic/score/mean": 0.4 + gain * number,
                STEP: 60.0 if number == 1 else seconds,
                "training/staleness/mean": float(case.max_staleness),
                "training/rollout_log_probs_diff_mean": 0.01 * case.max_staleness,
                **share,
            }
        )
        if case.corrected and case.max_staleness:
            made[-1]["rollout_corr/rollout_is_eff_sample_size"] = 0.9
    return made


def outcome(bound: int, final: float, seed: int = 1, corrected: bool = True, **more: Any) -> Outcome:
    given: dict[str, Any] = {"start": 0.3, "age": float(bound), "ages": {bound: 1.0}, "seconds": 2.0, "averages": {}}
    curve = ([1, 2], [0.3, final])
    return Outcome(Case(bound, corrected), seed, final=final, reward=curve, validation=curve, **given | more)


def series(bound: int, finals: list[float], corrected: bool = True) -> list[Outcome]:
    return [outcome(bound, final, seed, corrected) for seed, final in enumerate(finals)]


def test_all_cases_of_a_seed_run_before_the_next_seed() -> None:
    order = staleness.grid([4, 0, 1, 2], [3, 5], None)
    assert len(order) == 14 and [seed for seed, _ in order] == [3] * 7 + [5] * 7
    cases = [case for _, case in order[:7]]
    assert cases == [case for _, case in order[7:]]
    bounds = [(case.max_staleness, case.corrected) for case in cases]
    assert bounds == [(0, True), (1, True), (1, False), (2, True), (2, False), (4, True), (4, False)]
    assert len({case.name for case in cases}) == 7
    assert [case.name for _, case in staleness.grid([0, 1, 4], [3], [4])] == [
        "staleness-0",
        "staleness-1",
        "staleness-4",
        "staleness-4-uncorrected",
    ]


@pytest.mark.parametrize(("case", "weights"), [(Case(0), "none"), (Case(2), "token"), (Case(2, False), "none")])
def test_settings_of_a_run_are_sound_and_correct_what_they_should(case: Case, weights: str, tmp_path: Path) -> None:
    shared = staleness.common(tmp_path / "data", tmp_path / "model", 40, ["actor.optim.lr=7e-5", "rollout.n=4"])
    config = load_config(staleness.settings(shared, case, 3, tmp_path / "runs" / "name"))
    # The model need not be here for its settings to be judged.
    config.model.path = "org/model"
    check(config)
    assert rollout_correction(config).rollout_is == weights
    assert config.algorithm.max_staleness == case.max_staleness and config.actor.old_log_probs == "recompute"
    trainer = config.trainer
    assert (trainer.seed, trainer.total_training_steps, trainer.test_freq) == (3, 40, 5)
    assert Path(trainer.default_local_dir) / trainer.experiment_name == tmp_path / "runs" / "name"
    # What is given at the end holds.
    assert config.actor.optim.lr == 7e-5 and config.rollout.n == 4


def test_the_inputs_are_those_of_the_demo_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, Path]] = []
    monkeypatch.setattr(demo, "step", lambda job, *words: steps.append((job, Path.cwd())))
    data, model = staleness.make_inputs(tmp_path / "inputs")
    assert (data, model) == (tmp_path / "inputs/data/countdown-1", tmp_path / "inputs/models/tiny-sft-1")
    assert steps == [(job, tmp_path / "inputs") for job in ("prepare", "tiny", "sft")]
    assert Path.cwd() != tmp_path / "inputs"


def test_what_is_read_of_a_run(tmp_path: Path) -> None:
    case = Case(2)
    found = read_run(write_run(tmp_path / "run", *records(0.16, case)), case, 7, ITERATIONS)
    assert found is not None and found.seed == 7 and found.start == 0.3
    # The last three of eight.
    assert found.final == pytest.approx(0.3 + 0.16 * 7 / 8)
    # The first iteration, in which everything starts, does not count.
    assert found.seconds == 2.0
    assert found.age == 2.0 and found.ages == {2: 1.0}
    assert found.averages == {"gap": pytest.approx(0.02), "effective": pytest.approx(0.9)}
    assert found.reward[0] == list(range(1, 9)) and found.validation[0] == list(range(9))


def test_a_run_without_its_last_validation_is_not_complete(tmp_path: Path) -> None:
    whole = records(0.1, Case(0))
    assert read_run(tmp_path / "none", Case(0), 1, ITERATIONS) is None
    assert read_run(write_run(tmp_path / "cut", *whole[:-1]), Case(0), 1, ITERATIONS) is None
    last = {key: value for key, value in whole[-1].items() if key != ACC}
    assert read_run(write_run(tmp_path / "pending", *whole[:-1], last), Case(0), 1, ITERATIONS) is None
    assert read_run(write_run(tmp_path / "whole", *whole), Case(0), 1, ITERATIONS) is not None


def test_difference_and_its_standard_error() -> None:
    runs = series(0, [0.40, 0.42, 0.44]) + series(1, [0.37, 0.41, 0.45])
    runs[3] = outcome(1, 0.37, 0, seconds=1.0)
    synchronous, ahead = summaries(runs)
    assert synchronous.difference is synchronous.error is None and synchronous.deviation == pytest.approx(0.02)
    assert ahead.difference == pytest.approx(-0.01)
    assert ahead.error == pytest.approx(math.sqrt(0.02**2 / 3 + 0.04**2 / 3))
    assert ahead.pace == pytest.approx((0.5 + 1 + 1) / 3) and synchronous.pace == 1.0
    (single,) = [found for found in summaries([*series(0, [0.4, 0.5]), outcome(1, 0.3)]) if found.case == Case(1)]
    assert single.deviation is single.error is None and single.difference == pytest.approx(-0.15)


@pytest.mark.parametrize(
    ("finals", "corrected", "worse"),
    [
        ([0.40, 0.40, 0.40], True, True),
        # By more than the standard errors, and less than the floor.
        ([0.445, 0.445, 0.445], True, False),
        # By more than the floor, and less than two standard errors.
        ([0.36, 0.42, 0.48], True, False),
        ([0.60, 0.60, 0.60], True, False),
        # The curve beside it may do what it does.
        ([0.10, 0.10, 0.10], False, False),
    ],
)
def test_only_corrected_cases_below_both_bounds_are_complained_of(
    finals: list[float], corrected: bool, worse: bool
) -> None:
    found = summaries(series(0, [0.45, 0.46, 0.47]) + series(4, finals, corrected))
    told = complaints(found, floor=0.02)
    assert bool(told) == worse
    assert not worse or told == [
        "algorithm.max_staleness=4 with correction ends 0.060 below synchronous, more than 0.020"
    ]


def test_synchronous_runs_that_learn_nothing_prove_nothing() -> None:
    (told,) = complaints(summaries(series(0, [0.31, 0.32, 0.30]) + series(1, [0.31, 0.31, 0.31])), floor=0.02)
    assert told.startswith("the synchronous runs gain 0.010, no more than the difference of 0.020")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with runs that are made up: `go(*options)` gives the exit code and the runs that were made."""
    data, made = tmp_path / "data", list[str]()
    data.mkdir()
    pq.write_table(pa.table({"x": range(500)}), data / "test.parquet")
    go_wrong: set[str] = set()

    def run(arguments: list[str], folder: Path, log: Path, timeout_s: float) -> None:
        made.append(folder.name)
        if folder.name in go_wrong:
            raise RuntimeError(f"{folder.name} failed with exit code 1")
        config = load_config(arguments)
        bound, weights = config.algorithm.max_staleness, config.algorithm.rollout_correction.rollout_is
        case = Case(bound, weights != "none")
        write_run(folder, *records(0.1 + 0.01 * config.trainer.seed, case, seconds=2.0 - 0.5 * bool(bound)))

    def go(*options: str, fail: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        made.clear()
        go_wrong.clear()
        go_wrong.update(fail)
        given = ["--data", str(data), "--model", str(tmp_path / "model"), "--iterations", str(ITERATIONS)]
        return staleness.main(["--out", str(tmp_path / "out"), *given, *options]), list(made)

    monkeypatch.setattr(staleness, "run", run)
    return go


def test_runs_are_made_once_and_reported(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--staleness", "0", "1", "--seeds", "1", "2"
    names = ["staleness-0", "staleness-1", "staleness-1-uncorrected"]
    expected = [f"{name}-seed-{seed}" for seed in (1, 2) for name in names]
    code, made = command(*options, fail=(expected[4],))
    assert code == 1 and made == expected[:5]
    assert f"{expected[4]} failed with exit code 1" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out" / "result.json").read_text())["cases"]) == 3
    code, made = command(*options)
    assert code == 0 and made == expected[4:]
    assert command(*options) == (0, [])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    ahead = result["cases"][1]
    assert ahead["max_staleness"] == 1 and ahead["corrected"] and [run["seed"] for run in ahead["runs"]] == [1, 2]
    assert ahead["difference"] == pytest.approx(0.0) and ahead["of_synchronous_seconds"] == pytest.approx(0.75)
    assert result["puzzles"] == 500 and result["complaints"] == []
    assert (tmp_path / "out" / "curves.png").is_file() and "1.50" in (tmp_path / "out" / "table.txt").read_text()
    # More seeds and bounds join what is there.
    assert command("--staleness", "0", "--seeds", "3") == (0, ["staleness-0-seed-3"])


def test_runs_of_other_settings_are_not_mixed(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--staleness", "0", "--seeds", "1"
    assert command(*options)[0] == 0
    assert command(*options, "--", "actor.optim.lr=1e-3") == (2, [])
    assert "runs with other settings (actor.optim.lr=1e-3)" in capsys.readouterr().err
