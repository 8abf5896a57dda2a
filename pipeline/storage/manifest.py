"""What a checkpoint's files should be: the length and checksum of each, which a rank writes into its `complete_RANK`.

Lengths are compared by every reader, since one listing has them all. Checksums are compared by who loads the files,
before anything is loaded. A mark without content is of an earlier version, which listed no files. The settings in
`config.yaml` are not listed, as a person may change them.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow.fs as pafs

Manifest = Mapping[str, tuple[int, int]]
"""Bytes and CRC-32 of files, by name."""

PIECE = 2**20


def listed(folder: Path) -> str:
    """The manifest of the files in `folder`, as text."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".yaml"]
    return json.dumps({path.name: (path.stat().st_size, _checksum(path)) for path in files})


def parse(text: str) -> Manifest:
    """The manifest that `listed` wrote; empty for no text. Raises ValueError for another text."""
    try:
        return {str(name): (int(size), int(checksum)) for name, (size, checksum) in json.loads(text or "{}").items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"its list of files cannot be read ({error})") from error


def wrong_length(filesystem: pafs.FileSystem, path: str, manifest: Manifest) -> str | None:
    """The first file of the folder `path` that is missing or of another length, in words; None if there is none.

    Raises OSError if the storage does not answer.
    """
    found = {info.base_name: info for info in filesystem.get_file_info(pafs.FileSelector(path))}
    for name, (size, _) in manifest.items():
        info = found.get(name)
        if info is None or info.type != pafs.FileType.File:
            return f"{name} is missing"
        if info.size != size:
            return f"{name} has {info.size:,} of {size:,} bytes"
    return None


def wrong_content(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> str | None:
    """The first file in `folder` whose content is not as it was written, in words; None if there is none.

    Only one of `parts` equal parts of the files is read, `part`. Raises OSError if one cannot be read.
    """
    for name, (_, checksum) in sorted(manifest.items())[part::parts]:
        if _checksum(folder / name) != checksum:
            return f"{name} has another content than was written"
    return None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value
