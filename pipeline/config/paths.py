"""Paths in settings and arguments: expand `~` and `file://`, and tell a local folder from a model on the Hub."""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FILE_URL = re.compile(r"file:(?://(?:localhost)?)?(?=/(?!/))")
OUR_FOLDERS = ("models", "runs")
"""Folders that Slipstream's commands write to. A path that begins with one of them is not a name on the Hub."""


def expand_home(value: Any) -> Any:
    """Replace `~` at the beginning of a path by the home folder. URLs, and values that are not text, stay as they
    are."""
    is_home = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return os.path.expanduser(value) if is_home else value


def without_scheme(value: Any) -> Any:
    """Remove `file://` or expand `~` at the beginning of a path. Other URLs, and values that are not text, stay as they
    are."""
    if not isinstance(value, str) or not (local := FILE_URL.match(value)):
        return expand_home(value)
    path = value[local.end() :]
    # A URL percent-encodes characters that a file name may hold, but `%` may also be a character of the name.
    return path if os.path.exists(path) else unquote(path)


def expand_argument(text: str) -> str:
    """Replace `~` in an argument `key=value` by the home folder; the shell does not expand it after `=`."""
    key, equals, value = text.partition("=")
    return key + equals + re.sub(r"(^|[\[,])~(?=/|$)", lambda match: match[1] + os.path.expanduser("~"), value)


def local_path(text: str) -> Path:
    """Return the text of a command's argument as a path, without `file://` and with `~` expanded."""
    return Path(without_scheme(text))


def expand_settings(config: Any) -> None:
    """Replace `~` by the home folder in all settings of a dataclass, also in nested sections and lists, in place."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            expand_settings(value)
        elif isinstance(value, list):
            setattr(config, item.name, [expand_home(entry) for entry in value])
        else:
            setattr(config, item.name, expand_home(value))


def check_out(out: Path, sources: Iterable[str | None] = ()) -> None:
    """Refuse the output folder `out` of a model if it has files or overlaps with an input model.

    Args:
        out: the output folder; it must be new or empty.
        sources: input models: folders, or names on the Hub.

    Raises:
        ValueError: `out` is not empty, or `check_apart` refuses it.
    """
    check_apart(out, sources)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder or remove it")


def check_apart(out: Path, sources: Iterable[str | None] = ()) -> None:
    """Refuse the output folder `out` of a model if it is a file, or overlaps with one of the input models `sources`.

    Raises:
        ValueError: `out` is a file, or is, contains or lies inside one of the `sources` (links are followed).
    """
    # `Path.resolve` raises RuntimeError for links in a circle.
    place = Path(os.path.realpath(out))
    for source in filter(None, sources):
        read = Path(os.path.realpath(local_path(source)))
        if os.path.exists(read) and (place == read or read in place.parents or place in read.parents):
            relation = "is" if place == read else "lies in" if read in place.parents else "holds"
            raise ValueError(f"{out} {relation} {source}, which is read; choose another folder")
    if os.path.lexists(out) and not out.is_dir():
        what = "a broken link" if out.is_symlink() else "a file"
        raise ValueError(f"{out} is {what}; choose another folder or remove it")


def named_folder(path: str, key: str | None = None) -> Path | None:
    """Return the local folder `path`, or None if `path` is a name on the Hub.

    Args:
        path: a folder, or a Hub name such as `name` or `owner/name`.
        key: name of the setting with the value `path`, for the text of errors.

    Raises:
        ValueError: the path is a file, or it is neither an existing folder nor in the form of a Hub name.
    """
    label = f"{key}={path}" if key else path
    folder = local_path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        made = f", or make a folder: python -m jobs.from_gguf {path} --out DIR" if folder.suffix == ".gguf" else ""
        raise ValueError(f"{label} is a file; give a folder or a Hub name{made}")
    first, separator, _ = path.partition("/")
    begins_with_a_folder = separator and (first in OUR_FOLDERS or Path(first).is_dir())
    if begins_with_a_folder or not HUB_NAME.fullmatch(path):
        raise ValueError(
            f"{label}: the folder {folder.absolute()} does not exist, and this is not a name on the Hugging Face Hub"
        )
    return None


def model_folder(path: str, key: str | None = None) -> Path | None:
    """Return the local folder `path` of a Hugging Face model, or None if `path` is a name on the Hub.

    Raises:
        ValueError: `named_folder` refuses the path, or the folder does not hold a model.
    """
    folder = named_folder(path, key)
    if folder is not None and not (folder / "config.json").is_file():
        label = f"{key}={path}" if key else path
        raise ValueError(f"{label} has no config.json, so it is not the folder of a Hugging Face model")
    return folder
