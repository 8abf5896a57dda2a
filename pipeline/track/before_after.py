"""A run before and after its training: a table of figures, and a table of answers to the same prompts."""

import json
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.track.console import STEP, clock
from pipeline.track.conversation import content
from pipeline.track.history import REWARD, column, read_history, validation_curves
from pipeline.track.plot import GAPS
from pipeline.track.printable import printable
from pipeline.track.samples import Rows, watched

MEMORY = "perf/cpu_memory_used_gb"
ANSWERS = 5
COLUMNS = ("uid", "sample", "prompt", "ground_truth", "response", "score")
LONGEST = 60
"""Maximum length of a prompt or an answer in the table, in characters; the end of a longer text counts."""


def figures(run_dir: Path) -> tuple[Table, str]:
    """Make a table with the first and last value of validation, training reward and log-prob gap.

    Returns the table, and a line with the number of iterations, the time, and the peak memory of a train worker.

    Raises:
        ValueError: `metrics.jsonl` is missing or damaged.
    """
    records = read_history(run_dir / "metrics.jsonl")
    if not records:
        raise ValueError(f"{run_dir} has no iteration in metrics.jsonl")
    curves = {f"validation {printable(source)}": curve[:2] for source, curve in validation_curves(records).items()}
    curves["training reward"] = column(records, REWARD)
    curves |= {f"log-prob gap, {label}": column(records, name) for label, name in GAPS.items()}
    seconds, memory = column(records, STEP)[1], column(records, MEMORY)[1]
    facts = [f"{records[-1]['iteration']} iterations in {clock(float(records[-1].get('elapsed_s') or 0.0))}"]
    facts += [f"{statistics.median(seconds):.1f} s each (median)"] if seconds else []
    facts += [f"a train worker took {max(memory):.1f} GiB"] if memory else []
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "first", "last"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, (_, values) in curves.items():
        if values:
            table.add_row(label, f"{values[0]:.3g}", f"{values[-1]:.3g}")
    return table, ", ".join(facts)


def answers(run_dir: Path, first: int, last: int) -> Table:
    """Make a table of the answers of two policy versions to the first validation prompts, with their scores.

    Raises:
        FileNotFoundError: a version has no validation rows.
        ValueError: a file is damaged.
    """
    before, after = (Rows(str(run_dir), version, "val") for version in (first, last))
    later = {(row["uid"], row["sample"]): number for number, row in enumerate(after.keys)}
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("prompt", "truth", f"version {first}", "score", f"version {last}", "score"):
        table.add_column(name, overflow="fold")
    for number in watched(before, "val", ANSWERS):
        row = before.read(number, COLUMNS)
        if (other := later.get((row["uid"], row["sample"]))) is None:
            continue
        truth = "" if row.get("ground_truth") is None else _plain(row["ground_truth"])
        question = content(json.loads(row["prompt"])[-1])
        table.add_row(_cell(question), _cell(truth), *_scored(row), *_scored(after.read(other, COLUMNS)))
    return table


def _plain(text: str) -> str:
    """Return JSON that is only a string as this string; other JSON stays."""
    value = json.loads(text)
    return value if isinstance(value, str) else text


def _scored(row: dict[str, Any]) -> tuple[Text, Text]:
    score = row["score"]
    style = "green" if score is not None and score >= 1 else "red"
    return _cell(row["response"].strip()), Text("failed" if score is None else f"{score:g}", style)


def _cell(text: str) -> Text:
    text = printable(text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}")
    return Text(text.replace("\n", "⏎"))
