"""The report of `benchmarks.against_trl`: rates, ratios, verdict and tables."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.iteration import STEP

TRL, SYNCHRONOUS, AHEAD = "TRL", "synchronous", "one step off-policy"
NAMES = {TRL: "TRL", SYNCHRONOUS: "ours, synchronous", AHEAD: "ours, one step off-policy"}
FLOOR = 1.0
"""Ratio to TRL's samples per second that ours must reach when strictly on-policy."""
ALIKE = 0.1
"""Share by which the lengths of both sides' responses may differ."""
TRL_PARTS = {
    "generate_s": "generation",
    "prepare_s": "tokens, rewards, advantages, old log-probs",
    "rest": "the optimiser steps and the rest",
}


@dataclass(frozen=True)
class Outcome:
    """The iterations of one run that count."""

    seconds: list[float]
    """Wall-clock seconds of each."""
    lengths: list[float]
    """Mean tokens of the responses of each."""
    scores: list[float]
    staleness: float = 0.0
    """Mean age of the rows in versions, relative to the policy they trained."""
    records: list[dict[str, float]] = field(default_factory=list)
    """The run's own record of each."""

    def rate(self, samples: int) -> float:
        """Compute the samples per second if each iteration has so many."""
        return samples * len(self.seconds) / sum(self.seconds)


Rounds = Sequence[Mapping[str, Outcome]]
"""One outcome by case for each round."""


def of_ours(folder: Path, warmup: int, steps: int) -> Outcome:
    """Read the iterations `warmup` + 1 to `warmup` + `steps` of one of our runs.

    Raises:
        RuntimeError: the run does not have them.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = {record["iteration"]: record for record in map(json.loads, lines) if STEP in record}
    numbers = range(warmup, warmup + steps + 1)
    if missing := [number for number in numbers if number not in found]:
        raise RuntimeError(f"{folder / 'metrics.jsonl'} has no iteration {missing[0]}")
    kept = [found[number] for number in numbers[1:]]
    return Outcome(
        [found[number]["elapsed_s"] - found[number - 1]["elapsed_s"] for number in numbers[1:]],
        [record["response_length/mean"] for record in kept],
        [record["critic/score/mean"] for record in kept],
        statistics.mean(record["training/staleness/mean"] for record in kept),
        kept,
    )


def of_trl(file: Path, warmup: int, steps: int) -> Outcome:
    """Read the same iterations from the file of `trl_side.py`.

    Raises:
        RuntimeError: the run does not have them.
    """
    made = json.loads(file.read_text())["iterations"]
    if len(made) < warmup + steps:
        raise RuntimeError(f"{file} has {len(made)} iterations, not {warmup + steps}")
    kept = made[warmup : warmup + steps]
    for record in kept:
        record["rest"] = record["seconds"] - record["generate_s"] - record["prepare_s"]
    seconds, lengths, scores = ([record[key] for record in kept] for key in ("seconds", "length", "score"))
    return Outcome(seconds, lengths, scores, records=kept)


def ratios(rounds: Rounds, case: str, samples: int) -> list[float]:
    """Divide the samples per second of a case by TRL's in the same round."""
    return [outcomes[case].rate(samples) / outcomes[TRL].rate(samples) for outcomes in rounds]


def complaints(rounds: Rounds, samples: int) -> list[str]:
    """Return a sentence if the verdict is bad, else nothing."""
    ratio = statistics.median(ratios(rounds, SYNCHRONOUS, samples))
    if ratio >= FLOOR:
        return []
    return [f"strictly on-policy, ours makes {ratio:.2f} of TRL's samples per second, less than {FLOOR:g}"]


def warnings(rounds: Rounds) -> list[str]:
    """Describe the differences that make the comparison doubtful."""
    lengths = {case: _mean(rounds, case, "lengths") for case in NAMES}
    return [
        f"responses of {NAMES[case]} have {length:.1f} tokens on average, TRL's {lengths[TRL]:.1f}: not the same work"
        for case, length in lengths.items()
        if abs(length / lengths[TRL] - 1) > ALIKE
    ]


def _mean(rounds: Rounds, case: str, what: str) -> float:
    """Average a field over all iterations of a case."""
    return statistics.mean(value for outcomes in rounds for value in getattr(outcomes[case], what))


def _range(values: Sequence[float], digits: int) -> str:
    """Write the median, and the smallest and the largest value if there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(rounds: Rounds, samples: int) -> Table:
    """Show the cases in one table: medians over the rounds, and their range."""
    result = Table(
        title=f"{samples} samples an iteration, median (range) of {len(rounds)} rounds", title_justify="left"
    )
    result.add_column("")
    for name in ("samples/s", "of TRL's", "s/iteration", "tokens a response", "score", "versions behind"):
        result.add_column(name, justify="right")
    for case, name in NAMES.items():
        rates = [outcomes[case].rate(samples) for outcomes in rounds]
        behind = statistics.mean(outcomes[case].staleness for outcomes in rounds)
        result.add_row(
            name,
            _range(rates, 1),
            "" if case == TRL else _range(ratios(rounds, case, samples), 2),
            _range([samples / rate for rate in rates], 2),
            f"{_mean(rounds, case, 'lengths'):.2f}",
            f"{_mean(rounds, case, 'scores'):.3f}",
            "" if case == TRL else f"{behind:.2f}",
        )
    return result


def trl_parts(rounds: Rounds) -> Table:
    """Show the parts of TRL's time."""
    records = [record for outcomes in rounds for record in outcomes[TRL].records]
    step = statistics.median(record["seconds"] for record in records)
    result = Table(title=f"TRL: {len(records)} iterations", title_justify="left")
    result.add_column("part")
    result.add_column("median s", justify="right")
    result.add_column("share", justify="right")
    for key, label in TRL_PARTS.items():
        middle = statistics.median(record[key] for record in records)
        result.add_row(label, f"{middle:.3f}", f"{middle / step:.1%}")
    result.add_row("iteration", f"{step:.3f}", "100.0%")
    return result


def between_steps(rounds: Rounds, case: str) -> float:
    """Compute the median seconds of our iteration outside of `timing_s/step`, for its metrics and their report."""
    pairs = [zip(outcomes[case].seconds, outcomes[case].records, strict=True) for outcomes in rounds]
    return statistics.median(seconds - record[STEP] for pair in pairs for seconds, record in pair)


def as_json(rounds: Rounds, samples: int) -> dict[str, Any]:
    """Collect the content of `result.json`."""
    return {
        "samples_per_iteration": samples,
        "samples_per_s": {case: [outcomes[case].rate(samples) for outcomes in rounds] for case in NAMES},
        "ratio": {case: ratios(rounds, case, samples) for case in (SYNCHRONOUS, AHEAD)},
        "complaints": complaints(rounds, samples),
        "warnings": warnings(rounds),
        "rounds": [{case: asdict(outcome) for case, outcome in outcomes.items()} for outcomes in rounds],
    }
