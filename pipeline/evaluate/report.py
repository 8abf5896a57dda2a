"""The result of an evaluation: the table on the terminal, `metrics.json`, and the names of metrics for the trackers."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.evaluate.summary import Summary
from pipeline.track.printable import printable

if TYPE_CHECKING:
    from pipeline.evaluate.prepare import Evaluation

MAX_WIDTH = 100_000
ALL = "all"
"""Name of the row of all data sources together in the tables."""
MISSING = "acc/missing_rate"
COUNTS = (
    ("prompts", "prompts", ",.0f"),
    ("responses", "responses", ",.0f"),
    ("reward failed", "error_rate", ".1%"),
    ("without acc", MISSING, ".1%"),
    ("tokens", "response_length/mean", ",.1f"),
    ("turns", "turns/mean", ",.1f"),
    ("cut off", "response_length/clip_ratio", ".1%"),
)
"""Rows of the terminal's table below the scores: (label, metric, format)."""


def rows(summary: Summary) -> list[dict[str, Any]]:
    """Return one row with all metrics per data source and, if there are several sources, one for all of them
    together."""
    sources: list[dict[str, Any]] = [
        {"source": source, "judged_by": summary.judged_by(source), **metrics}
        for source, metrics in summary.by_source().items()
    ]
    together = ALL
    while together in summary.by_source():
        together += " together"
    return sources if len(sources) == 1 else [*sources, {"source": together, **summary.overall()}]


def print_table(summary: Summary, console: Console) -> None:
    """Print a table with one column per data source, without pass@1, maj@1 and maj@2, which equal the mean.

    If the terminal is too narrow, `console` is made wider, so that no number is shortened.
    """
    sources = rows(summary)
    table = Table("", *(escape(printable(row["source"])) for row in sources))
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    names = ["mean", *(f"pass@{k}" for k in summary.ks if k > 1), *(f"maj@{k}" for k in summary.ks if k > 2)]
    for name in names:
        scores = [f"{row[name]:.4f}" if name in row else "-" for row in sources]
        table.add_row(name, *scores, end_section=name == names[-1])
    for label, name, form in COUNTS:
        if any(row.get(name) if name == MISSING else name in row for row in sources):
            table.add_row(label, *(format(row[name], form) if name in row else "-" for row in sources))
    needed = console.measure(table, options=console.options.update(max_width=MAX_WIDTH)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def result(evaluation: "Evaluation", complete: bool) -> dict[str, Any]:
    """Make the content of `metrics.json`.

    Args:
        evaluation: the evaluation.
        complete: true if all responses exist.
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
        "tokens_per_s": evaluation.tokens_per_s,
        "sources": {
            source: {"judged_by": summary.judged_by(source), **metrics}
            for source, metrics in summary.by_source().items()
        },
        "all": summary.overall(),
    }


def tracked(summary: Summary) -> dict[str, float]:
    """Return the metrics under the trackers' names: `eval/SOURCE/NAME`, and `eval-all/NAME` for all prompts together.

    Names that would be equal are kept apart by `eval/SOURCE//NAME`: `score/mean` of the source `a`, `mean` of
    `a/score`.
    """
    named: dict[str, float] = {}
    for source, metrics in summary.by_source().items():
        prefix = f"eval/{source}/"
        while any(prefix + name in named for name in metrics):
            prefix += "/"
        named |= {prefix + name: float(value) for name, value in metrics.items()}
    return named | {f"eval-all/{name}": float(value) for name, value in summary.overall().items()}
