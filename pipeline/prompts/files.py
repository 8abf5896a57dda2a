"""Find the prompt files that a setting such as `data.train_files` names, and check that they are usable.

A path, folder or glob, local or in any URL that pyarrow or fsspec opens, becomes an ordered list of files. The parquet
footer of each file is read once, in threads.
"""

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import nearest, short_reason
from pipeline.prompts.parquet import PromptFile, check_prompts, open_parquet

# Pyarrow opens URLs of these schemes without a further package; fsspec opens all others.
ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
CONVERTIBLE = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz", ".arrow")
"""Endings of files that `jobs.prepare json` can convert to parquet."""
TABLES = {"_delta_log/": "Delta Lake", r"\.hoodie/": "Hudi", r"metadata/.*\.metadata\.json": "Iceberg"}
"""Pattern for the path of a log file, to the table format that writes it. Folders of these formats may also hold files
with deleted rows."""
SPLITS = {"train": "train", "training": "train"} | dict.fromkeys(("test", "val", "valid", "validation", "dev"), "test")
"""Words in names of files and folders that name a split, and the split."""
FOOTER_THREADS = 16
GCS_RETRY_SECONDS = 60

File = tuple[str, pyarrow.fs.FileSystem, str]
"""(Name for messages, filesystem, path in the filesystem)."""


def resolve(paths: Any, key: str, check: Callable[[pa.Schema, str], None] = check_prompts) -> list[PromptFile]:
    """Find the files in `paths`, and read and check the footer of each.

    Args:
        paths: a path, folder, glob or URL, or a list of them.
        key: the setting with the value `paths`, for messages.
        check: function of a schema and of the beginning of an error text, which raises ValueError if a column is
            missing.

    Raises:
        FileNotFoundError: a path does not exist, or a glob matches no file.
        ValueError: a file is not parquet, has no rows, or lacks a column.
    """
    found = find(paths, key)
    with ThreadPoolExecutor(min(FOOTER_THREADS, len(found))) as threads:
        return list(threads.map(lambda file: _opened(file, key, check), found))


def find(paths: Any, key: str) -> list[File]:
    """Find the files in `paths`, without opening them.

    Entries of a list keep their order; the files of a folder or a glob are sorted by name. Arguments and errors are the
    same as for `resolve`.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Iterable) or isinstance(paths, (bytes, dict)):
        raise ValueError(f"{key} is {paths!r}; give it a file, a folder, a glob or a list of them")
    found = [file for path in paths for file in _find(os.fspath(path), key)]
    if not found:
        raise ValueError(f"{key} is an empty list; give it at least one file")
    return found


def _opened(file: File, key: str, check: Callable[[pa.Schema, str], None]) -> PromptFile:
    name, filesystem, path = file
    if path.endswith(CONVERTIBLE):
        raise ValueError(
            f"{key}: {name} is not parquet; convert it once: python -m jobs.prepare json --input {name} --out DIR"
        )
    return open_parquet(name, filesystem, path, key, check)


def _find(path: str, key: str) -> list[File]:
    """Find the files of one path, folder, glob or URL."""
    try:
        listing, arrow, place, root, address = _open(path)
    except (ImportError, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(
            f"{key}: {path} cannot be opened: {short_reason(error)}. A scheme that pyarrow does not know "
            "needs its fsspec package (`s3fs`, `gcsfs`, `adlfs`, `huggingface_hub`, ...)."
        ) from error
    try:
        files, missing = _files(listing, place, path)
    # The filesystem may be of any package, each with its own exceptions for "no such host" or "forbidden".
    except Exception as error:
        raise ValueError(
            f"{key}: {path} could not be listed: {short_reason(error)}. Check the address and the credentials."
        ) from error
    if not files:
        raise FileNotFoundError(f"{key}: {missing}")
    return [(address + file.removeprefix(root), arrow, file) for file in files]


def _open(path: str) -> tuple[fsspec.AbstractFileSystem, pyarrow.fs.FileSystem, str, str, str]:
    """Open the filesystem of a path or URL.

    Returns (fsspec filesystem for listing, pyarrow filesystem for reading, path in both, prefix of such paths, text
    that replaces this prefix in a URL).
    """
    if "://" not in path:
        return LocalFileSystem(), pyarrow.fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path)), "", ""
    scheme, _, rest = path.partition("://")
    if scheme not in ARROW_SCHEMES:
        listing, place = fsspec.core.url_to_fs(path)
        if isinstance(listing, LocalFileSystem):
            return listing, pyarrow.fs.LocalFileSystem(), place, "", ""
        return listing, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(listing)), place, "", f"{scheme}://"
    # `?` is a wildcard unless settings such as `?region=...` follow it.
    rest, *query = re.split(r"\?(?=\w+=)", rest, maxsplit=1)
    settings = "?" + query[0] if query else ""
    if scheme in ("gs", "gcs") and "retry_limit_seconds" not in settings:
        # Without it, pyarrow tries for a quarter of an hour if credentials are missing.
        settings = f"{settings or '?'}&retry_limit_seconds={GCS_RETRY_SECONDS}".replace("?&", "?")
    bucket, _, inside = rest.partition("/")
    address = f"{scheme}://{bucket}"
    arrow, root = pyarrow.fs.FileSystem.from_uri(address + settings)
    root = root.rstrip("/")
    return ArrowFSWrapper(arrow), arrow, f"{root}/{inside}".rstrip("/"), root, address


def _files(listing: fsspec.AbstractFileSystem, place: str, path: str) -> tuple[list[str], str]:
    """List the file, the files of the folder or the matches of the glob `place`.

    Returns (files, text for the error if there are none). `path` is the user's spelling of `place`.
    """
    fixed = place
    if any(letter in place for letter in "*?[") and not listing.isfile(place):
        fixed = re.split(r"[*?\[]", place)[0].rpartition("/")[0]
    try:
        # If access is denied or a server is away, `isfile`, `isdir` and `glob` report "nothing there", but `info`
        # raises.
        kind = listing.info(fixed)["type"]
    except FileNotFoundError:
        kind = "nothing"
    if fixed != place:
        files = [file for file in listing.glob(place) if listing.isfile(file)]
        return sorted(files), f"the glob {path} matches no file; check the folder and the pattern"
    if kind == "file":
        return [place], ""
    if kind == "directory":
        entries = listing.find(place)
        if problem := _ambiguity(entries, place, path):
            return [], problem
        found = sorted(file for file in entries if _visible(file, place))
        chosen = [file for file in found if file.endswith(".parquet")]
        # Without parquet files, the convertible ones are refused by name.
        chosen = chosen or [file for file in found if file.endswith(CONVERTIBLE) and not file.endswith(".json")]
        return chosen, f"folder {path} has no .parquet file; name the files or another folder"
    folder, _, name = place.rpartition("/")
    siblings = listing.ls(folder, detail=False) if folder and listing.isdir(folder) else []
    near = nearest(name, [entry.rstrip("/").rpartition("/")[2] for entry in siblings])
    return [], f"{path} does not exist{near}; check the path"


def _ambiguity(entries: list[str], folder: str, path: str) -> str | None:
    """Return an error text if it is not clear which parquet files of a folder to read: it is a table with a log, or
    holds two splits. Else None.

    Args:
        entries: paths of all files in the folder.
        folder: path of the folder in the filesystem.
        path: the user's spelling of the folder.
    """
    names = sorted(entry[len(folder) :].lstrip("/") for entry in entries)
    for log, kind in TABLES.items():
        if any(re.match(log, name) for name in names):
            return (
                f"{path} is a table of {kind}, whose log selects its valid files; write its rows to parquet files in "
                "another folder, or name the files"
            )
    splits: dict[str, str] = {}
    for name in names:
        found = {SPLITS[word] for word in re.split("[^a-z]+", name.lower()) if word in SPLITS}
        # A name with the words of two splits, such as train_unit_test, marks neither.
        if name.endswith(".parquet") and len(found) == 1 and _visible(name, ""):
            splits[found.pop()] = name
    if len(splits) > 1:
        files = " and ".join(splits.values())
        return f"{path} holds files of two splits, {files}; name the files of one split, as in {path}/{splits['train']}"
    return None


def _visible(file: str, folder: str) -> bool:
    """Return False if a part of the path of `file` inside `folder` begins with `_` or `.`.

    Writers leave such files behind, for example in `_temporary` or `.cache`.
    """
    return not any(part.startswith(("_", ".")) for part in file[len(folder) :].split("/"))
