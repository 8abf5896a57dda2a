"""`metrics.jsonl`: one JSON object per iteration, from which plot, summary and trackers can all be made again.

1. A line is `{"iteration": k, "time": Unix seconds, "elapsed_s": seconds the run has worked, without the pauses between
   resumes, ...metrics}`. NaN and infinity, which JSON lacks, become null.
2. Iterations rise strictly. If one comes again (a resumed run, restarted train workers), it and all later lines are
   dropped first, because their policy does not exist any more.
3. A line is one write and is synced to disk. A line that a kill or a full disk left incomplete is skipped by
   `read_history` and removed at the next start.
"""

import json
import math
import numbers
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

OWN_KEYS = ("iteration", "time", "elapsed_s")
"""Keys of every record that are not metrics."""
REWARD = "critic/score/mean"
LOSS, VAL_LOSS = "loss", "val_loss"
"""Metrics of supervised runs, which have no reward."""
EXPLAINED = "critic/vf_explained_var"
RENAMED = {"timing_s": {"deal": "balance"}, "agent": {"ended": "stop_reason"}, "val-agent": {"ended": "stop_reason"}}
"""Renamed parts of metrics' names: {preceding part: {earlier name: current name}}."""
VALIDATION = re.compile(r"val-core/(?P<source>.*)/(?P<variable>[^/]+)/mean@(?P<samples>\d+)", re.DOTALL)


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl` in order, without an incomplete last line; empty if the file does not exist.

    Metrics that were renamed get their current names.

    Raises:
        ValueError: a line before the last is not a JSON object with an `iteration`.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove that line to go on") from error
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            raise ValueError(
                f"{path}, line {number} is not an object with an `iteration`; remove that line to continue"
            )
        records.append({_current(name): value for name, value in record.items()})
    return records


@cache
def _current(name: str) -> str:
    first, *rest = name.split("/")
    return "/".join([first, *(RENAMED.get(first, {}).get(part, part) for part in rest[:1]), *rest[1:]])


def validation_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation score (`val-core/SOURCE/.../mean@N`) by data source; empty without validation.

    If a source has several such metrics, the one with the largest N counts.
    """
    return {source: score for source, (score, _) in validations(metrics).items()}


def validations(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (score, standard error) by data source, see `validation_scores`. The error is NaN if it is not known, as
    for a single prompt."""
    found: dict[str, tuple[int, float, float]] = {}
    for name, value in metrics.items():
        match = VALIDATION.fullmatch(name)
        if match is None or value is None:
            continue
        samples, source = int(match["samples"]), match["source"]
        if samples > found.get(source, (0,))[0]:
            error = metrics.get(f"val-aux/{source}/{match['variable']}/stderr@{samples}")
            found[source] = samples, float(value), math.nan if error is None else float(error)
    return {source: (score, error) for source, (_, score, error) in sorted(found.items())}


class Curve(NamedTuple):
    """The validations of one data source."""

    iterations: list[int]
    scores: list[float]
    errors: list[float]
    """Standard error of each score over the prompts; NaN if it is not known."""


def validation_curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the validations by data source, in order of name."""
    curves: dict[str, Curve] = {}
    for record in records:
        for source, (score, error) in validations(record).items():
            curve = curves.setdefault(source, Curve([], [], []))
            curve.iterations.append(record["iteration"])
            curve.scores.append(score)
            curve.errors.append(error)
    return dict(sorted(curves.items()))


def column(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return (iterations that have the metric `name`, values of the metric)."""
    having = [record for record in records if record.get(name) is not None]
    return [record["iteration"] for record in having], [float(record[name]) for record in having]


class History:
    """Writer of one run's `metrics.jsonl`.

    Args:
        path: the file.
        resume: true to continue an older file; false to empty it.

    Raises:
        ValueError: the file to be continued is damaged before its last line.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[dict[str, Any]] = read_history(path) if resume else []
        self._rewrite()
        self._earlier_s = float(self.records[-1].get("elapsed_s") or 0.0) if self.records else 0.0
        self._began = time.monotonic()

    def append(self, iteration: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, Any]:
        """Append the metrics of one iteration and return the record. Records of this and later iterations are dropped
        first.

        Raises:
            ValueError: a metric is named like one of `OWN_KEYS`, or is not a number.
            OSError: the disk is full or the file not writable; earlier lines stay whole.
        """
        record: dict[str, Any] = {
            "iteration": int(iteration),
            "time": round(time.time(), 3),
            "elapsed_s": round(self._earlier_s + time.monotonic() - self._began, 3),
        }
        for name, value in metrics.items():
            if name in record:
                raise ValueError(f"metric {name!r} has the name of a key that every line of {self.path} has already")
            try:
                record[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"metric {name!r} of iteration {iteration} is not a number: {value!r}") from error
        if self.records and self.records[-1]["iteration"] >= iteration:
            self.records = [earlier for earlier in self.records if earlier["iteration"] < iteration]
            self._rewrite()
        line = _line(record)
        # Unbuffered, so that the line is one write and a kill leaves all of it or nothing.
        with _named(self.path), open(self.path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(28, "No space left on device")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        self.records.append(record)
        return record

    def _rewrite(self) -> None:
        with _named(self.path):
            write_atomically(self.path, b"".join(_line(record) for record in self.records))


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step, so that a reader sees either the old file or the new one."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _line(record: Mapping[str, Any]) -> bytes:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        remedy = "free space there or choose another folder with `trainer.default_local_dir`"
        raise OSError(error.errno or 5, f"the metrics cannot be written to {path} ({why}); {remedy}") from error
