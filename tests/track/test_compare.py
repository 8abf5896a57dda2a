"""Runs side by side: the figure and the table hold the numbers of their `metrics.jsonl`, and only like runs meet."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.track.compare import COLOURS, DASHES, MARKERS, Run, draw, read_runs, table
from pipeline.track.history import Curve
from pipeline.track.plot import save, smoothed
from tests.track.run_folders import write_run

ACC = "val-core/countdown/acc/mean@1"


def _records(gain: float, variable: str = "acc", source: str = "countdown") -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"iteration": 0, f"val-core/{source}/{variable}/mean@1": 0.25}]
    for iteration in range(1, 7):
        record: dict[str, Any] = {"iteration": iteration, "critic/score/mean": gain * iteration}
        # The first iteration waits for the engines; a median does not see it.
        record["timing_s/step"] = 60.0 if iteration == 1 else 2.0 + gain
        if iteration % 2 == 0:
            record[f"val-core/{source}/{variable}/mean@1"] = 0.25 + gain * min(iteration, 4)
            record[f"val-aux/{source}/reward/mean@1"] = 9.0
        records.append(record)
    return records


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / name, *_records(gain)) for name, gain in (("ppo", 0.1), ("grpo", 0.05))]


def _line(figure: Any, gid: str) -> Any:
    (line,) = [line for axes in figure.axes for line in axes.lines if line.get_gid() == gid]
    return line


def test_the_figure_holds_the_runs(folders: list[Path]) -> None:
    figure = draw(read_runs(folders))
    left, right = figure.axes
    for name, gain in (("ppo", 0.1), ("grpo", 0.05)):
        validation = _line(figure, name)
        assert validation.axes is left and list(validation.get_xdata()) == [0, 2, 4, 6]
        assert list(validation.get_ydata()) == pytest.approx([0.25, *(0.25 + gain * x for x in (2, 4, 4))])
        raw, thick = _line(figure, f"{name} raw"), _line(figure, f"{name} smoothed")
        assert raw.axes is right and list(raw.get_ydata()) == pytest.approx([gain * x for x in range(1, 7)])
        assert list(thick.get_ydata()) == pytest.approx(smoothed([gain * x for x in range(1, 7)]))
        assert raw.get_alpha() < 0.5 and raw.get_color() == thick.get_color() == validation.get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ppo", "grpo"]
    assert left.get_title(loc="left") == "validation accuracy" and left.get_ylabel() == "accuracy (countdown)"
    assert all(axes.get_xlabel() == "iteration" and axes.get_ylabel() for axes in figure.axes)


def test_five_runs_can_be_told_apart_without_colours() -> None:
    runs = [Run(str(i), {"s": "acc"}, Curve([0, 1], [0.1, 0.2], [0.01, 0.01]), ([1], [0.3]), None) for i in range(5)]
    lines = draw(runs).axes[0].lines
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 5
    assert len(COLOURS) == len(set(COLOURS)) == len(set(MARKERS)) == len(set(DASHES))


def test_the_table_tells_first_last_best_and_pace(folders: list[Path]) -> None:
    columns = [list(column.cells) for column in table(read_runs(folders, ["PPO", "GRPO"])).columns]
    assert columns == [
        ["PPO", "GRPO"],
        ["0.250 (0)", "0.250 (0)"],
        ["0.650 (6)", "0.450 (6)"],
        # Reached in iteration 4 already.
        ["0.650 (4)", "0.450 (4)"],
        ["2.10", "2.05"],
    ]


def test_several_sources_are_averaged_where_all_are_known(tmp_path: Path) -> None:
    first = {"iteration": 0, "val-core/a/acc/mean@1": 0.2, "val-core/b/reward/mean@1": 0.6}
    first |= {"val-aux/a/acc/stderr@1": 0.03, "val-aux/b/reward/stderr@1": 0.04}
    run = write_run(tmp_path / "run", first, {"iteration": 5, "val-core/a/acc/mean@1": 0.9}, first | {"iteration": 9})
    (read,) = read_runs([run])
    assert read.judged_by == {"a": "acc", "b": "reward"}
    assert read.validation.iterations == [0, 9] and read.validation.scores == pytest.approx([0.4, 0.4])
    assert read.validation.errors == pytest.approx([0.025, 0.025])
    figure = draw([read])
    assert len(figure.axes[0].collections) == 1
    assert figure.axes[0].get_ylabel() == "score (a, b)" and list(table([read]).columns[4].cells) == ["-"]


def test_equal_folder_names_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", *_records(0.1)) for parent in ("x", "y")]
    assert [run.label for run in read_runs(runs)] == [str(run) for run in runs]


def test_the_picture_is_written_whole(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "compared.png"
    save(draw(read_runs(folders)), out)
    save(draw(read_runs(folders[:1])), out)
    assert out.read_bytes().startswith(b"\x89PNG") and [path.name for path in out.parent.iterdir()] == [out.name]


def test_runs_that_were_judged_differently_are_refused(folders: list[Path], tmp_path: Path) -> None:
    for kind in ({"variable": "reward"}, {"source": "gsm8k"}):
        other = write_run(tmp_path / f"other-{len(kind)}-{next(iter(kind))}", *_records(0.1, **kind))
        with pytest.raises(ValueError, match="ppo was validated by acc of countdown, but other.* by .* of .*val_files"):
            read_runs([folders[0], other])


def test_a_run_without_validation_has_a_reward_and_no_accuracy(folders: list[Path], tmp_path: Path) -> None:
    blind = write_run(tmp_path / "blind", {"iteration": 1, "critic/score/mean": 0.5, "timing_s/step": 1.0})
    runs = read_runs([blind, *folders])
    figure = draw(runs)
    assert list(_line(figure, "blind").get_xdata()) == [] and list(_line(figure, "blind raw").get_ydata()) == [0.5]
    assert figure.axes[0].get_ylabel() == "accuracy (countdown)" and len(figure.legends[0].get_texts()) == 3
    assert [next(iter(column.cells)) for column in table(runs).columns] == ["blind", "-", "-", "-", "1.00"]
    assert draw(read_runs([blind])).axes[0].get_title(loc="left") == "no validation"


def test_what_cannot_be_compared_is_said_in_a_sentence(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for runs, labels, message in (
        ([tmp_path / "gone"], None, "gone is not a folder; give the folders of runs"),
        ([tmp_path / "empty"], None, "empty holds no metrics.jsonl"),
        ([write_run(tmp_path / "young")], None, "young holds an empty metrics.jsonl"),
        (folders, ["PPO"], r"1 labels \(PPO\) for 2 runs"),
        (folders, ["PPO", "PPO"], "two runs are called 'PPO'"),
    ):
        with pytest.raises(ValueError, match=message):
            read_runs(runs, labels)
