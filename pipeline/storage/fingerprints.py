"""Fingerprints: the size and hash of each file that a run reads. A start compares them to detect changed files.

    runs/NAME/fingerprints.json    model, prompts or code -> setting -> file -> mark

The size and hash of one file are its mark. Each checkpoint has a copy of the fingerprints. Names are relative to the
folder that a setting names, so that files may move together. Of a large file only a few MiB are read: both ends, the
header of safetensors, and blocks between them.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config.trainer import FILES
from pipeline.storage.filesystem import filesystem_of

FILE = "fingerprints.json"
COMMIT = "commit"
"""Key, instead of a file's name, for the commit of a model on the Hub."""
END, BLOCK, BLOCKS = 2**20, 2**16, 16
"""Number of bytes that are read at each end of a file and in each block between them, and the number of blocks."""
HEADER = 2**27
"""Maximum length of a safetensors file's header, in bytes."""
READERS = 16
SHOWN = 6
"""Maximum number of changed files that a message lists per setting."""

Marks = dict[str, str]
"""Marks (size and hash) of the files that one setting names, by file name."""


@dataclass(frozen=True)
class Fingerprints:
    """Marks of all files that a run reads, by the kind of file and by the setting that names them."""

    model: dict[str, Marks] = field(default_factory=dict)
    prompts: dict[str, Marks] = field(default_factory=dict)
    """Marks in the order in which the files are read, since it decides the order of prompts."""
    code: dict[str, Marks] = field(default_factory=dict)
    began: str = ""
    """Time at which the run began."""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Changes that `trainer.accept_changed` allowed: time, last iteration before the change, and changed files."""

    @property
    def history(self) -> str:
        """The allowed changes, as one line of text; "" if there were none."""
        return "; ".join(
            f"since iteration {entry['behind_iteration'] + 1}: "
            + ", ".join(f"{setting} ({text})" for setting, text in entry["changed"].items())
            for entry in self.accepted
        )

    def of(self, kind: str) -> dict[str, Marks]:
        """Return the marks of one kind (an entry of `FILES`), by setting."""
        return getattr(self, kind)

    def compares(self, key: str) -> bool:
        """Return True if the marks for the setting `key` cover all its files, as they do for models and prompts."""
        return key in self.model or key in self.prompts

    def covers(self, key: str) -> bool:
        """Return True if there are marks for files that the setting `key` names, or settings below it."""
        names = [name for kind in FILES for name in self.of(kind)]
        return any(name == key or name.startswith(f"{key}.") for name in names)

    def changes(self, now: "Fingerprints", kind: str) -> dict[str, str]:
        """Describe, by setting, how the files of one kind differ in `now`; settings without marks here are left out.

        A model that was read from the Hub, and is in no cache now, cannot be compared.
        """
        changed = {}
        for setting, was in self.of(kind).items():
            there = now.of(kind).get(setting, {})
            unknown = not there and COMMIT in was
            if not unknown and (found := list(_differences(was, there, ordered=kind == "prompts"))):
                more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
                changed[setting] = ", ".join([*found[:SHOWN], *more])
        return changed

    def continued(self, now: "Fingerprints", iteration: int, changed: dict[str, str]) -> "Fingerprints":
        """Return the fingerprints of a run that continues with the files of `now`.

        Args:
            now: fingerprints of the files as they are now.
            iteration: last iteration before the run continues.
            changed: description of the changes, by setting, which is recorded if there are any.
        """
        accepted = list(self.accepted)
        if changed:
            accepted.append({"at": stamp(), "behind_iteration": iteration, "changed": changed})
        # A mark that cannot be computed now stays known.
        model, prompts = self.model | now.model, self.prompts | now.prompts
        # A file that an option names, and that did not exist at the beginning, is written by the user's code.
        code = self.code | {setting: found for setting, found in now.code.items() if setting in self.code}
        return replace(self, model=model, prompts=prompts, code=code, accepted=accepted)

    def save(self, folder: Path) -> None:
        """Write the fingerprints into a run's folder, in one step."""
        part = folder / f"{FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(folder / FILE)


def stamp() -> str:
    """Return the local date and time as text, for the record."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def load(place: str) -> Fingerprints | None:
    """Load the fingerprints in the folder or URL of a run or a checkpoint; None if there are none.

    Raises:
        ValueError: the file is damaged.
        OSError: the storage does not answer.
    """
    filesystem, path = filesystem_of(place)
    if filesystem.get_file_info(f"{path}/{FILE}").type != pafs.FileType.File:
        return None
    with filesystem.open_input_stream(f"{path}/{FILE}") as stream:
        content = stream.read()
    try:
        return Fingerprints(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{place}/{FILE} is damaged ({error}); restore it, or delete it to go on without comparing files"
        ) from error


def marks(files: Iterable[tuple[str, pafs.FileSystem, str]]) -> Marks:
    """Compute the marks of files, each given as (name, file system, path).

    Raises:
        OSError: a file cannot be read.
    """
    found = list(files)
    with ThreadPoolExecutor(READERS) as threads:
        made = list(threads.map(lambda file: mark(file[1], file[2]), found))
    result: Marks = {}
    for (name, _, _), one in zip(found, made, strict=True):
        # Files in different folders may have the same name.
        number = 1
        while (key := name if number == 1 else f"{name} ({number})") in result:
            number += 1
        result[key] = one
    return result


def mark(filesystem: pafs.FileSystem, path: str) -> str:
    """Compute the mark of a file: "SIZE bytes HASH". Of a large file only parts are hashed."""
    try:
        with filesystem.open_input_file(path) as file:
            size = file.size()
            digest = hashlib.blake2b(digest_size=16)
            for start, count in _parts(file, size, path.endswith(".safetensors"), filesystem):
                file.seek(start)
                digest.update(file.read(count))
    except (OSError, pa.ArrowException) as error:
        raise OSError(getattr(error, "errno", None) or 5, f"{path} cannot be read: {error}") from error
    return f"{size} bytes {digest.hexdigest()}"


def _parts(file: pa.NativeFile, size: int, is_tensors: bool, filesystem: pafs.FileSystem) -> Iterator[tuple[int, int]]:
    """Yield (start, length), in bytes, of each part of a file that is hashed; the whole file if it is small."""
    first = END
    if is_tensors and size >= 8:
        length = int.from_bytes(file.read(8), "little")
        first = max(END, 8 + min(length, HEADER))
    if size <= first + END:
        yield 0, size
        return
    yield 0, first
    yield size - END, END
    # Each block is a request to a store, which may read ahead by far more.
    if isinstance(filesystem, pafs.LocalFileSystem):
        step = (size - END - first) // BLOCKS
        yield from ((first + step * number, min(BLOCK, step)) for number in range(BLOCKS))


def _differences(was: Mapping[str, str], now: Mapping[str, str], ordered: bool) -> Iterator[str]:
    """Yield a clause for each difference between two sets of marks.

    Args:
        was: earlier marks by file name.
        now: present marks by file name.
        ordered: true if the order of the files counts, and their names do not.
    """
    if (list(was.values()) == list(now.values())) if ordered else (was == now):
        return
    for name in [*was, *(name for name in now if name not in was)]:
        old, new = was.get(name), now.get(name)
        if old is None:
            yield f"{name} is new"
        elif new is None:
            yield f"{name} is gone"
        elif name == COMMIT and old != new:
            yield f"the commit on the Hub is {new} and was {old}"
        elif old != new:
            before, after = (text.partition(" bytes ")[0] for text in (old, new))
            yield f"{name} has other content" if before == after else f"{name} has {after} bytes and had {before}"
    if dict(was) == dict(now):
        yield "the same files in another order"
