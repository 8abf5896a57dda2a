"""Read the images of a prompt from its row: encoded images, or structs with encoded images or paths of files.

Structs `{bytes, path}` are the format of verl's files and of the package `datasets`.
"""

import os
from collections.abc import Mapping
from typing import Any

import fsspec

from pipeline.cells import plain
from pipeline.config.data import DataConfig
from pipeline.config.supervised import SFTDataConfig
from pipeline.errors import short_reason

WANTED = "give a list of encoded images, or of structs {bytes, path}"


def read_images(values: Mapping[str, Any], file: str, data: DataConfig | SFTDataConfig) -> list[bytes]:
    """Return the encoded images of a prompt, in order; none if the row has no column `data.image_key`, or it is empty.

    Args:
        values: columns of the row as read.
        file: path or URL of the file of the row; paths of images are relative to its folder.
        data: the section `data`.

    Raises:
        ValueError: the column holds something else, a file cannot be read, or the images are larger together than
            `data.max_image_bytes`.
    """
    column = f"column {data.image_key!r} (data.image_key)"
    cell = plain(values.get(data.image_key))
    if cell is None:
        return []
    if not isinstance(cell, list):
        raise ValueError(f"{column} is {cell!r:.80}; {WANTED}")
    images = [_encoded(entry, os.path.dirname(file), f"{column}, image {number}") for number, entry in enumerate(cell)]
    if (size := sum(map(len, images))) > data.max_image_bytes:
        raise ValueError(
            f"{column} has {size} bytes of images, more than data.max_image_bytes={data.max_image_bytes}; scale them "
            "down, or raise data.max_image_bytes"
        )
    return images


def _encoded(entry: Any, folder: str, place: str) -> bytes:
    if isinstance(entry, bytes):
        return entry
    content, path = (entry.get("bytes"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if isinstance(content, bytes):
        return content
    if not isinstance(path, str):
        raise ValueError(f"{place} is {entry!r:.80}; {WANTED}")
    path = path.removeprefix("file://")
    if "://" in path:
        raise ValueError(f"{place} is at {path:.200}; download it, and give its bytes or a path relative to the file")
    try:
        with fsspec.open(os.path.join(folder, os.path.expanduser(path)), "rb") as opened:
            found: bytes = opened.read()
    # The filesystem may be of any package, each with its own exceptions.
    except Exception as error:
        raise ValueError(
            f"{place} cannot be read from {path} in {folder or 'the current folder'}: {short_reason(error)}"
        ) from error
    return found
