"""Where a run's files are: a folder on a local or shared disk, or a URL that pyarrow knows (`s3://`, `gs://`, ...)."""

import os

import pyarrow as pa
import pyarrow.fs as pafs


def filesystem_of(place: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a folder or URL, and the path in it.

    Raises:
        ValueError: a URL of a file system that pyarrow does not know.
    """
    if "://" not in place:
        return pafs.LocalFileSystem(), os.path.abspath(place)
    try:
        filesystem, root = pafs.FileSystem.from_uri(place)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{place!r} is on no file system that pyarrow knows: {error}") from error
    return filesystem, root.rstrip("/")
