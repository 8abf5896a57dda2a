"""Make the paths in settings absolute: workers have another working directory than the command.

    a model        a folder; a name on the Hub is not changed           links are followed
    files          paths, globs, URLs, or a list of them                links are followed except in the last part
    code           a file `x.py` or `x.py:Name`; modules are unchanged  like files

A path may be relative, begin with `~` or `file://`, contain `..`, or end with a slash. A setting that holds a path
declares the kind of path: `setting(None, path="model")`.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.agent import AgentConfig
from pipeline.config.paths import without_scheme
from pipeline.config.teacher import TeacherConfig
from pipeline.imports import is_file, split

SERVERS = ("mcp:", "openenv:")
"""Prefixes of `agent.tools` and `agent.environment` that name a server."""
NO_PATH = ("auto", "never")
"""Values of `trainer.resume` that are not checkpoints."""


def name_from_root(config: Any) -> None:
    """Make the local paths in the settings of a command absolute, in place.

    Args:
        config: an instance of a dataclass; nested sections are changed too.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            name_from_root(value)
        elif (kind := item.metadata.get("path")) is not None:
            setattr(config, item.name, KINDS[kind](value))
    if isinstance(config, AgentConfig | TeacherConfig):
        _name_sections(config)


def model(value: str | None) -> str | None:
    """Return the absolute path of an existing model folder. Other values (names on the Hub, missing folders, None) are
    returned unchanged."""
    value = without_scheme(value)
    return os.path.realpath(value) if value and os.path.exists(value) else value


def files(value: Any) -> Any:
    """Make a path or glob, or each of a list of them, absolute. URLs are returned unchanged."""
    if isinstance(value, list):
        return [files(item) for item in value]
    value = without_scheme(value)
    return value if not isinstance(value, str) or not value or "://" in value else file(value)


def file(path: str) -> str:
    """Return the absolute path of a file. Links and `..` are resolved in the path of its folder, but the last part is
    kept, even if it is a link."""
    path = path.rstrip("/") or "/"
    folder, name = os.path.split(path)
    return os.path.realpath(path) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)


def _resumed(value: str) -> str:
    return value if value in NO_PATH else str(files(value))


def _script(value: str | None) -> str | None:
    """Return the absolute path of a Python file. The name of a module is returned unchanged, even if a folder has the
    same name."""
    return file(without_scheme(value)) if value and is_file(value) else value


def _scripts(functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one | {"path": _script(one["path"])} if "path" in one else one for name, one in functions.items()}


def _name_sections(section: AgentConfig | TeacherConfig) -> None:
    """Make the paths in the settings of named agents or teachers absolute, in place."""
    declared = section.declared()
    for name, settings in section.named.items():
        own = declared[name]
        name_from_root(own)
        settings.update({key: getattr(own, key) for key in settings})


def _code(value: Any) -> Any:
    """Make the path in `file.py` or `file.py:Name`, or in each entry of a list of them, absolute."""
    if isinstance(value, list):
        return [_member(one) for one in value]
    return _member(value) if value else value


def _program(value: str | None) -> str | None:
    """Make the path of an interpreter absolute. A link is not followed, since Python finds its virtual environment by
    the path of the link."""
    return file(without_scheme(value)) if value and "/" in value else value


def _member(name: str) -> str:
    """Make the path in `file.py`, `file.py:Name` or the command of an MCP server absolute. `module:Name` and URLs of
    servers are returned unchanged."""
    if name.startswith(SERVERS):
        scheme, _, text = name.partition(":")
        try:
            words = shlex.split(text)
        except ValueError:
            return name
        return name if (named := _words(words)) == words else f"{scheme}: {shlex.join(named)}"
    path, member = split(name)
    own = f":{member}" if member else ""
    return f"{file(without_scheme(path))}{own}" if is_file(path) or path.endswith((".yaml", ".yml")) else name


def _words(words: list[str]) -> list[str]:
    """Return the words of a command; words that are existing files become absolute paths."""
    return [file(home) if Path(home := without_scheme(word)).is_file() else word for word in words]


KINDS: dict[str, Callable[[Any], Any]] = {
    "model": model,
    "files": files,
    "resume": _resumed,
    "script": _script,
    "scripts": _scripts,
    "code": _code,
    "command": _words,
    "program": _program,
}
"""Kinds of path that a setting can declare, each with the function that makes a value of this kind absolute."""
