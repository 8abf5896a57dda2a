"""A recording: the training rows of a finished or interrupted run, as groups in the order it trained on them.

Every file of `trajectories/` holds one chunk, every chunk the same number of whole groups, every group `n` rows that
stand together, and every iteration the same number of chunks. So a group's number, counted from 0, says where its rows
lie, and nothing has to be read to find them. `check` makes sure of it, file by file, before a run relies on it.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.rows import SCHEMA
from pipeline.track.trajectories import recorded_files

PROMPT_COLUMNS = ("uid", "prompt_index", "data_source", "prompt", "prompt_ids", "ground_truth", "extra_info")
"""What is taken of a prompt; the other columns of `rows.PROMPT` are those of the run that trains."""
RESPONSE_COLUMNS = (
    *("sample", "response_ids", "response_mask", "rollout_log_probs", "response", "finish_reason", "engine"),
    "reward_error",
)
"""What is taken of a response."""
BASELINE_COLUMN = "baseline"
"""Only where the estimator reads baselines."""

READERS = 16
"""Files that are looked at together."""
KEPT_FILES = 4
"""Files kept in memory: chunks of another size read a file several times."""

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def iteration_range(text: str) -> tuple[int, int]:
    """First and last iteration of `3-10`, or of `3` alone.

    Raises:
        ValueError: it is neither.
    """
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"data.recorded_iterations={text!r} must be an iteration of the recording such as 3, or the first and the "
            "last one such as 3-10"
        )
    return first, last


class Recording:
    """The recorded groups of some iterations of a run.

    Attributes:
        n: rows of a group.
        first, last: its iterations.
        groups: how many there are, which are numbered from 0.
    """

    def __init__(self, run_dir: str, iterations: str | None = None) -> None:
        """
        Args:
            run_dir: the folder of the run that was recorded.
            iterations: first and last one, as `iteration_range` reads them; None takes all.

        Raises:
            ValueError: the range cannot be read, or a file cannot.
            FileNotFoundError: an iteration was not recorded.
        """
        self.run_dir = run_dir
        found = recorded_files(run_dir)
        if not found:
            raise FileNotFoundError(
                f"{run_dir}/trajectories holds no training rows; give the folder of a run that has trained"
            )
        have = f"recorded are iterations {min(found)} to {max(found)}"
        self.first, self.last = iteration_range(iterations) if iterations else (min(found), max(found))
        for iteration in range(self.first, self.last + 1):
            if not found.get(iteration):
                raise FileNotFoundError(
                    f"iteration {iteration} of {self.first} to {self.last} is not in {run_dir}/trajectories ({have}); "
                    "choose others with --iterations FIRST-LAST (data.recorded_iterations)",
                )
        self._files = {i: found[i] for i in range(self.first, self.last + 1)}
        self._per_iteration = len(self._files[self.first])
        uids = _uids(self._files[self.first][0])
        self.n = uids.count(uids[0])
        self._per_file = len(uids) // self.n
        self.groups = len(self._files) * self._per_iteration * self._per_file
        self._read = lru_cache(KEPT_FILES)(self._read_file)

    def iteration_of(self, group: int) -> int:
        """The iteration of the recording that trained on the group."""
        return self.first + group // (self._per_iteration * self._per_file)

    def prompts(self, groups: Sequence[int]) -> pa.Table:
        """One row for each group, with the columns `PROMPT_COLUMNS`."""
        return self._take(groups, PROMPT_COLUMNS, 1)

    def responses(self, groups: Sequence[int], baselines: bool = False) -> pa.Table:
        """`n` rows for each group, with the columns `RESPONSE_COLUMNS` and, where asked for, `baseline`."""
        return self._take(groups, (*RESPONSE_COLUMNS, *[BASELINE_COLUMN] * baselines), self.n)

    def check(self, baselines: bool = False) -> set[str]:
        """Looks at every file; the values of `data_source` that are in them.

        Args:
            baselines: whether the column `baseline` is needed.

        Raises:
            ValueError: a file is damaged or lacks a column, or holds other rows than the others do.
        """
        for iteration, files in self._files.items():
            if len(files) != self._per_iteration:
                raise ValueError(
                    f"iteration {iteration} in {self.run_dir}/trajectories has {len(files)} files, iteration "
                    f"{self.first} has {self._per_iteration}: one of them was recorded in part; leave it out with "
                    "--iterations FIRST-LAST (data.recorded_iterations)"
                )
        names = (*PROMPT_COLUMNS, *RESPONSE_COLUMNS, *[BASELINE_COLUMN] * baselines)
        files = [file for files in self._files.values() for file in files]
        with ThreadPoolExecutor(READERS) as pool:
            return set[str]().union(*pool.map(lambda file: self._check(file, names), files))

    def _check(self, file: str, names: Sequence[str]) -> set[str]:
        with _open(file) as parquet:
            schema, found = parquet.schema_arrow, parquet.read(["uid", "data_source"])
        for name in names:
            kind = SCHEMA.field(name).type
            if name not in schema.names:
                raise ValueError(
                    f"{file} has no column {name!r}: it is no recording, or that of an older version, which cannot be "
                    "replayed; record the run again"
                )
            if schema.field(name).type != kind:
                raise ValueError(
                    f"{file}: column {name!r} is of type {schema.field(name).type} where recordings have {kind}; "
                    "replay the files as they were recorded"
                )
        uids = found["uid"]
        groups = np.asarray(uids.to_pylist(), dtype=object)
        if len(groups) == self._per_file * self.n:
            groups = groups.reshape(self._per_file, self.n)
            if (groups == groups[:, :1]).all() and len(set(groups[:, 0])) == self._per_file:
                return set(pc.unique(found["data_source"]).to_pylist())
        raise ValueError(
            f"{file} does not hold {self._per_file} whole groups of {self.n} rows, one after the other, as "
            f"{self._files[self.first][0]} does (it has {len(uids)} rows of {len(pc.unique(uids))} groups): it was "
            "changed or belongs to another run; leave its iteration out with --iterations FIRST-LAST "
            "(data.recorded_iterations)"
        )

    def _take(self, groups: Sequence[int], names: tuple[str, ...], rows: int) -> pa.Table:
        """The first `rows` rows of each group."""
        parts = []
        for group in groups:
            number, place = divmod(group, self._per_file)
            parts.append(self._read(number, names).slice(place * self.n, rows))
        return pa.concat_tables(parts)

    def _read_file(self, number: int, names: tuple[str, ...]) -> pa.Table:
        after, place = divmod(number, self._per_iteration)
        file = self._files[self.first + after][place]
        with _open(file) as parquet:
            table = parquet.read(list(names))
        if len(table) != self._per_file * self.n:
            raise ValueError(
                f"{file} has {len(table)} rows where {self._per_file * self.n} were recorded; it has changed since "
                "the start"
            )
        return table


def whole_iterations(run_dir: str, chunks: int) -> str:
    """The iterations of a run that were recorded as a whole, as `iteration_range` reads them.

    A run that was interrupted may have recorded chunks of a last iteration that never came to its end. What is missing
    before it is for `Recording` to refuse.

    Args:
        run_dir: the folder of the run.
        chunks: of one iteration.

    Raises:
        FileNotFoundError: there is no such iteration.
    """
    found = recorded_files(run_dir)
    whole = [iteration for iteration, files in found.items() if len(files) == chunks]
    if not whole:
        raise FileNotFoundError(
            f"{run_dir}/trajectories holds no whole iteration of {chunks} chunks; give the folder of a run that has "
            "trained",
        )
    return f"{min(found)}-{whole[-1]}"


def _uids(file: str) -> list[str]:
    with _open(file) as parquet:
        table = parquet.read(["uid"])
    if not len(table) or "uid" not in table.column_names:
        raise ValueError(f"{file} has no rows with a column 'uid', so it is no recording; remove it")
    return table["uid"].to_pylist()


@contextmanager
def _open(file: str) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{file} of the recording cannot be read as parquet ({' '.join(str(error).split())}); restore it, or leave "
            "its iteration out with --iterations FIRST-LAST (data.recorded_iterations)"
        ) from error
