"""Paths in settings, named from the root: workers have another working directory than the command.

    a model        a folder, or a name on the Hub, which stays          links followed
    files          paths, globs, URLs, or a list of them                links followed up to the last part
    code           a file `x.py` or `x.py:Name`; modules stay           as files

A path may be relative, begin with `~` or `file://`, hold `..`, or end with a slash. A setting that holds one declares
its kind: `setting(None, path="model")`.
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
"""What `agent.tools` and `agent.environment` begin with if they name a server."""
NO_PATH = ("auto", "never")
"""Values of `trainer.resume` that name no checkpoint."""


def name_from_root(config: Any) -> None:
    """Make the local paths in the settings of a command absolute.

    Args:
        config: an instance of a dataclass, whose sections are made absolute, too.
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
    """An existing folder, named from the root; another text is a name on the Hub, or is missing."""
    value = without_scheme(value)
    return os.path.realpath(value) if value and os.path.exists(value) else value


def files(value: Any) -> Any:
    """Paths and globs named from the root; URLs stay."""
    if isinstance(value, list):
        return [files(item) for item in value]
    value = without_scheme(value)
    return value if not isinstance(value, str) or not value or "://" in value else file(value)


def file(path: str) -> str:
    """A path named from the root: its folder without links and `..`, and its own name, which may be a link's."""
    path = path.rstrip("/") or "/"
    folder, name = os.path.split(path)
    return os.path.realpath(path) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)


def _resumed(value: str) -> str:
    return value if value in NO_PATH else str(files(value))


def _script(value: str | None) -> str | None:
    """A Python file; the name of a module stays, also if a folder here has it."""
    return file(without_scheme(value)) if value and is_file(value) else value


def _scripts(functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one | {"path": _script(one["path"])} if "path" in one else one for name, one in functions.items()}


def _name_agents(agent: AgentConfig) -> None:
    """Make the paths of named agents absolute."""
    declared = agent.declared()
    for name, settings in agent.named.items():
        own = declared[name]
        name_from_root(own)
        settings.update({key: getattr(own, key) for key in settings})


def _code(value: Any) -> Any:
    """`file.py:Name`, or a file, named from the root; also in a list of these."""
    if isinstance(value, list):
        return [_member(one) for one in value]
    return _member(value) if value else value


def _program(value: str | None) -> str | None:
    """An interpreter. That of a virtual environment is a link, and a different one where the link leads."""
    return file(without_scheme(value)) if value and "/" in value else value


def _member(name: str) -> str:
    """`file.py:Name`, or a file alone, named from the root; `module:Name` stays, and so does a server's URL."""
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
    """A command, with files named from the root."""
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
"""Kinds of `path` that a setting declares, and how each becomes absolute."""
