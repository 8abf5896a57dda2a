"""Access to the storage of a run's files: a local or shared disk, or a URL that pyarrow or fsspec knows (`s3://`,
...)."""

import errno
import os

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs

PYARROW = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss", "mock")
"""Schemes of URLs that pyarrow itself supports."""


STANDING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOTDIR}
"""Values of `errno` for errors that waiting seldom resolves: disk full, over the quota, read-only, forbidden, a file in
place of a folder."""


def check_scheme(place: str) -> None:
    """Check, without a connection, that the file system of a URL is known.

    Raises:
        ValueError: neither pyarrow nor fsspec knows it, or fsspec lacks the package for it.
    """
    scheme, separator, _ = place.partition("://")
    if separator and scheme not in PYARROW:
        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{place!r} is on no file system that pyarrow or fsspec knows: {error}") from error


def filesystem_of(place: str) -> tuple[pafs.FileSystem, str]:
    """Return (file system, path in it) of a folder or URL.

    Raises:
        ValueError: neither pyarrow nor fsspec knows the file system of the URL.
    """
    if "://" not in place:
        return pafs.LocalFileSystem(), os.path.abspath(place)
    try:
        filesystem, root = pafs.FileSystem.from_uri(place)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        try:
            other, root = fsspec.core.url_to_fs(place)
        except (ImportError, ValueError) as unknown:
            raise ValueError(f"{place!r} is on no file system that pyarrow or fsspec knows: {unknown}") from error
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(other))
    return filesystem, root.rstrip("/")


def move_folder(filesystem: pafs.FileSystem, source: str, target: str) -> None:
    """Rename a folder; on a storage that cannot rename, copy it and delete the old one. Raises OSError if both fail."""
    try:
        filesystem.move(source, target)
    except (OSError, NotImplementedError):
        if isinstance(filesystem, pafs.LocalFileSystem):
            raise
        pafs.copy_files(source, target, source_filesystem=filesystem, destination_filesystem=filesystem)
        filesystem.delete_dir(source)
