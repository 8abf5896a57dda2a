"""Draws the learning curve as a picture, from `metrics.jsonl`.

Large panel: validation score per data source, with its standard error as a band, and training reward (thin as
measured, thick smoothed). Small panels:
response length, the gap between engine and trainer log-probs, and if the run has them, the critic's explained variance
and the KL to the reference policy. For a supervised run, the large panel has the losses, and the small panels are
`SUPERVISED`. Pyplot is not used, because its global state is not safe in a thread.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.track.history import (
    EXPLAINED,
    LOSS,
    REWARD,
    VAL_LOSS,
    column,
    read_history,
    validation_curves,
    write_atomically,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTH = "response_length/mean"
GAPS = {"largest": "training/rollout_log_probs_diff_max", "mean": "training/rollout_log_probs_diff_mean"}
KL = {"in the loss": "actor/kl_loss", "in the reward": "actor/reward_kl_penalty"}
SUPERVISED = {
    "accuracy": ("accuracy", "val_accuracy"),
    "accuracy of the rewards": ("rewards/accuracies", "val_rewards/accuracies"),
    "margin": ("margin", "val_margin"),
    "margin of the rewards": ("rewards/margins", "val_rewards/margins"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr",),
}
"""Title of a small panel to its metrics; a panel without values is left out."""
WORST_EXPLAINED = -1.0
"""Lower end of the axis of explained variance. Early values may be far below 0 and would flatten the later ones."""
SMOOTHED = 0.1
LONGEST = 60
"""Maximum length of a name in a legend, in characters."""
COLOURS = ("#c2410c", "#0f766e", "#7c3aed", "#b91c1c", "#4d7c0f", "#0369a1")


def learning_curve(metrics_jsonl: Path, out: Path, title: str) -> bool:
    """Draw the run's learning curve into the PNG file `out`.

    Returns False, and writes no file, if the run has no iteration yet.

    Raises:
        ValueError: `metrics_jsonl` is damaged.
        OSError: `out` cannot be written.
    """
    records = read_history(metrics_jsonl)
    if records:
        save(draw(records, title), out)
    return bool(records)


def save(figure: "Figure", out: Path) -> None:
    """Write a figure to the PNG file `out`; an older file is replaced in one step."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, image.getvalue())


def draw(records: Sequence[dict[str, Any]], title: str) -> "Figure":
    """Draw the figure of a run; `records` are the lines of `metrics.jsonl` in order."""
    from matplotlib.figure import Figure

    supervised = bool(column(records, LOSS)[1])
    panels = _supervised_panels(records) if supervised else _panels(records)
    rows = len(panels) // 2 + len(panels) % 2
    figure = Figure(figsize=(9, 4.3 + 1.7 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=(2.6, *[1] * rows))
    scores = figure.add_subplot(grid[0, :])
    if supervised:
        _draw_losses(scores, records)
    else:
        _draw_scores(scores, records)
    figure.suptitle(drawable(title), fontsize=15, fontweight="bold", x=0.01, ha="left")
    for number, (name, metrics) in enumerate(panels.items()):
        row = 1 + number // 2
        alone = number % 2 == 0 and number == len(panels) - 1
        axes = figure.add_subplot(grid[row, :] if alone else grid[row, number % 2], sharex=scores)
        _draw_small(axes, records, metrics, name, "step" if supervised else "iteration")
        if metrics is GAPS and any(value > 0 for gap in GAPS.values() for value in column(records, gap)[1]):
            _scale_by_decades(axes)
        if "" in metrics:
            axes.set_ylim(max(axes.get_ylim()[0], WORST_EXPLAINED), 1.05)
    return figure


def _panels(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the small panels of an RL run: title to the metrics by label."""
    panels = {"response length (tokens)": {"mean": LENGTH}, "log-prob gap, engine to trainer": GAPS}
    if column(records, EXPLAINED)[1]:
        panels["share of the returns the critic explains"] = {"": EXPLAINED}
    if kl := {label: name for label, name in KL.items() if column(records, name)[1]}:
        panels["KL to the reference policy"] = kl
    return panels


def _supervised_panels(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the small panels of a supervised run: title to the metrics by label."""
    panels = {}
    for title, names in SUPERVISED.items():
        labels = {("validation" if name.startswith("val_") else "training"): name for name in names}
        if there := {label: name for label, name in labels.items() if column(records, name)[1]}:
            panels[title] = there
    return panels


def _scale_by_decades(axes: "Axes") -> None:
    """Make the y axis logarithmic, from one whole decade to another; only decades have labels."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    axes.set_ylim(10 ** math.floor(low), 10 ** math.ceil(high))
    axes.yaxis.set_minor_formatter(NullFormatter())


def drawable(text: str) -> str:
    """Prepare `text` for matplotlib: dollar signs do not begin formulas, letters that the font lacks become escapes,
    and the middle of a long text is left out."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    text = "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode() for c in text)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    return text.replace("$", r"\$")


def smoothed(values: Sequence[float], share: float = SMOOTHED) -> list[float]:
    """Compute an exponential moving average without bias to the first value.

    Args:
        values: the values.
        share: span of the average as a fraction of the number of values; the span is at least 10 values.
    """
    keep = 1 - 2 / (max(10.0, share * len(values)) + 1)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def _draw_scores(axes: "Axes", records: Sequence[dict[str, Any]]) -> None:
    iterations, rewards = column(records, REWARD)
    if rewards:
        axes.plot(iterations, rewards, color="#94a3b8", linewidth=0.7, alpha=0.7, gid="reward")
        label = "training reward (smoothed)"
        axes.plot(iterations, smoothed(rewards), color="#475569", linewidth=2, label=label, gid="reward smoothed")
    for number, (source, (validated, values, errors)) in enumerate(validation_curves(records).items()):
        ends, colour = [values[0], *values[1:][-1:]], COLOURS[number % len(COLOURS)]
        band(axes, validated, values, errors, colour)
        axes.plot(
            validated,
            values,
            color=colour,
            linewidth=2.2,
            marker="o",
            markersize=6,
            label=f"validation {drawable(source)}: {' → '.join(f'{score:.3f}' for score in ends)}",
            gid=f"validation {source}",
        )
    _finish_large(axes, records, "iteration", "score")


def band(
    axes: "Axes", iterations: Sequence[int], scores: Sequence[float], errors: Sequence[float], colour: str
) -> None:
    """Draw the standard errors of scores as a band around their line; errors that are not known (NaN) leave gaps."""
    if not all(map(math.isnan, errors)):
        low, high = ([score + sign * error for score, error in zip(scores, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(iterations, low, high, color=colour, alpha=0.15, linewidth=0, gid="standard error")


def _draw_losses(axes: "Axes", records: Sequence[dict[str, Any]]) -> None:
    steps, losses = column(records, LOSS)
    axes.plot(steps, losses, color="#94a3b8", linewidth=0.7, alpha=0.7, gid=LOSS)
    axes.plot(steps, smoothed(losses), color="#475569", linewidth=2, label="training loss (smoothed)")
    validated, values = column(records, VAL_LOSS)
    if values:
        label = f"validation loss: {' → '.join(f'{value:.3f}' for value in [values[0], *values[1:][-1:]])}"
        axes.plot(validated, values, color=COLOURS[0], linewidth=2.2, marker="o", label=label, gid=VAL_LOSS)
    _finish_large(axes, records, "step", "loss")


def _finish_large(axes: "Axes", records: Sequence[dict[str, Any]], unit: str, quantity: str) -> None:
    """Set limits, labels and legend of the large panel."""
    first, last = records[0]["iteration"], records[-1]["iteration"]
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.set_xlabel(unit, fontsize=11)
    axes.set_ylabel(quantity, fontsize=11)
    style(axes)
    if axes.lines:
        axes.legend(loc="best", fontsize=11, framealpha=0.9)
    _minutes_above(axes, records)


def _minutes_above(axes: "Axes", records: Sequence[dict[str, Any]]) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    iterations, seconds = column(records, "elapsed_s")
    if len(iterations) < 2 or seconds[-1] <= seconds[0]:
        return
    minutes = [second / 60 for second in seconds]
    ticks = [tick for tick in MaxNLocator(nbins=8).tick_values(minutes[0], minutes[-1]) if tick <= minutes[-1]]
    ticks = [float(tick) for tick in ticks if tick >= minutes[0]]
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    # While an iteration takes long, many minutes fall on one position.
    apart, shown = 0.04 * (iterations[-1] - iterations[0]), dict[float, str]()
    for tick, place in zip(ticks, np.interp(ticks, minutes, iterations).tolist(), strict=True):
        if not shown or place - max(shown) >= apart:
            shown[place] = f"{tick:g}"
    above.set_xticks(list(shown), list(shown.values()))
    above.set_xlabel("minutes", fontsize=11)
    above.spines[["right", "left", "bottom"]].set_visible(False)
    above.tick_params(labelsize=10, colors="#475569")


def _draw_small(
    axes: "Axes", records: Sequence[dict[str, Any]], metrics: dict[str, str], title: str, unit: str
) -> None:
    for number, (label, name) in enumerate(metrics.items()):
        iterations, values = column(records, name)
        axes.plot(iterations, values, color=COLOURS[number + 1], linewidth=1.3, label=label, gid=name)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(unit, fontsize=10)
    if len(metrics) > 1:
        axes.margins(y=0.3)
        axes.legend(fontsize=9, loc="upper left", ncols=len(metrics), frameon=False)
    style(axes)


def style(axes: "Axes") -> None:
    """Set grid, spines and ticks of a panel whose x axis counts iterations."""
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.spines[["right", "top"]].set_visible(False)
    axes.tick_params(labelsize=10)
    axes.locator_params(axis="x", integer=True)
