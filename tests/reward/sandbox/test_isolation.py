"""Which isolation is used, and how it is started."""

import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import isolation, runner
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.runner import resolve, run
from tests.reward.sandbox.programs import score

BROKEN = [sys.executable, "-c", "raise SystemExit('it is broken')"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """The test does not use what was found out before, nor the tests after it what it finds."""
    runner._namespaces.cache_clear()
    yield
    runner._namespaces.cache_clear()


def test_auto_is_namespaces_where_they_work(config: SandboxConfig) -> None:
    assert resolve(config) == "namespaces"


def test_a_crash_leaves_no_dump(config: SandboxConfig) -> None:
    assert run("import resource; print(resource.getrlimit(4))", "", config).stdout == "(0, 0)\n"


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


@pytest.mark.parametrize("free", [36, 41, 1030])
def test_the_workers_files_may_have_any_numbers(free: int, config: SandboxConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(0)]
    while taken[-1] < free:
        taken.append(os.dup(0))
    code = """
import os
def opened(fd):
    try: return bool(os.fstat(fd))
    except OSError: return False
FDS = [fd for fd in range(3, 2000) if opened(fd)]
def fds(): return FDS
"""
    try:
        assert score(code, ["assert fds() == [3, 4]"], config)["score"] == 1.0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
