"""Absolute paths in settings: workers have another working directory than the command.

    a model        a folder, or a name on the Hub, which stays          links are followed
    files          paths, globs, URLs, or a list of them                links are followed except in the last part
    code           a file `x.py` or `x.py:Name`; modules stay           like files

A path may be relative, begin with `~` or `file://`, contain `..`, or end with a slash. A setting that holds one
declares its kind: `setting(None, path="model")`.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.agent import AgentConfig
from pipeline.config.paths import without_scheme
from pipeline.imports import is_file, split

SERVERS = ("mcp:", "openenv:")
"""Prefixes of `agent.tools` and `agent.environment` that name a server."""
NO_PATH = ("auto", "never")
"""Values of `trainer.resume` that are not checkpoints."""


def name_from_root(config: Any) -> None:
    """Make the local paths in the settings of a command absolute.

    Args:
        config: an instance of a dataclass; its sections are changed too.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            name_from_root(value)
        elif (kind := item.metadata.get("path")) is not None:
            setattr(config, item.name, KINDS[kind](value))
    if isinstance(config, AgentConfig):
        _name_agents(config)


def model(value: str | None) -> str | None:
    """Return an existing folder as an absolute path; other text is a name on the Hub, or is missing, and stays."""
    value = without_scheme(value)
    return os.path.realpath(value) if value and os.path.exists(value) else value


def files(value: Any) -> Any:
    """Return paths and globs as absolute ones; URLs stay."""
    if isinstance(value, list):
        return [files(item) for item in value]
    value = without_scheme(value)
    return value if not isinstance(value, str) or not value or "://" in value else file(value)


def file(path: str) -> str:
    """Return the absolute path of a file: links and `..` are resolved in its folder; its own name stays, even if it is
    a link."""
    path = path.rstrip("/") or "/"
    folder, name = os.path.split(path)
    return os.path.realpath(path) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)


def _resumed(value: str) -> str:
    return value if value in NO_PATH else str(files(value))


def _script(value: str | None) -> str | None:
    """Return the absolute path of a Python file. A module's name stays, even if a folder has the same name."""
    return file(without_scheme(value)) if value and is_file(value) else value


def _scripts(functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one | {"path": _script(one["path"])} if "path" in one else one for name, one in functions.items()}


def _name_agents(agent: AgentConfig) -> None:
    """Make paths of named agents absolute."""
    declared = agent.declared()
    for name, settings in agent.named.items():
        own = declared[name]
        name_from_root(own)
        settings.update({key: getattr(own, key) for key in settings})


def _code(value: Any) -> Any:
    """Make `file.py:Name` or a file absolute; also in a list."""
    if isinstance(value, list):
        return [_member(one) for one in value]
    return _member(value) if value else value


def _program(value: str | None) -> str | None:
    """Make an interpreter's path absolute. Links stay: the link of a virtual environment is what selects the
    environment."""
    return file(without_scheme(value)) if value and "/" in value else value


def _member(name: str) -> str:
    """Make `file.py:Name` or a file absolute. `module:Name` and the URL of a server stay."""
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
    """Return a command with absolute files."""
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
"""Kinds of `path` that a setting declares, and the function that makes each absolute."""
