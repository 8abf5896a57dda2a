"""Prompt files: from what `data.train_files` names to files known to be usable.

1. A path, folder or glob, local or behind any URL that pyarrow or fsspec opens, becomes an ordered list of files.
2. The footer of each is read once, in threads. Other formats are refused by name: `jobs.prepare json` converts them.
3. Everything refused is refused with a sentence that names config key, file, column and remedy.
"""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from pipeline.prompts.prompt_file import PromptFile, Slice, nearest, open_parquet, reason

# Opened by pyarrow itself, so that no further package is needed; every other scheme goes to fsspec.
ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
CONVERTIBLE = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz", ".arrow")
"""Endings of files that `jobs.prepare json` turns into parquet."""
FOOTER_THREADS = 16
GCS_RETRY_SECONDS = 60


def resolve(paths: Any, key: str, prompt_key: str = "prompt") -> list[PromptFile]:
    """Files that `paths` names, in order: entries as given, the files of a folder or glob by name.

    Args:
        paths: a path, folder, glob or URL, or a list of them.
        key: config key they come from, for messages.
        prompt_key: column of the chat messages (`data.prompt_key`).

    Raises:
        FileNotFoundError: nothing stands at a path, or a glob matches nothing.
        ValueError: a file is not of its format, has no rows, or lacks a column.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Iterable) or isinstance(paths, (bytes, dict)):
        raise ValueError(f"{key} is {paths!r}; give it a file, a folder, a glob or a list of them")
    found = [file for path in paths for file in _find(os.fspath(path), key)]
    if not found:
        raise ValueError(f"{key} is an empty list; give it at least one file")
    with ThreadPoolExecutor(min(FOOTER_THREADS, len(found))) as threads:
        return list(threads.map(lambda file: _opened(file, key, prompt_key), found))


def data_sources(files: list[PromptFile], allow_missing: bool = False) -> list[str]:
    """Distinct `data_source` values of all rows, sorted. Reads that column alone, a batch at a time.

    Args:
        files: what `resolve` returned.
        allow_missing: rows without a `data_source` are passed over.

    Raises:
        OSError: a file cannot be read.
        ValueError: a row has no `data_source`.
    """
    seen: set[str] = set()
    for file in files:
        for part, batch in _every(file):
            column = batch.column("data_source")
            if column.null_count and not allow_missing:
                number = pc.index(column.is_null(), True).as_py()
                place = file.place(part.row_group, part.start + number)
                raise ValueError(f"{file.key}: {place}: `data_source` is null or no text; every row needs one")
            seen.update(column.drop_null().unique().to_pylist())
    return sorted(seen)


def data_sources_by_row_group(file: PromptFile) -> list[set[str | None]]:
    """Distinct `data_source` values of each row group, None among them where a row has none.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[set[str | None]] = [set() for _ in file.row_groups]
    for part, batch in _every(file):
        found[part.row_group].update(batch.column("data_source").unique().to_pylist())
    return found


def _every(file: PromptFile) -> Iterator[tuple[Slice, pa.RecordBatch]]:
    return file.read([Slice(number, 0, rows) for number, rows in enumerate(file.row_groups)], ["data_source"])


def _opened(file: tuple[str, pyarrow.fs.FileSystem, str], key: str, prompt_key: str) -> PromptFile:
    name, filesystem, path = file
    if path.endswith(CONVERTIBLE):
        raise ValueError(
            f"{key}: {name} is not parquet; convert it once: python -m jobs.prepare json --input {name} --out DIR"
        )
    return open_parquet(name, filesystem, path, key, prompt_key)


def _find(path: str, key: str) -> list[tuple[str, pyarrow.fs.FileSystem, str]]:
    """(name, filesystem, path) of each file that one entry names."""
    listing, place, root = _open(path, key)
    arrow: pyarrow.fs.FileSystem
    if isinstance(listing, LocalFileSystem):
        arrow = pyarrow.fs.LocalFileSystem()
    elif isinstance(listing, ArrowFSWrapper):
        arrow = listing.fs
    else:
        arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(listing))
    try:
        files, missing = _files(listing, place, path)
    # Any filesystem package may be listing here, each with its own exceptions for "no such host" or "forbidden".
    except Exception as error:
        raise ValueError(
            f"{key}: {path} could not be listed: {reason(error)}. Check the address and the credentials."
        ) from error
    if not files:
        raise FileNotFoundError(f"{key}: {missing}")
    address = "" if isinstance(listing, LocalFileSystem) else path.partition("://")[0] + "://"
    if isinstance(listing, ArrowFSWrapper):
        address += _bucket(path)
    return [(address + file[len(root) :], arrow, file) for file in files]


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].partition("?")[0]


def _open(path: str, key: str) -> tuple[fsspec.AbstractFileSystem, str, str]:
    """(filesystem for listing, path in it, part of that path that the bucket of the URL stands for)."""
    if "://" not in path:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(path)), ""
    scheme, _, rest = path.partition("://")
    try:
        if scheme in ARROW_SCHEMES:
            # `?` is a wildcard unless settings such as `?region=...` follow it.
            rest, *query = re.split(r"\?(?=\w+=)", rest, maxsplit=1)
            settings = "?" + query[0] if query else ""
            if scheme in ("gs", "gcs") and "retry_limit_seconds" not in settings:
                # Without it, pyarrow tries for a quarter of an hour where credentials are missing.
                settings = f"{settings or '?'}&retry_limit_seconds={GCS_RETRY_SECONDS}".replace("?&", "?")
            arrow, root = pyarrow.fs.FileSystem.from_uri(f"{scheme}://{_bucket(path)}{settings}")
            root = root.rstrip("/")
            return ArrowFSWrapper(arrow), f"{root}/{rest.partition('/')[2]}".rstrip("/"), root
        listing, place = fsspec.core.url_to_fs(path)
        return listing, place, ""
    except (ImportError, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(
            f"{key}: {path} cannot be opened: {reason(error)}. A scheme that pyarrow does not know "
            "needs its fsspec package (`s3fs`, `gcsfs`, `adlfs`, `huggingface_hub`, ...)."
        ) from error


def _files(listing: fsspec.AbstractFileSystem, place: str, path: str) -> tuple[list[str], str]:
    """The file at `place`, the files of a folder or a glob's matches; and what is missing if there are none."""
    fixed = place
    if any(letter in place for letter in "*?[") and not listing.isfile(place):
        fixed = re.split(r"[*?\[]", place)[0].rpartition("/")[0]
    try:
        # `isfile`, `isdir` and `glob` answer "nothing there" when access is denied or a server is away; `info` raises.
        kind = listing.info(fixed)["type"]
    except FileNotFoundError:
        kind = "nothing"
    if fixed != place:
        files = [file for file in listing.glob(place) if listing.isfile(file)]
        return sorted(files), f"the glob {path} matches no file; check the folder and the pattern"
    if kind == "file":
        return [place], ""
    if kind == "directory":
        return _folder(listing, place, path)
    near = nearest(place.rsplit("/", 1)[-1], _siblings(listing, place))
    return [], f"{path} does not exist{near}; check the path"


def _folder(listing: fsspec.AbstractFileSystem, place: str, path: str) -> tuple[list[str], str]:
    """The parquet files of a folder at any depth, or else its files to convert, which are refused by name."""
    files = sorted(file for file in listing.find(place) if _visible(file, place))
    chosen = [file for file in files if file.endswith(".parquet")]
    chosen = chosen or [file for file in files if file.endswith(CONVERTIBLE) and not file.endswith(".json")]
    return chosen, f"folder {path} holds no .parquet file; name the files or another folder"


def _visible(file: str, folder: str) -> bool:
    """False for the `_temporary` and `.cache` entries that writers leave in a folder."""
    return not any(part.startswith(("_", ".")) for part in file[len(folder) :].split("/"))


def _siblings(listing: fsspec.AbstractFileSystem, place: str) -> list[str]:
    folder = place.rpartition("/")[0]
    if not folder or not listing.isdir(folder):
        return []
    return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in listing.ls(folder, detail=False)]
