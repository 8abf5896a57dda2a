"""How an evaluation is shown: progress on the terminal, the table, and names for the trackers."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline.evaluate.summary import Summary
from pipeline.track.console import clock

if TYPE_CHECKING:
    from pipeline.evaluate.prepare import Evaluation

PLAIN_LINE_S = 10.0
WIDEST = 100_000
ALL = "all"
"""What the table calls all data sources together."""


class Board:
    """Progress of an evaluation: a bar on a terminal, elsewhere a line now and then.

    Args:
        name: of the evaluation.
        total: prompts in all.
        done: prompts whose responses there are already.
        quiet: print nothing.
        console: where to print; standard output if None.
    """

    def __init__(self, name: str, total: int, done: int, quiet: bool = False, console: Console | None = None) -> None:
        self._name, self._total, self._done, self._before = name, total, done, done
        self._console = console or Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._printed = -PLAIN_LINE_S
        self._bar: Progress | None = None
        self._task: Any = None

    def start(self) -> None:
        """Show that engines are starting, which is the longest silence."""
        if self._console.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}"), BarColumn(), _Count()]
            columns += [TextColumn("{task.fields[figures]}"), TimeRemainingColumn()]
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(
                self._name, total=self._total, completed=self._done, figures="starting the engines"
            )
            self._bar.start()
        else:
            self._print("starting the engines")

    def update(self, summary: Summary, seconds: float, tokens: int) -> None:
        """More responses have come.

        Args:
            summary: of all responses so far.
            seconds: since the first engine began to generate.
            tokens: generated since then.
        """
        self._done = min(summary.prompts, self._total)
        figures, mean = [f"{tokens / seconds:,.0f} tokens/s"] if seconds > 0 else [], summary.overall().get("mean")
        if mean is not None:
            figures.insert(0, f"mean {mean:.3f}")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, figures="  ".join(figures))
            return
        now = time.monotonic()
        if now - self._printed >= PLAIN_LINE_S or self._done == self._total:
            self._printed = now
            if seconds > 0 and (came := self._done - self._before):
                figures.append(f"left {clock((self._total - self._done) * seconds / came)}")
            self._print("  ".join([f"{self._done}/{self._total} prompts", *figures]))

    def stop(self) -> None:
        """Take the bar away; safe to call twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(Text(f"{self._name}: {text}"), soft_wrap=True)
        self._console.file.flush()


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:.0f}/{task.total:.0f} prompts")


def rows(summary: Summary) -> list[dict[str, Any]]:
    """One row per data source, and one for all of them where there are several, with all metrics."""
    made = [
        {"source": source, "judged_by": summary.judged_by(source), **metrics}
        for source, metrics in summary.by_source().items()
    ]
    return made if len(made) == 1 else [*made, {"source": ALL, **summary.overall()}]


def table(summary: Summary) -> Table:
    """The result for the terminal, one column per row of `rows`. pass@1, maj@1 and maj@2 are the mean and left out."""
    ks: Sequence[int] = summary.ks
    shown = ["mean", *(f"pass@{k}" for k in ks if k > 1), *(f"maj@{k}" for k in ks if k > 2)]
    sources = rows(summary)
    made = Table("", *(row["source"] for row in sources))
    for column in made.columns:
        column.no_wrap = True
    for column in made.columns[1:]:
        column.justify = "right"
    for name in shown:
        scores = [f"{row[name]:.4f}" if name in row else "-" for row in sources]
        made.add_row(name, *scores, end_section=name == shown[-1])
    for label, name, form in (
        ("prompts", "prompts", ",.0f"),
        ("responses", "responses", ",.0f"),
        ("reward failed", "error_rate", ".1%"),
        ("tokens", "response_length/mean", ",.1f"),
        ("cut off", "response_length/clip_ratio", ".1%"),
    ):
        made.add_row(label, *(format(row[name], form) for row in sources))
    return made


def print_table(summary: Summary, console: Console) -> None:
    """Print the result; where the terminal is too narrow, `console` is made wider: no number is shortened."""
    made = table(summary)
    needed = console.measure(made, options=console.options.update(max_width=WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(made)


def result(evaluation: "Evaluation", complete: bool, tokens_per_s: float | None) -> dict[str, Any]:
    """What `metrics.json` holds.

    Args:
        evaluation: what was evaluated.
        complete: whether all responses are there.
        tokens_per_s: how fast they came, where that is known.
    """
    summary = evaluation.summary
    return {
        "complete": complete,
        "parts": len(evaluation.folder.parts()),
        "model": evaluation.config.model.path,
        "iteration": evaluation.iteration,
        "n": evaluation.config.rollout.val_kwargs.n,
        "k": list(summary.ks),
        "left_out": evaluation.prompts - summary.prompts if complete else None,
        "tokens_per_s": tokens_per_s,
        "sources": {
            source: {"judged_by": summary.judged_by(source), **metrics}
            for source, metrics in summary.by_source().items()
        },
        "all": summary.overall(),
    }


def tracked(summary: Summary) -> dict[str, float]:
    """Metrics by the names that trackers get: `eval/SOURCE/NAME`, and `eval-all/NAME` for all prompts together."""
    named = {
        f"eval/{source}/{name}": float(value)
        for source, metrics in summary.by_source().items()
        for name, value in metrics.items()
    }
    return named | {f"eval-all/{name}": float(value) for name, value in summary.overall().items()}
