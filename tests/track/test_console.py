"""What the terminal shows: plain lines in a log, a bar on a terminal, a table at the end."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.track.console import RunConsole, clock


def _console(total: int | None = 10) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole("demo", total, Console(file=out, width=100)), out


METRICS = {"critic/score/mean": 0.4125, "perf/throughput": 3456.7, "timing_s/step": 4.0}


def test_a_log_gets_one_plain_line_per_iteration() -> None:
    console, out = _console()
    console.start()
    console.status("starting engines")
    console.status("starting engines")
    console.update(0, {"val-core/countdown/reward/mean@1": 0.25})
    console.update(1, METRICS)
    console.status("waiting for rollouts")
    console.update(2, METRICS)
    console.stop()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and "\x1b" not in out.getvalue()
    assert lines[0] == "demo: starting engines"
    assert lines[1].startswith("0/10  val 0.250 (0)")
    assert lines[2].startswith("1/10  reward 0.412  val 0.250 (0)")
    assert "  0:0" in lines[3] and "left 0:0" in lines[3] and "s/it" in lines[3]


def test_lines_fit_80_columns_and_are_kept(tmp_path: Path) -> None:
    out = io.StringIO()
    console = RunConsole("demo", 20000, Console(file=out, width=200), tmp_path / "console.log")
    console.start()
    figures = {"perf/rollout_idle": 0.5, "perf/train_idle": 0.25, "perf/throughput": 123456.0}
    for iteration in (10000, 10001):
        console.update(iteration, METRICS | figures | {"val-core/countdown/reward/mean@1": 0.25})
    console.stop()
    console.summary("finished", [], {"run folder": "runs/demo"})
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and "reward 0.412  val 0.250 (10001)" in lines[1]
    assert (tmp_path / "console.log").read_text().splitlines() == lines


def test_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pipeline.track.console.time.monotonic", lambda: now[0])
    console, out = _console()
    console.start()
    for iteration in range(1, 5):
        now[0] += 60.0
        console.update(iteration, {"timing_s/step": 60.0})
    assert out.getvalue().splitlines()[-1] == "4/10  60.0 s/it  4:00  left 6:00"


def test_a_terminal_gets_a_bar_that_survives_foreign_prints(tmp_path: Path) -> None:
    out = io.StringIO()
    console = RunConsole("demo", 10, Console(file=out, force_terminal=True, width=100), tmp_path / "console.log")
    before = sys.stdout
    console.start()
    console.status("waiting for rollouts of version 3")
    console.update(4, METRICS)
    print("a line of a worker")
    console.stop()
    console.stop()
    assert sys.stdout is before
    text = out.getvalue()
    assert "a line of a worker" in text and "4/10" in text and "reward 0.412" in text
    assert "waiting for rollouts of version 3" in text and "iteration 4/10" not in text
    assert (tmp_path / "console.log").read_text().splitlines()[-1].startswith("4/10  reward 0.412")


def test_summary_tells_before_and_after_and_keeps_commands_whole() -> None:
    console, out = _console()
    records = [
        {"iteration": 0, "elapsed_s": 1.0, "val-core/countdown/reward/mean@1": 0.3},
        {"iteration": 1, "elapsed_s": 50.0},
        {"iteration": 2, "elapsed_s": 3700.0, "val-core/countdown/reward/mean@1": 0.45},
    ]
    command = "python -m jobs.train " + "experiment=countdown_cpu " * 8
    console.summary("finished", records, {"to continue": command}, ["mlflow lacks records"])
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert "demo: finished" in lines
    assert "validation countdown  0.300 → 0.450  +0.150  (iteration 0 → 2)" in lines
    assert "wall time             1:01:40" in lines
    assert f"to continue           {command}".strip() in lines
    assert "warning: mlflow lacks records" in lines


def test_summary_tells_the_standard_errors() -> None:
    metrics = (
        {"val-core/a/acc/mean@1": score, "val-aux/a/acc/stderr@1": 0.01 * i} for score, i in ((0.3, 3), (0.5, 4))
    )
    records = [{"iteration": i} | named for i, named in enumerate(metrics)]
    for count, line in ((2, "0.300 → 0.500  +0.200 ± 0.050  (iteration 0 → 1)"), (1, "0.300 ± 0.030 (iteration 0)")):
        console, out = _console()
        console.summary("finished", records[:count], {})
        assert f"validation a  {line}" in out.getvalue()


def test_summary_tells_what_a_critic_explains() -> None:
    console, out = _console()
    records = [{"iteration": i, "critic/vf_explained_var": value} for i, value in ((1, -0.5), (2, None), (3, 0.625))]
    console.summary("finished", records, {})
    assert "critic      explains -0.50 → 0.62 of the variance of the returns" in out.getvalue()
    console, out = _console()
    console.summary("finished", [{"iteration": 1}], {})
    assert "critic" not in out.getvalue()


def test_unknown_total_and_bracketed_text_are_printed_as_they_are() -> None:
    console, out = _console(total=None)
    console.status("loading [bold]model[/bold]")
    console.update(3, METRICS)
    assert "demo: loading [bold]model[/bold]" in out.getvalue()
    assert "3  reward" in out.getvalue() and "left" not in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.9, "1:01"), (3600, "1:00:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "console.log"
    log.symlink_to("/dev/full")
    console = RunConsole("demo", 10, Console(file=out, width=100), log=log)
    console.notice("first")
    console.notice("second")
    assert out.getvalue().splitlines() == [
        "demo: first",
        f"demo: {log} cannot be written (No space left on device); lines are only shown here",
        "demo: second",
    ]


def test_a_supervised_run_shows_loss_gradient_and_rate() -> None:
    out = io.StringIO()
    console = RunConsole("warm", 20, Console(file=out, width=200), unit="step")
    metrics = {"loss": 1.23456, "grad_norm": 0.5612, "lr": 1e-5, "perf/throughput": 1234.5, "timing_s/step": 4.0}
    console.update(1, metrics)
    console.update(2, metrics | {"val_loss": 1.3})
    console.update(3, metrics | {"accuracy": 0.75})
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("1/20  loss 1.235  grad norm 0.56  1,234 tok/s  lr 1.0e-05  0:00  left 1:1")
    assert third.startswith("3/20  loss 1.235  acc 0.750  grad norm 0.56  1,234 tok/s") and len(third) <= 80
    assert "  val 1.300  " in second and "val" not in third
    records = [{"iteration": 1, "loss": 2.0}, {"iteration": 2, "loss": 1.0, "val_loss": 1.5, "elapsed_s": 3.0}]
    console.summary("finished", records, {})
    text = out.getvalue()
    assert "loss       2.000 → 1.000  (step 1 → 2)" in text and "val_loss   1.500 → 1.500  (step 2 → 2)" in text
    assert "steps      2" in text
