"""Input files of data sets that come as JSON lines: found by name, read line by line, bad lines named."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def find(inputs: list[Path], names: Mapping[str, str]) -> dict[str, Path]:
    """The file of each split.

    Args:
        inputs: files, or folders that hold them.
        names: split by file name.

    Raises:
        ValueError: a path does not exist or is named otherwise, a folder holds no such file, or a split has two.
    """
    known = ", ".join(names)
    found: dict[str, Path] = {}
    for given in inputs:
        files = [given / name for name in names if (given / name).is_file()] if given.is_dir() else [given]
        if not files:
            raise ValueError(f"--input {given} holds none of {known}")
        for file in files:
            if file.name not in names:
                raise ValueError(f"--input {file} must be named one of {known}, which tells its split")
            if not file.is_file():
                raise ValueError(f"--input {file} does not exist")
            split = names[file.name]
            if split in found:
                raise ValueError(f"--input has two files for {split}: {found[split]} and {file}; name one of them")
            found[split] = file
    return found


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1; a name that ends with `.gz` is unpacked.

    Raises:
        ValueError: the file cannot be read, is cut off, or is not UTF-8; the sentence names file and line.
    """
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode()
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}, line {number}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read after line {number}: {error}") from error


def objects(file: Path, keys: tuple[str, ...], may_be_empty: tuple[str, ...] = ()) -> Iterator[tuple[str, dict]]:
    """Each line's object, with the words that name its place (`FILE, line 3`).

    Args:
        file: a file of JSON lines.
        keys: what must be text in each object.
        may_be_empty: those of them that may be blank.

    Raises:
        ValueError: as `lines`, and where a line is no object or lacks a key; the sentence names file and line.
    """
    for number, line in lines(file):
        where = f"{file}, line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        check(found, keys, where, may_be_empty)
        yield where, found


def check(found: Any, keys: tuple[str, ...], where: str, may_be_empty: tuple[str, ...] = ()) -> None:
    """Makes sure that what a file holds is an object with text under `keys`.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(found, dict):
        wanted = " and ".join(map(repr, keys))
        raise ValueError(f"{where}: must be an object with {wanted}, not a {type(found).__name__}")
    for key in keys:
        text(found.get(key), repr(key), where, key in may_be_empty)


def text(value: Any, name: str, where: str, may_be_empty: bool = False) -> str:
    """`value`, which must be text that can be written.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise ValueError(f"{where}: {name} must be text, not {str(value)[:80]!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name} cannot be written as UTF-8 ({error.reason})") from error
    return value
