"""Stores every trajectory as parquet in the run's folder, partitioned by iteration.

`trajectories/iteration=NNNNNN/chunk-CCCCCC.parquet` holds the training rows of one chunk, and `validation/...` the rows
of one validation chunk. `old_log_probs/iteration=NNNNNN/rank-RRRRR.parquet` holds the log-probs that a train worker
recomputed (`uid` and `sample` name the row). The rows determine the file's name, so a chunk that Ray Data computes
again replaces its own file. The column `iteration` is only in the folder's name: readers of partitioned data (pandas,
pyarrow, DuckDB, polars) refuse a folder that has it in both places with two types.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.rows import FLOATS, flat, images_once, ragged
from pipeline.storage.filesystem import STANDING, filesystem_of

UNRECORDED = re.compile(r"the trajectories cannot be written to .*?`trainer\.default_local_dir`")
"""Pattern of the error message of `Record` for a file that cannot be written."""
FOLDERS = {"train": "trajectories", "val": "validation", "old_log_probs": "old_log_probs"}


class Record:
    """A map stage that writes its rows and returns them unchanged. The first row of a group is written with the images
    of its prompt, the others without.

    Args:
        run_dir: absolute folder that all engines share, or a URL (`s3://`, `gs://`, `hdfs://`, ...).

    Raises:
        ValueError: `run_dir` is a relative path (a worker's current folder is not the driver's), or a URL of an unknown
            file system.
    """

    def __init__(self, run_dir: str) -> None:
        if "://" not in run_dir and not os.path.isabs(run_dir):
            raise ValueError(f"the run's folder {run_dir!r} is relative; workers need an absolute path or a URL")
        self._filesystem, self._root = filesystem_of(run_dir)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Write `table`, a chunk of rows of one split and iteration.

        Raises:
            ValueError: `split` is neither `train` nor `val`.
            OSError: the file cannot be written; the message names it.
        """
        if len(table):
            folder = _folder(self._root, table["split"][0].as_py(), table["iteration"][0].as_py())
            self._write(folder, _file_name(table), images_once(table).drop_columns(["iteration"]))
        return table

    def old_log_probs(self, table: pa.Table, iteration: int, rank: int, old_log_probs: np.ndarray) -> None:
        """Write the old log-probs that the trainer has recomputed.

        Args:
            table: one rank's rows of the iteration, in the order of `old_log_probs`.
            iteration: the iteration that trains on them.
            rank: rank of the train worker.
            old_log_probs: [N], one for each response token of all rows.

        Raises:
            OSError: the file cannot be written; the message names it.
        """
        offsets = flat(table, "response_ids")[1]
        rows = table.select(["uid", "sample", "chunk"])
        rows = rows.append_column("old_log_probs", ragged(old_log_probs, offsets, FLOATS))
        self._write(_folder(self._root, "old_log_probs", iteration), f"rank-{rank:05d}.parquet", rows)

    def _write(self, folder: str, name: str, rows: pa.Table) -> None:
        # The bytes are complete before a file is opened. Otherwise an object store would publish a half-written stream
        # as it is closed.
        content = pa.BufferOutputStream()
        # Dictionaries would make the file larger, and take most of the time.
        pq.write_table(rows, content, compression="zstd", use_dictionary=False)
        path, aside = f"{folder}/{name}", f"{folder}/.{uuid.uuid4().hex}.tmp"
        try:
            self._filesystem.create_dir(folder, recursive=True)
            with self._filesystem.open_output_stream(aside) as stream:
                stream.write(content.getvalue())
            self._filesystem.move(aside, path)
        except OSError as error:
            # A storage that rejects a file may reject these requests, too.
            with suppress(OSError):
                if self._filesystem.get_file_info(aside).type != pafs.FileType.NotFound:
                    self._filesystem.delete_file(aside)
            raise OSError(
                error.errno or 5,
                f"the trajectories cannot be written to {path} ({error.strerror or error}); free space there, allow "
                "writing, or choose another folder with `trainer.default_local_dir`",
            ) from error


def why_unrecorded(error: BaseException) -> str | None:
    """Return the message of `Record` inside an error of another process, if the disk will not recover by itself.

    None for other errors.
    """
    found = UNRECORDED.search(str(error))
    standing = found is not None and any(os.strerror(number) in found[0] for number in STANDING)
    return found[0] if found and standing else None


def read_trajectories(
    run_dir: str, iteration: int, split: str = "train", columns: Sequence[str] | None = None
) -> pa.Table:
    """Read the rows of one iteration in the order of their chunks, with the column `iteration`.

    Args:
        run_dir: the run's folder or URL.
        iteration: number of the iteration; with `split="val"`, of the validated policy version.
        split: `train`, `val`, or `old_log_probs`.
        columns: columns to read, in addition to `iteration`; None reads all.

    Raises:
        ValueError: `split` is none of these, or the file system of a URL is unknown.
        FileNotFoundError: nothing was recorded of that iteration.
    """
    filesystem, root = filesystem_of(run_dir)
    folder = _folder(root, split, iteration)
    names = _files(filesystem, folder)
    if not names:
        have = [number for number, _ in _iterations(filesystem, root, split)]
        range_ = f"iterations {have[0]} to {have[-1]} are there" if have else "there are none at all"
        raise FileNotFoundError(2, f"no {split} trajectories of iteration {iteration} in {folder}; {range_}")
    wanted = None if columns is None else list(columns)
    tables = [pq.read_table(name, columns=wanted, filesystem=filesystem, partitioning=None) for name in names]
    table = pa.concat_tables(tables)
    place = table.schema.get_field_index("chunk") + 1
    return table.add_column(place, "iteration", pa.array([iteration] * len(table), pa.int64()))


def recorded_files(run_dir: str) -> dict[int, list[str]]:
    """Return the files of training rows by iteration, in order, as paths in the file system of `run_dir`.

    Raises:
        ValueError: the file system of a URL is unknown.
    """
    filesystem, root = filesystem_of(run_dir)
    return {number: _files(filesystem, path) for number, path in _iterations(filesystem, root, "train")}


def recorded_iterations(run_dir: str, split: str) -> list[int]:
    """Return the iterations (for `val`, policy versions) that have rows of `split`, in order.

    Raises:
        ValueError: the file system of a URL is unknown.
    """
    filesystem, root = filesystem_of(run_dir)
    return [number for number, path in _iterations(filesystem, root, split) if _files(filesystem, path)]


def iteration_files(run_dir: str, iteration: int, split: str) -> list[str]:
    """Return the files of one iteration, as paths in the file system of `run_dir`; empty if there are none.

    Raises:
        ValueError: the file system of a URL is unknown.
    """
    filesystem, root = filesystem_of(run_dir)
    return _files(filesystem, _folder(root, split, iteration))


def discard_trajectories(run_dir: str, iteration: int) -> list[int]:
    """Delete the training rows, validation rows and old log-probs of `iteration` and later ones.

    Called before a run resumes at `iteration`. Chunks are numbered from there again, so files of the abandoned attempt
    would mix with the new ones. Returns the iterations whose training rows were deleted.
    """
    filesystem, root = filesystem_of(run_dir)
    removed = []
    for split in FOLDERS:
        for number, path in _iterations(filesystem, root, split):
            if number >= iteration:
                filesystem.delete_dir(path)
                if split == "train":
                    removed.append(number)
    return removed


def _folder(root: str, split: str, iteration: int) -> str:
    if split not in FOLDERS:
        raise ValueError(f"split {split!r} of iteration {iteration} is none of {', '.join(FOLDERS)}")
    return f"{root}/{FOLDERS[split]}/iteration={iteration:06d}"


def _files(filesystem: pafs.FileSystem, folder: str) -> list[str]:
    infos = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return sorted(info.path for info in infos if info.base_name.endswith(".parquet"))


def _file_name(rows: pa.Table) -> str:
    # With dynamic sampling one table holds rows of several chunks, and each table begins in another chunk.
    chunk = rows["chunk"][0].as_py()
    if chunk >= 0:
        return f"chunk-{chunk:06d}.parquet"
    # Validation chunks have no number: the first row's offset keeps files in order, its group keeps them apart.
    group = hashlib.blake2b(str(rows["uid"][0]).encode(), digest_size=4).hexdigest()
    return f"chunk-{rows['offset'][0].as_py():06d}-{group}.parquet"


def _iterations(filesystem: pafs.FileSystem, root: str, split: str) -> list[tuple[int, str]]:
    selector = pafs.FileSelector(f"{root}/{FOLDERS[split]}", allow_not_found=True)
    found = []
    for info in filesystem.get_file_info(selector):
        name, _, number = info.base_name.partition("=")
        if info.type == pafs.FileType.Directory and name == "iteration" and number.isdigit():
            found.append((int(number), info.path))
    return sorted(found)
