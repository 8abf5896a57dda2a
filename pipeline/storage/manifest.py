"""The manifest of a checkpoint: length and checksum of each file. A rank writes its manifest into `complete_RANK`.

Every reader compares lengths, since one listing of the folder has them all. Only the process that loads the files
compares checksums, before it loads anything. A `complete_RANK` without content is from an earlier version, which wrote
no manifest. The settings in `config.yaml` are not in it, because users may change them.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow.fs as pafs

Manifest = Mapping[str, tuple[int, int]]
"""(Length in bytes, CRC-32) of files, by name."""

PIECE = 2**20


def listed(folder: Path) -> str:
    """Make the manifest of the files in `folder`, as text."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".yaml"]
    return json.dumps({path.name: (path.stat().st_size, _checksum(path)) for path in files})


def parse(text: str) -> Manifest:
    """Parse a manifest that `listed` made; an empty text gives an empty manifest. Raises ValueError for other text."""
    try:
        return {str(name): (int(size), int(checksum)) for name, (size, checksum) in json.loads(text or "{}").items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"its list of files cannot be read ({error})") from error


def wrong_length(filesystem: pafs.FileSystem, path: str, manifest: Manifest) -> str | None:
    """Describe the first file in the folder `path` that is missing or of another length; None if all are right.

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
    """Describe the first file in `folder` whose content differs from its checksum; None if all are right.

    Args:
        folder: the folder.
        manifest: manifest of the files.
        part, parts: check only share number `part`, from 0, of `parts` equal shares of the files.

    Raises:
        OSError: a file cannot be read.
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
