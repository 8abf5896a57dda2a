"""Read a recording: the training rows of a run, as groups in the order in which the run trained on them.

A file in `trajectories/` holds one chunk of whole groups; the `n` rows of a group are adjacent. All files hold the same
number of groups, and all iterations the same number of files. So the number of a group, from 0, determines the file and
position of its rows. `check` verifies this.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.rows import AGENT, IMAGES, SCHEMA
from pipeline.track.trajectories import recorded_files

COLUMNS = (
    *("uid", "prompt_index", "data_source", "prompt", "prompt_ids", "ground_truth", "extra_info", "agent_name"),
    *("sample", "response_ids", "response_mask", "rollout_log_probs", "response", "finish_reason", "engine"),
    *("support", "support_sizes", "routes"),
)
"""Columns that are read from a recording. The replay fills the other columns of `rows.PROMPT` and `rows.ROLLOUT`."""
NEWER = {"agent_name", "support", "support_sizes", "routes"}
"""Columns that older recordings do not have; they are read as null."""
READERS = 16
"""Number of files that are checked at the same time."""

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def iteration_range(text: str) -> tuple[int, int]:
    """Parse `3-10`, or `3` for a single iteration, to (first iteration, last iteration).

    Raises:
        ValueError: the text has neither form.
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

    Args:
        run_dir: the folder of the run.
        iterations: first and last iteration, such as `3-10`; None takes all.
        baselines: True to read the column `baseline` too.
        episodes: True to read the columns `rows.AGENT` too.
        images: True to read the columns `rows.IMAGES` too.

    Attributes:
        n: number of rows per group.
        groups: total number of groups.

    Raises:
        ValueError: the range or a file cannot be read.
        FileNotFoundError: an iteration was not recorded.
    """

    def __init__(
        self,
        run_dir: str,
        iterations: str | None = None,
        baselines: bool = False,
        episodes: bool = False,
        images: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self.columns = [*COLUMNS, *IMAGES.names * images, *AGENT.names * episodes, *["baseline"] * baselines]
        found = recorded_files(run_dir)
        if not found:
            raise FileNotFoundError(
                f"{run_dir}/trajectories has no training rows; give the folder of a run that has trained"
            )
        have = f"recorded are iterations {min(found)} to {max(found)}"
        first, last = iteration_range(iterations) if iterations else (min(found), max(found))
        for iteration in range(first, last + 1):
            if not found.get(iteration):
                raise FileNotFoundError(
                    f"iteration {iteration} of {first} to {last} is not in {run_dir}/trajectories ({have}); "
                    "choose others with --iterations FIRST-LAST (data.recorded_iterations)",
                )
        self._iterations = {iteration: found[iteration] for iteration in range(first, last + 1)}
        self._files = [file for files in self._iterations.values() for file in files]
        self._first = first
        self._files_per_iteration = len(found[first])
        uids = _uids(self._files[0])
        self.n = uids.count(uids[0])
        self._groups_per_file = len(uids) // self.n
        self.groups = len(self._files) * self._groups_per_file
        # If iterations of the replay have another size than the recorded ones, an iteration may end inside a file.
        self._read = lru_cache(1)(self._read_file)

    def iteration_of(self, group: int) -> int:
        """Return the number of the recorded iteration that trained on group `group`."""
        return self._first + group % self.groups // (self._groups_per_file * self._files_per_iteration)

    def rows(self, first: int, end: int) -> pa.Table:
        """Read the rows of the groups from `first` to `end - 1`, `n` rows each.

        In a further pass over the recording, numbers of groups continue after `groups - 1`.
        """
        parts = []
        while first < end:
            file, skipped = divmod(first % self.groups, self._groups_per_file)
            count = min(end - first, self._groups_per_file - skipped)
            parts.append(self._read(self._files[file]).slice(skipped * self.n, count * self.n))
            first += count
        return pa.concat_tables(parts)

    def check(self) -> dict[str | None, set[str]]:
        """Check all files. Returns the values of `data_source` by `agent_name` of the rows.

        Raises:
            ValueError: a file is damaged, does not have a column, or has another number of groups or rows.
        """
        for iteration, files in self._iterations.items():
            if len(files) != self._files_per_iteration:
                raise ValueError(
                    f"iteration {iteration} in {self.run_dir}/trajectories has {len(files)} files, iteration "
                    f"{self._first} has {self._files_per_iteration}: one of them was recorded in part; leave it out "
                    "with --iterations FIRST-LAST (data.recorded_iterations)"
                )
        with ThreadPoolExecutor(READERS) as pool:
            pairs = set[tuple[str | None, str]]().union(*pool.map(self._check, self._files))
        return {agent: {source for other, source in pairs if other == agent} for agent, _ in pairs}

    def _check(self, file: str) -> set[tuple[str | None, str]]:
        with _open(file) as parquet:
            schema, found = parquet.schema_arrow, parquet.read(["uid", "data_source", "agent_name"])
        for name in self.columns:
            kind = SCHEMA.field(name).type
            if name not in schema.names and name in NEWER:
                continue
            if name not in schema.names:
                raise ValueError(
                    f"{file} has no column {name!r}: it is not a recording, or it is one of an older version, which "
                    "cannot be replayed; record the run again"
                )
            if schema.field(name).type != kind:
                raise ValueError(
                    f"{file}: column {name!r} is of type {schema.field(name).type} but recordings have {kind}; replay "
                    "the files as they were recorded"
                )
        uids = np.asarray(found["uid"].to_pylist(), dtype=object)
        if len(uids) == self._groups_per_file * self.n:
            groups = uids.reshape(self._groups_per_file, self.n)
            if (groups == groups[:, :1]).all() and len(set(groups[:, 0])) == self._groups_per_file:
                return {(row.get("agent_name"), row["data_source"]) for row in found.to_pylist()}
        raise ValueError(
            f"{file} does not hold {self._groups_per_file} whole groups of {self.n} rows, one after the other, as "
            f"{self._files[0]} does (it has {len(uids)} rows of {len(set(uids))} groups): it was changed or belongs to "
            "another run; leave its iteration out with --iterations FIRST-LAST (data.recorded_iterations)"
        )

    def _read_file(self, file: str) -> pa.Table:
        with _open(file) as parquet:
            table = parquet.read(self.columns)
        rows = self._groups_per_file * self.n
        if len(table) != rows:
            raise ValueError(f"{file} has {len(table)} rows, but {rows} were recorded; it has changed since the start")
        for name in NEWER - {*table.column_names}:
            table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
        if "images" in self.columns:
            # Null stands for the images of the group's first row.
            first = np.repeat(np.arange(0, rows, self.n), self.n)
            column = table.schema.get_field_index("images")
            own = table["images"].combine_chunks()
            whole = pc.if_else(own.is_null(), own.take(pa.array(first)), own)
            table = table.set_column(column, table.schema.field(column), whole)
        return table.select(self.columns)


def whole_iterations(run_dir: str, chunks: int) -> str:
    """Return the range of the completely recorded iterations as text, such as `1-10`.

    An interrupted run may have recorded only a part of its last iteration. `Recording` refuses earlier gaps.

    Args:
        run_dir: folder of the run.
        chunks: number of chunks in a complete iteration.

    Raises:
        FileNotFoundError: no iteration has `chunks` chunks.
    """
    found = recorded_files(run_dir)
    whole = [iteration for iteration, files in found.items() if len(files) == chunks]
    if not whole:
        raise FileNotFoundError(
            f"{run_dir}/trajectories has no complete iteration of {chunks} chunks; give the folder of a run that has "
            "trained",
        )
    return f"{min(found)}-{whole[-1]}"


def _uids(file: str) -> list[str]:
    with _open(file) as parquet:
        table = parquet.read(["uid"])
    if not len(table) or "uid" not in table.column_names:
        raise ValueError(f"{file} has no rows with a column 'uid', so it is not a recording; remove it")
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
