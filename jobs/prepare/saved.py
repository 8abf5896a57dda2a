"""Find the data files in folders saved by Hugging Face `datasets`, from the index in the folder.

1. `DatasetDict.save_to_disk` writes `dataset_dict.json` with the names of the splits, each a folder of its own.
2. `Dataset.save_to_disk` writes `state.json` with the names of the data files in their order.
3. A folder of the cache has `dataset_info.json` with the splits; a split's files are called `NAME-SPLIT.arrow` or
   `NAME-SPLIT-00000-of-00002.arrow`.

`Dataset.map` and similar methods leave files `cache-*.arrow` in such folders, which are in no index and not read.
"""

import json
import re
from pathlib import Path
from typing import Any


def splits(folder: Path) -> dict[str, list[Path]] | None:
    """Return the data files of each split, by the name of the split; None if `datasets` did not save the folder.

    For a single data set, the name of the split is the name of the folder.

    Raises:
        ValueError: the index cannot be read, or names a file that does not exist.
    """
    if (index := _read(folder / "dataset_dict.json")) is not None:
        return {split: _data_files(folder / split) for split in _names(index, "splits", folder)}
    if (folder / "state.json").is_file():
        return {folder.resolve().name: _data_files(folder)}
    if arrows := sorted(folder.glob("*.arrow")):
        index = _read(folder / "dataset_info.json")
        if index and isinstance(index.get("splits"), dict):
            return {split: _cached(folder, split, arrows) for split in _names(index, "splits", folder)}
    return None


def _data_files(folder: Path) -> list[Path]:
    state = _read(folder / "state.json")
    if state is None:
        raise ValueError(f"{folder} has no state.json, which names the data files; save the data set again")
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder} selects rows by a file of indices; load it with datasets and save it again")
    files = [folder / name for name in _names(state, "_data_files", folder)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist, but {folder / 'state.json'} names it")
    return files


def _names(index: dict[str, Any], key: str, folder: Path) -> list[str]:
    """Return the names of files or folders in the entry `key` of an index.

    Raises ValueError if there are none, or one is outside of `folder`.
    """
    entries = index.get(key)
    names = [str(entry.get("filename", "") if isinstance(entry, dict) else entry) for entry in entries or []]
    if not names or not all(name.strip(".") and name == Path(name).name for name in names):
        raise ValueError(f"{folder}: the index of the folder names no data in {key!r}, or data in another folder")
    return names


def _cached(folder: Path, split: str, arrows: list[Path]) -> list[Path]:
    files = [file for file in arrows if re.fullmatch(rf".+-{re.escape(split)}(-\d+-of-\d+)?", file.stem)]
    files = [file for file in files if not file.name.startswith(("cache-", "tmp"))]
    if not files:
        raise ValueError(f"{folder} has no file of the split {split!r}, which its dataset_info.json names")
    return files


def _read(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file does not exist. Raises ValueError for other content."""
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(index, dict):
        raise ValueError(f"{file} holds a {type(index).__name__}, but an object is needed")
    return index
