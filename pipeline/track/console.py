"""The progress of a run: a live bar on a terminal, one plain line per iteration in a log, a table at the end.

Progress lines fit 80 columns, and every line is also appended to `console.log` in the run's folder.

On a terminal the bar shares the screen with other output (Ray's workers, warnings): rich catches `sys.stdout` and
`sys.stderr` while the bar is alive and puts foreign lines above it. Elsewhere (CI, `ray job submit`) nothing is
redrawn. There the phases are printed until the first iteration, because engine start-up is the longest silence.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.track.balance import advice, idle_shares
from pipeline.track.history import (
    EXPLAINED,
    LOSS,
    REWARD,
    VAL_LOSS,
    column,
    validation_curves,
    validation_scores,
)
from pipeline.track.printable import printable

THROUGHPUT = "perf/throughput"
FIGURES = {
    REWARD: "reward {:.3f}",
    LOSS: "loss {:.3f}",
    "accuracy": "acc {:.3f}",
    "rewards/accuracies": "acc {:.3f}",
    "grad_norm": "grad norm {:.2g}",
    "lr": "lr {:.1e}",
    THROUGHPUT: "{:,.0f} tok/s",
}
"""Metrics that a progress line shows, with their form."""
ORDER = (REWARD, "validation", "pace", THROUGHPUT, "idle")
SUPERVISED_ORDER = (LOSS, "accuracy", "rewards/accuracies", "validation", "grad_norm", THROUGHPUT, "lr", "pace")
"""Figures of a progress line, the most important first."""
STEP = "timing_s/step"
RECENT = 0.8
WIDTH = 80
"""Maximum number of characters of a progress line."""


class RunConsole:
    """Shows the progress of one run. Methods may be called from several threads.

    Args:
        name: the run's name.
        total_iterations: total number of iterations; None if unknown.
        console: the console to print on; None takes standard output.
        log: file to which every line is appended; None for none.
        unit: short word for one iteration.
    """

    def __init__(
        self,
        name: str,
        total_iterations: int | None,
        console: Console | None = None,
        log: Path | None = None,
        unit: str = "it",
    ) -> None:
        self._name, self._total, self._log, self._unit = name, total_iterations, log, unit
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._began = self._last_at = time.monotonic()
        self._first: int | None = None
        self._iteration = 0
        self._step_s: float | None = None
        self._shown: dict[str, str] = {}
        self._status = "starting"

    def start(self) -> None:
        """Begin to show the bar, if the output is a terminal."""
        self._began = self._last_at = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True)
            self._live.start()

    def status(self, text: str) -> None:
        """Show what the run is doing or waiting for."""
        with self._lock:
            changed, self._status = text != self._status, text
            early = changed and self._first is None
        if early:
            self._print(f"{self._name}: {text}")

    def notice(self, text: str) -> None:
        """Show a message, and append it as a line to the log."""
        with self._lock:
            self._status = text
        self._print(f"{self._name}: {text}")

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one iteration."""
        with self._lock:
            now = time.monotonic()
            # The time since the last iteration counts what a step's own clock leaves out, such as validation.
            if self._first is None or iteration <= self._iteration:
                self._step_s = metrics.get(STEP) if iteration > 0 else None
                self._first = iteration if self._first is None else self._first
            else:
                took = (now - self._last_at) / (iteration - self._iteration)
                self._step_s = took if self._step_s is None else RECENT * self._step_s + (1 - RECENT) * took
            self._iteration, self._last_at = iteration, now
            self._shown |= {name: form.format(metrics[name]) for name, form in FIGURES.items() if name in metrics}
            if scores := validation_scores(metrics):
                self._shown["validation"] = f"val {sum(scores.values()) / len(scores):.3f} ({iteration})"
            if LOSS in metrics:
                # Only the line of a validated step has room for it.
                self._shown["validation"] = f"val {metrics[VAL_LOSS]:.3f}" if VAL_LOSS in metrics else ""
            if self._step_s is not None:
                self._shown["pace"] = f"{self._step_s:.1f} s/{self._unit}"
            if shares := idle_shares(metrics):
                self._shown["idle"] = shares
            line = self._line(now)
        self._print(line)

    def stop(self) -> None:
        """Remove the bar; safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def summary(
        self,
        status: str,
        records: Sequence[Mapping[str, Any]],
        places: Mapping[str, str],
        problems: Sequence[str] = (),
    ) -> None:
        """Print the table at the end of a run.

        Args:
            status: how the run ended.
            records: lines of `metrics.jsonl`.
            places: paths and commands by their labels, in order.
            problems: sentences on other problems.
        """
        rows = [*_outcome(records, self._unit), *places.items()]
        width = max((len(label) for label, _ in rows), default=0)
        lines = [Text(""), Text(f"{self._name}: {status}", style="bold")]
        lines += [Text.assemble((f"  {label:<{width}}  ", "bold"), text) for label, text in rows]
        lines += [Text(f"  warning: {problem}", style="yellow") for problem in problems]
        for line in lines:
            # Commands and paths stay on one line even on a narrow terminal, so that they can be copied.
            self._console.print(line, soft_wrap=True)
            self._keep(line.plain)

    def _render(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        with self._lock:
            bar.add_row(
                Text(self._name, style="bold"),
                ProgressBar(total=self._total, completed=self._iteration, width=30, pulse=self._total is None),
                Text(self._counter()),
                Text("  ".join(self._times(time.monotonic())), style="dim"),
            )
            figures = "  ".join(self._figures())
            status = Text(self._status, style="dim", overflow="ellipsis", no_wrap=True)
        return Group(bar, Text(figures), status) if figures else Group(bar, status)

    def _print(self, text: str) -> None:
        """Print a line if no bar is shown, and append it to the log file."""
        if self._live is None:
            self._console.print(Text(text), soft_wrap=True)
            self._console.file.flush()
        self._keep(text)

    def _keep(self, text: str) -> None:
        if self._log is not None:
            try:
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
            except OSError as error:
                log, self._log = self._log, None
                self.notice(f"{log} cannot be written ({error.strerror or error}); lines are only shown here")

    def _line(self, now: float) -> str:
        """Format one iteration in at most `WIDTH` characters; if it is longer, the least important figures are left
        out."""
        figures = self._figures()
        while True:
            line = "  ".join([self._counter(), *figures, *self._times(now)])
            if len(line) <= WIDTH or not figures:
                return line
            figures.pop()

    def _counter(self) -> str:
        return f"{self._iteration}/{self._total}" if self._total is not None else str(self._iteration)

    def _figures(self) -> list[str]:
        """Return the figures of the last iteration as texts, the most important first."""
        order = SUPERVISED_ORDER if LOSS in self._shown else ORDER
        return [self._shown[name] for name in order if self._shown.get(name)]

    def _times(self, now: float) -> list[str]:
        times = [clock(now - self._began)]
        if self._total is not None and self._step_s is not None:
            left = (self._total - self._iteration) * self._step_s - (now - self._last_at)
            times.append(f"left {clock(max(0.0, left))}")
        return times


def clock(seconds: float) -> str:
    """Format seconds as `h:mm:ss`, or `m:ss` below an hour."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _outcome(records: Sequence[Mapping[str, Any]], unit: str) -> list[tuple[str, str]]:
    rows = []
    for name in (LOSS, VAL_LOSS):
        if (found := column(records, name))[1]:
            (first, *_, last), (before, *_, after) = ([*values, values[-1]] for values in found)
            rows.append((name, f"{before:.3f} → {after:.3f}  ({unit} {first} → {last})"))
    for source, (iterations, scores, errors) in validation_curves(records).items():
        first, before = iterations[0], scores[0]
        last, after = iterations[-1], scores[-1]
        text = f"{before:.3f}{_error(errors[0])} (iteration {first})"
        if len(iterations) > 1:
            gain = f"{after - before:+.3f}{_error(math.hypot(errors[0], errors[-1]))}"
            text = f"{before:.3f} → {after:.3f}  {gain}  (iteration {first} → {last})"
        rows.append((f"validation {printable(source)}", text))
    if explained := column(records, EXPLAINED)[1]:
        rows.append(("critic", f"explains {explained[0]:.2f} → {explained[-1]:.2f} of the variance of the returns"))
    if records:
        rows.append(("steps" if unit == "step" else "iterations", str(records[-1]["iteration"])))
        rows.append(("wall time", clock(float(records[-1].get("elapsed_s") or 0.0))))
    if balance := advice(records):
        rows.append(("balance", balance))
    return rows


def _error(standard_error: float) -> str:
    return "" if math.isnan(standard_error) else f" ± {standard_error:.3f}"
