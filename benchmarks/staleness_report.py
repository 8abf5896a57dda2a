"""The report of `benchmarks.staleness`: numbers of each run, of each case over its seeds, table and figure.

1. The accuracy of a run is the mean of its last `LAST` validations, since a single one has sampling noise, and the
   schedule has by then brought the learning rate down.
2. A case is compared with the synchronous one by the means over seeds. The standard error of the difference of two
   independent means is sqrt(s1^2 / n1 + s0^2 / n0), with s the sample's standard deviation over n seeds.
3. Seconds are compared seed by seed, because runs of one seed follow each other and see the same other load.
"""

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipeline.track.compare import COLOURS
from pipeline.track.history import REWARD, column, read_history, validation_scores, write_atomically
from pipeline.track.plot import smoothed, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAST = 3
"""Validations at the end of a run whose mean is its accuracy."""
AGE, SHARE = "training/staleness/mean", "training/staleness/share/"
STEP = "timing_s/step"
AVERAGED = {
    "gap": "training/rollout_log_probs_diff_mean",
    "weight": "rollout_corr/rollout_is_mean",
    "held": "rollout_corr/rollout_is_ratio_fraction_high",
    "effective": "rollout_corr/rollout_is_eff_sample_size",
}
"""Further metrics whose mean over the iterations is reported; only corrected runs have metrics of the weights."""

Curve = tuple[list[int], list[float]]
"""Iterations, and the values at them."""


@dataclass(frozen=True, order=True)
class Case:
    """One way to train."""

    max_staleness: int
    corrected: bool = True
    """True for the default correction; without staleness there is nothing to correct."""

    @property
    def name(self) -> str:
        return f"staleness-{self.max_staleness}{'' if self.corrected else '-uncorrected'}"


SYNCHRONOUS = Case(0)


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    case: Case
    seed: int
    start: float
    """Validation accuracy of the model that all runs begin with."""
    final: float
    """Mean of the last `LAST` validations."""
    age: float
    """Mean age of the rows in versions, over all iterations."""
    ages: dict[int, float]
    """Share of the rows of each age."""
    seconds: float
    """Median seconds of an iteration."""
    averages: dict[str, float]
    """Means of the metrics of `AVERAGED` that the run has."""
    reward: Curve
    validation: Curve


@dataclass(frozen=True)
class Summary:
    """A case over its seeds, with the synchronous one for comparison."""

    case: Case
    outcomes: tuple[Outcome, ...]
    """Results of the case, at least one."""
    synchronous: tuple[Outcome, ...]

    @property
    def final(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(outcome.final for outcome in self.outcomes)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the accuracy over the seeds; None for a single one."""
        return _deviation(self.outcomes)

    @property
    def difference(self) -> float | None:
        """Mean accuracy less the synchronous one; None for the synchronous case, and without one."""
        if self.case == SYNCHRONOUS or not self.synchronous:
            return None
        return self.final - statistics.fmean(outcome.final for outcome in self.synchronous)

    @property
    def error(self) -> float | None:
        """Standard error of the difference; None without a difference, or if either side has a single seed."""
        own, other = self.deviation, _deviation(self.synchronous)
        if self.difference is None or own is None or other is None:
            return None
        return math.sqrt(own**2 / len(self.outcomes) + other**2 / len(self.synchronous))

    @property
    def pace(self) -> float | None:
        """Ratio of an iteration's seconds to the synchronous run's of the same seed; mean over the seeds of both."""
        seconds = {outcome.seed: outcome.seconds for outcome in self.synchronous}
        ratios = [outcome.seconds / seconds[outcome.seed] for outcome in self.outcomes if outcome.seed in seconds]
        return statistics.fmean(ratios) if ratios else None

    def mean(self, name: str) -> float | None:
        """Average `age`, `seconds`, `start`, or one of `AVERAGED` over the seeds; returns None if no run has it."""
        if name in AVERAGED:
            values = [outcome.averages[name] for outcome in self.outcomes if name in outcome.averages]
        else:
            values = [getattr(outcome, name) for outcome in self.outcomes]
        return statistics.fmean(values) if values else None

    def allowed(self, floor: float) -> float:
        """Return how far the accuracy may be below the synchronous one: two standard errors, and at least `floor`."""
        return max(floor, 2 * (self.error or 0.0))


def read_run(folder: Path, case: Case, seed: int, iterations: int) -> Outcome | None:
    """Read the run in `folder`; returns None if it does not exist, or has not come to its last validation.

    Raises:
        ValueError: its `metrics.jsonl` is damaged, or holds fewer than `LAST` validations after the first.
    """
    records = read_history(folder / "metrics.jsonl")
    if not records or records[-1]["iteration"] < iterations or not validation_scores(records[-1]):
        return None
    scored = [(record["iteration"], validation_scores(record)) for record in records]
    points = [(iteration, statistics.fmean(scores.values())) for iteration, scores in scored if scores]
    if points[0][0] != 0 or len(points) <= LAST:
        raise ValueError(
            f"{folder} was validated at iterations {', '.join(str(iteration) for iteration, _ in points)}; iteration 0 "
            f"and at least {LAST} later ones are needed, so leave trainer.val_before_train as it is and train longer"
        )

    def average(name: str) -> float | None:
        values = column(records, name)[1]
        return statistics.fmean(values) if values else None

    shares = {int(name.removeprefix(SHARE)) for record in records for name in record if name.startswith(SHARE)}
    return Outcome(
        case=case,
        seed=seed,
        start=points[0][1],
        final=statistics.fmean(accuracy for _, accuracy in points[-LAST:]),
        age=average(AGE) or 0.0,
        ages={age: average(f"{SHARE}{age}") or 0.0 for age in sorted(shares)} or {0: 1.0},
        seconds=statistics.median(column(records, STEP)[1]),
        averages={name: value for name, key in AVERAGED.items() if (value := average(key)) is not None},
        reward=column(records, REWARD),
        validation=([iteration for iteration, _ in points], [accuracy for _, accuracy in points]),
    )


def summaries(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Summarise each case that has a run: the corrected ones by staleness, each followed by its uncorrected one."""
    synchronous = tuple(outcome for outcome in outcomes if outcome.case == SYNCHRONOUS)
    cases = sorted({outcome.case for outcome in outcomes}, key=lambda case: (case.max_staleness, not case.corrected))
    return [
        Summary(case, tuple(outcome for outcome in outcomes if outcome.case == case), synchronous) for case in cases
    ]


def complaints(found: Sequence[Summary], floor: float) -> list[str]:
    """Describe the corrected cases that are too far below the synchronous one, and the reason if a comparison is
    meaningless."""
    problems = []
    for summary in found:
        difference, allowed = summary.difference, summary.allowed(floor)
        if difference is not None and summary.case.corrected and -difference > allowed:
            problems.append(
                f"algorithm.max_staleness={summary.case.max_staleness} with correction ends {-difference:.3f} below "
                f"synchronous, more than {allowed:.3f}"
            )
        if summary.case == SYNCHRONOUS:
            gain = summary.final - (summary.mean("start") or 0.0)
            widest = max((other.allowed(floor) for other in found if other.case.corrected), default=floor)
            if gain <= widest:
                problems.append(
                    f"the synchronous runs gain {gain:.3f}, no more than the difference of {widest:.3f} that would "
                    "pass for noise, so they tell nothing apart; raise --iterations or actor.optim.lr"
                )
    return problems


def notes(found: Sequence[Summary]) -> list[str]:
    """Write notes on cases whose rows were much younger than the bound allows."""
    return [
        f"{summary.case.name}: rows are {age:.2f} versions old on average, less than half of the bound: engines are "
        "not that far ahead of training"
        for summary in found
        if (age := summary.mean("age") or 0.0) < summary.case.max_staleness / 2
    ]


def table(found: Sequence[Summary]) -> Table:
    """Show a line for each case; standard deviation over seeds and standard error of the difference follow `±`."""
    result = Table()
    for name in ("max_staleness", "correction", "seeds", "rows' age", "log-prob gap", "held", "effective", "accuracy"):
        result.add_column(name, justify="right")
    for name in ("to synchronous", "s/iteration", "of synchronous"):
        result.add_column(name, justify="right")
    for summary in found:
        case = summary.case
        correction = ("on" if case.corrected else "off") if case.max_staleness else "-"
        result.add_row(
            str(case.max_staleness),
            correction,
            str(len(summary.outcomes)),
            _shown(summary.mean("age"), ".2f"),
            _shown(summary.mean("gap"), ".1e"),
            _shown(summary.mean("held"), ".1%"),
            _shown(summary.mean("effective"), ".3f"),
            _shown(summary.final, ".3f") + _after(summary.deviation),
            _shown(summary.difference, "+.3f") + _after(summary.error),
            _shown(summary.mean("seconds"), ".2f"),
            _shown(summary.pace, ".2f"),
        )
    return result


def as_json(found: Sequence[Summary]) -> list[dict[str, Any]]:
    """Collect the data of the table and the figure, case by case, with every run."""
    return [
        {
            "max_staleness": summary.case.max_staleness,
            "corrected": summary.case.corrected,
            "final": summary.final,
            "deviation": summary.deviation,
            "difference": summary.difference,
            "standard_error": summary.error,
            "of_synchronous_seconds": summary.pace,
            **{name: summary.mean(name) for name in ("start", "age", "seconds", *AVERAGED)},
            "runs": [
                {
                    "seed": outcome.seed,
                    "start": outcome.start,
                    "final": outcome.final,
                    "age": outcome.age,
                    "ages": outcome.ages,
                    "seconds": outcome.seconds,
                    **outcome.averages,
                    "reward": outcome.reward,
                    "validation": outcome.validation,
                }
                for outcome in summary.outcomes
            ],
        }
        for summary in found
    ]


def draw(found: Sequence[Summary]) -> "Figure":
    """Draw a column for each staleness: above the training reward (smoothed), below the validation accuracy.

    Lines are means over the seeds, bands one standard deviation. Lines are solid with correction, dashed without, and
    grey for the synchronous runs.
    """
    from matplotlib.figure import Figure

    by_case = {summary.case: summary for summary in found}
    bounds = sorted({case.max_staleness for case in by_case} - {0}) or [0]
    figure = Figure(figsize=(1.5 + 3.8 * len(bounds), 6.6), layout="constrained")
    axes = figure.subplots(2, len(bounds), sharex=True, sharey="row", squeeze=False)
    for place, bound in enumerate(bounds):
        colour = COLOURS[place % len(COLOURS)]
        for case in dict.fromkeys((SYNCHRONOUS, Case(bound), Case(bound, corrected=False))):
            if case not in by_case:
                continue
            label = ("corrected" if case.corrected else "not corrected") if case.max_staleness else "synchronous"
            line = {"color": colour if case.max_staleness else "#64748b", "label": label, "gid": case.name}
            dash = "solid" if case.corrected else (0, (4, 2))
            outcomes = by_case[case].outcomes
            rewards = [(iterations, smoothed(values)) for iterations, values in (run.reward for run in outcomes)]
            _band(axes[0, place], rewards, linestyle=dash, **line)
            _band(axes[1, place], [run.validation for run in outcomes], linestyle=dash, marker="o", **line)
        axes[0, place].set_title(f"max_staleness={bound}", fontsize=12, loc="left")
        axes[1, place].set_xlabel("iteration", fontsize=11)
        axes[1, place].legend(loc="lower right", fontsize=10, handlelength=3)
    for row, name in enumerate(("training reward (smoothed)", "validation accuracy")):
        axes[row, 0].set_ylabel(name, fontsize=11)
    for panel in axes.flat:
        style(panel)
    return figure


def save(found: Sequence[Summary], out: Path) -> None:
    """Draw the figure into the PNG `out`."""
    image = io.BytesIO()
    draw(found).savefig(image, format="png", dpi=130)
    write_atomically(out, image.getvalue())


def _band(axes: "Axes", curves: Sequence[Curve], **line: Any) -> None:
    """Draw the mean of the curves at iterations that all of them have, with one standard deviation around it."""
    known = [dict(zip(*curve, strict=True)) for curve in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in known)))
    values = [[curve[iteration] for curve in known] for iteration in shared]
    means = [statistics.fmean(several) for several in values]
    axes.plot(shared, means, linewidth=2, markersize=4, **line)
    if len(known) > 1:
        spread = [statistics.stdev(several) for several in values]
        low, high = ([mean + sign * s for mean, s in zip(means, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(shared, low, high, color=line["color"], alpha=0.13, linewidth=0)


def _deviation(outcomes: Sequence[Outcome]) -> float | None:
    return statistics.stdev(outcome.final for outcome in outcomes) if len(outcomes) > 1 else None


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _after(value: float | None) -> str:
    return "" if value is None else f" ± {value:.3f}"
