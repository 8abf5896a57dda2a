"""The provenance of a run: flattened settings, git commit, library versions. Secrets among the settings are masked."""

import getpass
import json
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("slipstream-rl", "ray", "torch", "vllm", "transformers", "mlflow", "pyarrow")
SECRET = re.compile(
    r"(?:TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)(?!.*_ENV\Z)", re.IGNORECASE
)
"""Pattern of the names of secrets. A name that ends with `_env` does not match: it holds a variable's name."""


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, nested or flat, with `***` in place of secrets.

    Only mappings with free keys can hold secrets: `env_vars`, and the options of functions and engines (any key that
    ends with `kwargs`). Below these, text, lists and mappings under a name like `SECRET` are masked; below `env_vars`
    numbers are masked too.
    """
    return {key: _walk(value, _holds_secrets(key), _is_environment(key)) for key, value in config.items()}


def masked_command(words: Sequence[str]) -> str:
    """Return a command line as text, with `***` in place of the values of settings that hold secrets."""
    return shlex.join(_masked_word(word) for word in words)


def _masked_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    free = any(_holds_secrets(part) for part in name.split("."))
    return f"{name}=***" if equals and free and SECRET.search(word) else word


def user() -> str | None:
    """Return the name of the user who started this process; None if the system does not know it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _walk(node: Any, free: bool, environment: bool) -> Any:
    if isinstance(node, (list, tuple)):
        return [_walk(value, free, environment) for value in node]
    if not isinstance(node, Mapping):
        return node
    result: dict[str, Any] = {}
    for key, value in node.items():
        name = str(key)
        hideable = environment or isinstance(value, (str, bytes, list, tuple, Mapping))
        if free and hideable and SECRET.search(name):
            result[name] = "***"
        else:
            result[name] = _walk(value, free or _holds_secrets(name), environment or _is_environment(name))
    return result


def _is_environment(key: str) -> bool:
    return key.rpartition(".")[2] == "env_vars"


def _holds_secrets(key: str) -> bool:
    return _is_environment(key) or key.endswith("kwargs")


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a config to full names and texts: `{"actor": {"optim": {"lr": 1e-6}}}` gives `{"actor.optim.lr":
    "1e-06"}`.

    Lists and empty mappings are one value, as JSON; None is `null`.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def git_commit() -> tuple[str, bool] | None:
    """Return (commit of this code's checkout, True if tracked files were changed); None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], **options)
        changes = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], **options)
    except (OSError, subprocess.SubprocessError):
        # No git on this machine, or a checkout without a commit.
        return None
    return head.stdout.strip(), bool(changes.stdout.strip())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that affect a run, by name."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        for distribution in (library, f"{library}-cpu"):
            try:
                found[library] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
