"""Several runs in one figure and one table, made from their `metrics.jsonl` files.

Left: validation accuracy, with its standard error as a band; right: training reward (faint as measured, thick
smoothed). Each run has its own colour, marker and dash, so the figure can be read without colours. Runs with different
validation data or metrics are refused.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from pipeline.track.history import REWARD, VALIDATION, Curve, column, read_history, validations
from pipeline.track.plot import band, drawable, smoothed, style
from pipeline.track.printable import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = "timing_s/step"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette for all kinds of colour vision, without yellow, which is too light for lines."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = (
    *("solid", (0, (5, 1)), (0, (5, 1, 1, 1)), (0, (2, 1)), (0, (8, 2))),
    *((0, (3, 1, 1, 1, 1, 1)), (0, (1, 1))),
)


@dataclass(frozen=True)
class Run:
    """The compared values of one run."""

    label: str
    judged_by: dict[str, str]
    """The compared metric by data source: `acc`, or `reward` if the reward function gives no `acc`. Empty without
    validation."""
    validation: Curve
    """The validations; a score is the mean over the data sources. All lists are empty without validation."""
    reward: tuple[list[int], list[float]]
    """(Iterations, mean scores of the training responses)."""
    seconds: float | None
    """Median seconds of an iteration; None if no iteration has ended."""


def read_runs(folders: Sequence[Path], labels: Sequence[str] | None = None) -> list[Run]:
    """Read the runs in these folders.

    Args:
        folders: folders of runs, at least one.
        labels: names of the runs, in the same order; None names them by their folders.

    Raises:
        ValueError: the labels do not fit, a folder holds no run, runs were validated differently, or a `metrics.jsonl`
            is damaged.
    """
    if labels is None:
        names = [folder.absolute().name for folder in folders]
        labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    if len(labels) != len(folders):
        raise ValueError(
            f"{len(labels)} labels ({', '.join(labels)}) for {len(folders)} runs; give one label per run, in the runs' "
            "order, separated by commas"
        )
    if repeated := [label for place, label in enumerate(labels) if label in labels[:place]]:
        raise ValueError(f"two runs are called {repeated[0]!r}; give each run once, and a label of its own")
    runs = [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]
    validated = [run for run in runs if run.judged_by]
    for run in validated[1:]:
        if run.judged_by != validated[0].judged_by:
            raise ValueError(
                f"{validated[0].label} was validated by {_sources(validated[0])}, but {run.label} by {_sources(run)}; "
                "only runs with the same data.val_files and reward can be compared"
            )
    return runs


def draw(runs: Sequence[Run]) -> "Figure":
    """Draw the figure that compares `runs`, the result of `read_runs`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, run in enumerate(runs):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        line = {"color": colour, "linestyle": dash, "linewidth": 2, "label": drawable(run.label)}
        band(left, *run.validation, colour)
        left.plot(*run.validation[:2], **line, marker=MARKERS[number % len(MARKERS)], markersize=6, gid=run.label)
        iterations, rewards = run.reward
        right.plot(iterations, rewards, color=colour, linewidth=0.6, alpha=0.25, gid=f"{run.label} raw")
        right.plot(iterations, smoothed(rewards), **line, gid=f"{run.label} smoothed")
    judged_by = next((run.judged_by for run in runs if run.judged_by), {})
    what = "accuracy" if set(judged_by.values()) == {"acc"} else "score"
    left.set_title(f"validation {what}" if judged_by else "no validation", fontsize=12, loc="left")
    left.set_ylabel(f"{what} ({', '.join(map(drawable, judged_by))})", fontsize=11)
    right.set_title("training reward (smoothed; faint as measured)", fontsize=12, loc="left")
    right.set_ylabel("mean score", fontsize=11)
    for axes in (left, right):
        axes.set_xlabel("iteration", fontsize=11)
        style(axes)
    figure.legend(
        handles=left.get_lines(), loc="outside upper center", ncols=min(len(runs), 5), fontsize=11, handlelength=3.5
    )
    return figure


def table(runs: Sequence[Run]) -> Table:
    """Make a table with one row per run: first, last and best validation score, each with its iteration, and median
    seconds per iteration."""
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("run", overflow="fold")
    for name in ("first", "last", "best", "s/iteration"):
        result.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        points = list(zip(*run.validation[:2], strict=True))
        cells = ["-"] * 3
        if points:
            best = max(points, key=lambda point: (point[1], -point[0]))
            cells = [f"{score:.3f} ({iteration})" for iteration, score in (points[0], points[-1], best)]
        result.add_row(printable(run.label), *cells, "-" if run.seconds is None else f"{run.seconds:.2f}")
    return result


def _read(folder: Path, label: str) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folders of runs, such as runs/NAME")
    records = read_history(folder / "metrics.jsonl")
    if not records:
        missing = "an empty" if (folder / "metrics.jsonl").exists() else "no"
        raise ValueError(f"{folder} holds {missing} metrics.jsonl, so it has no run, or one before its first iteration")
    matches = [match for record in records for match in map(VALIDATION.fullmatch, record) if match]
    judged_by = {match["source"]: match["variable"] for match in sorted(matches, key=lambda match: match["source"])}
    scores = {record["iteration"]: validations(record) for record in records}
    # An iteration that lacks a source (all of its rewards failed) would be a mean over other sources than its
    # neighbours.
    validated = {iteration: known for iteration, known in scores.items() if known and known.keys() == judged_by.keys()}
    seconds = column(records, STEP)[1]
    return Run(
        label=label,
        judged_by=judged_by,
        validation=Curve(
            list(validated),
            [statistics.fmean(score for score, _ in known.values()) for known in validated.values()],
            # Sources have prompts of their own, so their errors are independent.
            [math.hypot(*(error for _, error in known.values())) / len(known) for known in validated.values()],
        ),
        reward=column(records, REWARD),
        seconds=statistics.median(seconds) if seconds else None,
    )


def _sources(run: Run) -> str:
    return ", ".join(f"{variable} of {source}" for source, variable in run.judged_by.items())
