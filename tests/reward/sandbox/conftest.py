"""The kinds of isolation that work on this machine."""

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import isolation
from pipeline.reward.sandbox.inside import limits
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.runner import END_S, resolve, run
from tests.reward.sandbox.programs import LIMIT_S

CONFIG = SandboxConfig(
    timeout_s=LIMIT_S,
    total_timeout_s=2 * LIMIT_S,
    cpu_s=20,
    memory_mb=256,
    max_processes=16,
    file_mb=2,
    temp_mb=4,
    output_kb=64,
    packages=False,
)

WALLS = ("namespaces", "user namespaces")


def config_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    """The config of a kind of isolation; the test is skipped where this machine has none."""
    if kind == "user namespaces":
        # What a process without CAP_SYS_ADMIN does: here, one that may not have it.
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                pytest.skip("needs setpriv")
            command = isolation.command
            drop = ["setpriv", "--bounding-set=-sys_admin"]
            monkeypatch.setattr(isolation, "command", lambda job: drop + command(job))
        kind = "namespaces"
    config = replace(CONFIG, isolation=kind)
    if why := _refusal(isolation.command, config.isolation):
        pytest.skip(why)
    return config


@functools.cache
def _refusal(command: object, kind: str) -> str:
    """Why this kind of isolation does not work here; `command` tells the two kinds of namespaces apart."""
    try:
        run("", "", replace(CONFIG, isolation=kind))
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(params=WALLS)
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    return config_for(request.param, monkeypatch)


@pytest.fixture(params=(*WALLS, "none"), name="limits")
def all_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    return config_for(request.param, monkeypatch)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process that this test has started is there after it, whatever it did to get away; others are not looked at.

    Orphans below this process become its children, so all that came from the test is found below it.
    """
    limits.prctl(limits.PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))  # the session's Ray, for one
    yield
    limits.prctl(limits.PR_SET_CHILD_SUBREAPER, 0)
    left = set(psutil.Process().children(recursive=True)) - before
    # A machine that is busy takes seconds to end a tree of thousands of processes.
    assert not psutil.wait_procs(left, timeout=END_S)[1]


@pytest.fixture(scope="session")
def config() -> SandboxConfig:
    """A config for quick tests; they are skipped where programs cannot be isolated."""
    config = SandboxConfig(timeout_s=10.0, total_timeout_s=30.0, packages=False)
    try:
        resolve(config)
    except SandboxError as error:
        pytest.skip(str(error))
    return config
