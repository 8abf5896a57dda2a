"""What made a run: flattened settings, git commit, library versions. Secrets among the settings are masked."""

import json
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("slipstream-rl", "ray", "torch", "vllm", "transformers", "mlflow", "pyarrow")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the values of secret-looking environment variables (below any `env_vars`) replaced by `***`."""

    def walk(node: Any, environment: bool) -> Any:
        if isinstance(node, Mapping):
            return {
                str(key): "***" if environment and SECRET.search(str(key)) else walk(value, str(key) == "env_vars")
                for key, value in node.items()
            }
        if isinstance(node, (list, tuple)):
            return [walk(value, False) for value in node]
        return node

    return {str(key): walk(value, str(key) == "env_vars") for key, value in config.items()}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text: `{"actor": {"optim": {"lr": 1e-6}}}` gives `{"actor.optim.lr": "1e-06"}`.

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
    """Commit of the checkout this code runs from, and whether tracked files were changed; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head.strip(), bool(_git(root, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        # No git on this machine, or a checkout without a commit: the run has no commit to name.
        return None


def versions() -> dict[str, str]:
    """Installed versions of the libraries that shape a run; those not installed are left out."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        for distribution in (library, f"{library}-cpu"):
            try:
                found[library] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    ).stdout
