"""Chooses recorded rows to look at: one by its properties, or a few of every iteration."""

import difflib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.rows import IMAGES
from pipeline.storage.filesystem import filesystem_of
from pipeline.track.trajectories import FOLDERS, iteration_files, recorded_iterations

KEYS = ("uid", "sample", "score", "reward_error")
"""Columns by which rows are chosen."""
FIRST = (
    *("iteration", "prompt", "response", "ground_truth", "score", "reward_parts", "reward_error", "ended"),
    *("finish_reason", "data_source"),
)
"""Columns that a person reads first, in this order."""
SHOWN = 8
"""Maximum number of values that an error message lists."""


@dataclass(frozen=True)
class Choice:
    """Conditions for one row of an iteration. All given conditions must hold; the first such row is taken."""

    uid: str | None = None
    sample: int | None = None
    order: str | None = None
    """`best` or `worst` (by score, without failed rows), or `failed`, for the first failed row."""
    seed: int | None = None
    """Seed for a random choice among the rows; None takes the first."""


class Rows:
    """The recorded rows of one iteration. Only `KEYS` are read at first, whole rows on request.

    Args:
        run_dir: the run's folder or URL.
        iteration: number of the iteration; for validation, the policy version. None is the latest.
        split: `train` or `val`.

    Raises:
        FileNotFoundError: the iteration has no rows, or no iteration has any.
        ValueError: a file is damaged.
    """

    def __init__(self, run_dir: str, iteration: int | None = None, split: str = "train") -> None:
        files = [] if iteration is None else iteration_files(run_dir, iteration, split)
        if not files:
            known = recorded_iterations(run_dir, split)
            if not known:
                raise FileNotFoundError(f"{run_dir} has no rows in {FOLDERS[split]}/; the first iteration writes some")
            if iteration is not None:
                raise FileNotFoundError(
                    f"{run_dir}/{FOLDERS[split]} has no rows of iteration {iteration}; there are iterations "
                    f"{known[0]} to {known[-1]}"
                )
            iteration = known[-1]
            files = iteration_files(run_dir, iteration, split)
        self.iteration = iteration
        self._filesystem, _ = filesystem_of(run_dir)
        tables = [self._read(name, KEYS) for name in files]
        self.keys: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        """The columns `KEYS` of each row, as a dict."""
        self.places = [(name, row) for name, table in zip(files, tables, strict=True) for row in range(len(table))]
        """(File, index in the file) of each row."""

    def read(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        """Read row `number`, with the requested `columns` as far as the run has them."""
        name, place = self.places[number]
        row: dict[str, Any] = self._read(name, columns).slice(place, 1).to_pylist()[0]
        if row.get("images", ()) is None:
            # The first row of its group has them.
            uid = self.keys[number]["uid"]
            first = next(other for other, keys in enumerate(self.keys) if keys["uid"] == uid)
            row |= self.read(first, ["images"]) if first < number else {"images": []}
        return row

    def choose(self, choice: Choice) -> int:
        """Return the number of the row that `choice` selects.

        Raises:
            ValueError: no row fits.
        """
        numbers = list(range(len(self.keys)))
        where = f"iteration {self.iteration}"
        if choice.uid is not None:
            numbers = [number for number in numbers if self.keys[number]["uid"] == choice.uid]
            if not numbers:
                raise ValueError(f"{where} has no row of uid {choice.uid!r}; {self._uids(choice.uid)}")
        if choice.sample is not None:
            there = sorted({self.keys[number]["sample"] for number in numbers})
            numbers = [number for number in numbers if self.keys[number]["sample"] == choice.sample]
            if not numbers:
                raise ValueError(f"{where} has no sample {choice.sample} of it; there are {_listed(there)}")
        failed = [number for number in numbers if self.keys[number]["reward_error"] is not None]
        if choice.order == "failed":
            if not failed:
                raise ValueError(f"none of the {len(numbers)} rows of {where} failed")
            return failed[0]
        if choice.order is not None:
            numbers = [number for number in numbers if number not in set(failed)]
            if not numbers:
                raise ValueError(f"all {len(failed)} rows of {where} failed, so none has a score; --failed shows one")
            best = max if choice.order == "best" else min
            return best(numbers, key=lambda number: self.keys[number]["score"])
        return numbers[0] if choice.seed is None else random.Random(choice.seed).choice(numbers)

    def _uids(self, wanted: str) -> str:
        uids = list(dict.fromkeys(row["uid"] for row in self.keys))
        near = difflib.get_close_matches(wanted, uids, n=1, cutoff=0.0)
        return f"did you mean {near[0]}? There are {_listed(uids)}"

    def _read(self, name: str, columns: Sequence[str]) -> pa.Table:
        try:
            file = pq.ParquetFile(name, filesystem=self._filesystem)
            return file.read([column for column in columns if column in file.schema_arrow.names])
        except pa.ArrowInvalid as error:
            raise ValueError(f"{name} is damaged ({error}); delete it to see the other rows") from error


def for_people(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns `FIRST` before all others, and without the columns of images."""
    return [
        {name: row[name] for name in dict.fromkeys((*FIRST, *row)) if name in row and name not in IMAGES.names}
        for row in rows
    ]


def watched(rows: Rows, split: str, count: int) -> list[int]:
    """Choose at most `count` rows that represent the iteration; returns their numbers.

    Training rows are drawn at random, always the same ones for an iteration. Validation rows are the first response to
    each of the first prompts, which are the same in every validation.
    """
    numbers = range(len(rows.keys))
    if split == "train":
        return sorted(random.Random(rows.iteration).sample(numbers, min(count, len(numbers))))
    return [number for number in numbers if rows.keys[number]["sample"] == 0][:count]


def _listed(values: Sequence[object]) -> str:
    more = f" and {len(values) - SHOWN} others" if len(values) > SHOWN else ""
    return ", ".join(str(value) for value in values[:SHOWN]) + more
