"""Which isolation is used, how it is started, and what is refused before a run."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.reward.sandbox import isolation, runner
from pipeline.reward.sandbox.config import SandboxConfig, problems
from pipeline.reward.sandbox.isolation import SandboxError, bubblewrap, command, job, mounts
from pipeline.reward.sandbox.runner import check_isolation, resolve, run


@pytest.fixture
def fresh() -> Iterator[None]:
    """What works here is found out anew, and again after the test."""
    runner._first_that_works.cache_clear()
    yield
    runner._first_that_works.cache_clear()


def broken(*kinds: str) -> Any:
    """`isolation.command`, with some kinds not working."""
    real = isolation.command

    def changed(kind: str, config: SandboxConfig) -> list[str]:
        if kind in kinds:
            return [sys.executable, "-c", f"raise SystemExit('{kind} is broken')"]
        return real(kind, config)

    return changed


def test_the_check_passes_where_programs_run(config: SandboxConfig) -> None:
    check_isolation(config)
    assert resolve(config) in ("bubblewrap", "namespaces")


def test_none_must_be_asked_for(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(isolation, "command", broken("bubblewrap", "namespaces"))
    with pytest.raises(SandboxError, match=r"cannot be isolated.*namespaces is broken.*isolation=none.*all files"):
        check_isolation(SandboxConfig())
    assert run("print(1)", "", SandboxConfig(isolation="none")).stdout == "1\n"


def test_auto_takes_the_first_that_works(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(isolation, "command", lambda kind, config: command("none", config))
    monkeypatch.setattr(isolation, "job", lambda c, t, kind, work, config: job(c, t, "none", "/nowhere", config))
    with pytest.raises(SandboxError):
        resolve(SandboxConfig())
    seen = []

    def check(config: SandboxConfig) -> None:
        seen.append(config.isolation)
        if config.isolation == "bubblewrap":
            raise SandboxError("no")

    monkeypatch.setattr(runner, "check_isolation", check)
    assert [resolve(SandboxConfig()), resolve(SandboxConfig())] == ["namespaces"] * 2
    assert seen == ["bubblewrap", "namespaces"]


def test_an_isolation_that_is_named_and_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "command", broken("namespaces"))
    with pytest.raises(SandboxError, match=r"isolation=namespaces\) did not start: namespaces is broken"):
        check_isolation(SandboxConfig(isolation="namespaces"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="no program bwrap"):
        check_isolation(SandboxConfig(isolation="bubblewrap"))


def test_limits_under_which_nothing_runs_are_an_error(config: SandboxConfig) -> None:
    with pytest.raises(SandboxError, match="a program of one line does not run.*memory_mb"):
        check_isolation(replace(config, memory_mb=8))


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
        check_isolation(config)
    assert problems(SandboxConfig()) == []


def test_the_command_of_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = SandboxConfig(temp_mb=3, packages=False)
    line = command("bubblewrap", config)
    assert line[0] == str(tmp_path / "bwrap")
    for option in ("user", "pid", "net", "ipc", "uts"):
        assert f"--unshare-{option}" in line
    for option in ("--die-with-parent", "--new-session", "--as-pid-1"):
        assert option in line
    text = " ".join(line)
    assert "--cap-drop ALL" in text and "--uid 65534" in text
    assert "--ro-bind /usr /usr" in text and "--size 3145728 --tmpfs /tmp" in text
    assert "--proc" not in line and "--bind" not in line and "--share-net" not in line
    shown = [line[i + 2] for i, word in enumerate(line) if word in ("--ro-bind", "--dev-bind", "--symlink")]
    assert not {"/", "/home", "/root", "/etc", "/proc", "/sys", "/dev", "/tmp"} & set(shown)
    assert line[-5:-1] == [isolation.interpreter(), "-I", "-S", "-c"] and "'/sandbox'" in line[-1]
    assert line[:-5] == bubblewrap(config)


def test_what_is_shown_and_what_the_supervisor_is_told() -> None:
    config = SandboxConfig(memory_mb=2, file_mb=1, output_kb=1, max_processes=5)
    shown = mounts(config)
    assert shown[0] == (str(Path(isolation.__file__).parent / "inside"), "/sandbox/inside")
    folders = [Path(target) for _, target in shown] + [Path("/usr")]
    for path in (os.__file__, isolation.interpreter()):
        assert any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)
    (packages,) = [pair for pair in shown if pair[1] == "/sandbox/packages0"]
    assert Path(os.path.realpath(pytest.__file__)).is_relative_to(packages[0])
    assert "/sandbox/packages0" not in dict(map(reversed, mounts(replace(config, packages=False))))  # type: ignore[arg-type]
    assert job("", [], "namespaces", "", config)["packages"][0] == "/sandbox/packages0"
    assert job("", [], "none", "/nowhere", config)["packages"][0] == packages[0]
    told = job("code", [{"kind": "script", "stdin": ""}], "namespaces", "", config)
    assert told["limits"] == {"cpu_s": 10, "memory": 2 << 20, "file": 1 << 20}
    assert (told["output"], told["processes"], told["work"]) == (1024, 8, "/tmp")
    assert json.loads(json.dumps(told)) == {**told, "mounts": [list(pair) for pair in told["mounts"]]}
