"""Wrong labels of the GSM8K rule: right answers that it scores 0, and wrong ones that it scores 1.

    python -m jobs.prepare gsm8k --input FOLDER --out data/gsm8k
    python -m benchmarks.labels data/gsm8k/train.parquet data/gsm8k/test.parquet

Files are parquet in verl's format. Each row gives right answers (its own solution, if `extra_info.answer` has one, and
its ground truth in several ways of writing) and wrong ones (other numbers, the truths of other rows, and its truth with
an addition that changes it). The exit code is 1 if a label is wrong.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from pipeline.reward.rules import gsm8k, rule_of

SHOWN = 5  # wrong labels that are printed
RIGHT = ("#### {}", "####{}.", "#### ${}", "#### {} dollars", "#### {}%", "So it is {}.", "**{}**", "The answer is {}!")
CHANGED = (
    "{} million", "{}k", "{} vs {}1", "{} or {}1", "{}\u00b2",
    "{}^2", "{}.5.5", "{} {}", "{} / 7", "{}e3", "{}_000", "--{}",
    "{} and a half", "{} point three", "{} hundred", "{}!", "{},5", "{}\u0663", "{} = x",
)  # fmt: skip
OTHERS = (1, 7, 100)  # places of the rows whose truths are other answers


class Label(NamedTuple):
    """One answer, with its expected score and its score."""

    where: str
    answer: str
    truth: str
    expected: float
    score: float


Row = tuple[str, str, Any, str | None]
"""Place, data source, ground truth and solution."""


def rows(path: Path) -> list[Row]:
    """Read the rows of a file.

    Raises:
        ValueError: the file lacks a column, or a row belongs to another rule.
    """
    try:
        table = pq.read_table(path, columns=["data_source", "reward_model", "extra_info"])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: {error}; expected parquet in verl's format (python -m jobs.prepare gsm8k)"
        ) from error
    found: list[Row] = []
    for number, row in enumerate(table.to_pylist()):
        where, source = f"{path}, row {number}", row["data_source"]
        if rule_of(source) is not gsm8k.compute_score:
            raise ValueError(f"{where}: data_source is {source!r}, whose rule is not that of GSM8K")
        solution = (row["extra_info"] or {}).get("answer")
        found.append((where, source, row["reward_model"]["ground_truth"], solution))
    return found


def right_answers(truth: str, solution: str | None) -> Iterator[str]:
    """Yield responses that must score 1."""
    if solution is not None:
        yield solution
        yield f"{solution.rpartition('####')[0]}The answer is {truth}."
    yield from (form.format(truth) for form in RIGHT)
    yield f"#### {Decimal(truth):,}"


def wrong_answers(truth: str, others: Sequence[str]) -> Iterator[str]:
    """Yield responses that must score 0."""
    number = Decimal(truth)
    for value in {number + 1, number - 1, number * 10, number / 10, -number, *map(Decimal, others)} - {number}:
        yield f"#### {value:f}"
        yield f"The answer is {value:f}."
    yield from (f"#### {form.format(truth, truth)}" for form in CHANGED)


def labels(found: Sequence[Row]) -> Iterator[Label]:
    """Score all answers of the rows.

    Raises:
        ValueError: a ground truth is not a number; the sentence names its row.
    """
    truths = []
    for where, _, ground_truth, _ in found:
        try:
            truths.append(gsm8k.read_truth(ground_truth))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    for place, (where, source, ground_truth, solution) in enumerate(found):
        score, truth = rule_of(source), truths[place]
        others = [truths[(place + step) % len(found)] for step in OTHERS]
        for expected, answers in ((1.0, right_answers(truth, solution)), (0.0, wrong_answers(truth, others))):
            for answer in answers:
                yield Label(where, answer, truth, expected, score(answer, ground_truth)["score"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (0 no wrong label, 1 some, 2 bad input)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labels", description=str(__doc__).partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="parquet in verl's format")
    args = parser.parse_args(argv)
    wrong: list[Label] = []
    for path in args.files:
        try:
            found = rows(path)
            scored = list(labels(found))
        except ValueError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        said = []
        for expected, kind in ((1.0, "right"), (0.0, "wrong")):
            of_kind = [label for label in scored if label.expected == expected]
            missed = [label for label in of_kind if label.score != expected]
            said.append(f"{len(missed):,} of {len(of_kind):,} {kind} answers do not score {expected:g}")
            wrong += missed
        print(f"{path}: {len(found):,} rows; {'; '.join(said)}")
    for label in wrong[:SHOWN]:
        print(f"{label.where}: {label.answer[-200:]!r} scores {label.score:g} for {label.truth!r}")
    print(f"{len(wrong):,} wrong labels")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
