"""Which isolation is used, how it is started, and what is refused before a run."""

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig, problems
from pipeline.reward.sandbox import isolation, runner
from pipeline.reward.sandbox.isolation import SandboxError, job, mounts
from pipeline.reward.sandbox.rule import compute_score
from pipeline.reward.sandbox.runner import resolve, run

BROKEN = [sys.executable, "-c", "raise SystemExit('it is broken')"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """What works here is found out anew, and again after the test."""
    runner._namespaces.cache_clear()
    yield
    runner._namespaces.cache_clear()


def test_auto_is_namespaces_where_they_work(config: SandboxConfig) -> None:
    assert resolve(config) == "namespaces"


def test_a_sandbox_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(isolation, "command", lambda job: BROKEN)
    with pytest.raises(SandboxError, match=r"isolation=namespaces\).*it is broken"):
        run("", "", SandboxConfig(isolation="namespaces"))
    with pytest.raises(SandboxError, match=r"cannot be isolated.*it is broken.*isolation=none.*all files"):
        run("", "", SandboxConfig())


def test_namespaces_are_never_simply_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = isolation.job

    def open_air(*arguments: Any) -> dict[str, Any]:
        return real(*arguments) | {"mounts": [("/no/such/folder", "/no/such/folder")]}

    monkeypatch.setattr(isolation, "job", open_air)
    with pytest.raises(SandboxError, match="mounting"):
        run("print(1)", "", SandboxConfig(isolation="namespaces"))
    assert run("print(1)", "", SandboxConfig(isolation="none")).stdout == "1\n"


@pytest.mark.parametrize("free", [30, 34, 36, 38, 41, 45, 1030])
def test_the_workers_files_may_have_any_numbers(free: int, config: SandboxConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(0)]
    while taken[-1] < free:
        taken.append(os.dup(0))
    code = "import os\nFDS = [fd for fd in range(3, 2000) if opened(fd)]"
    code = "import os\ndef opened(fd):\n  try: return bool(os.fstat(fd))\n  except OSError: return False\n" + code
    try:
        result = compute_score(f"```python\n{code}\n```", ["assert FDS == [3, 4]"], config)
        assert (result["score"], result["reason"]) == (1.0, "")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("isolation", "docker"),
        ("score", "half"),
        ("timeout_s", 0.0),
        ("total_timeout_s", float("inf")),
        ("url_timeout_s", -1.0),
        ("memory_mb", 0),
        ("max_processes", 0),
        ("url", "localhost:8080"),
    ],
)
def test_values_that_mean_nothing_are_named(key: str, value: Any) -> None:
    config = replace(SandboxConfig(), **{key: value})
    (sentence,) = problems(config)
    assert sentence.startswith(f"reward.sandbox.{key} is {value!r}")
    with pytest.raises(ValueError, match=f"reward.sandbox.{key}"):
        run("", "", config)
    assert problems(SandboxConfig()) == []


def test_an_isolation_that_is_gone_is_named_with_another() -> None:
    (sentence,) = problems(SandboxConfig(isolation="bubblewrap"))
    assert "bubblewrap is gone" in sentence and "namespaces" in sentence


def test_what_is_shown_and_what_the_supervisor_is_told() -> None:
    config = SandboxConfig(memory_mb=2, file_mb=1, output_kb=1, max_processes=5)
    shown = mounts(config)
    assert shown[0] == (str(Path(isolation.__file__).parent / "inside"), "/sandbox/inside")
    folders = [Path(target) for _, target in shown] + [Path("/usr")]
    for path in (os.__file__, isolation.interpreter()):
        assert any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)
    (packages,) = [pair for pair in shown if pair[1] == "/sandbox/packages0"]
    assert Path(os.path.realpath(pytest.__file__)).is_relative_to(packages[0])
    assert "/sandbox/packages0" not in [target for _, target in mounts(replace(config, packages=False))]
    told = job("code", [{"kind": "script", "stdin": ""}], "", [5, 6, 7], config)
    assert told["packages"][0] == "/sandbox/packages0"
    assert told["limits"] == {"cpu_s": 10, "memory": 2 << 20, "file": 1 << 20}
    assert (told["output"], told["processes"], told["work"], told["namespaces"]) == (1024, 8, "/tmp", True)
    told = job("", [], "/somewhere", [], config)
    assert (told["packages"][0], told["work"], told["namespaces"]) == (packages[0], "/somewhere", False)
