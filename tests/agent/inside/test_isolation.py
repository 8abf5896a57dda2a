"""Environment processes in isolation (`agent.isolation`): what they can reach, and what is left of them.

Each test runs with both kinds of namespaces, as in `tests/reward/sandbox/conftest.py`.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Message, Observation
from pipeline.agent.errors import EpisodeFailed, EpisodeLost
from pipeline.agent.inside import isolation
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
from tests.agent.test_hostile import GOOD, PARENT, SECRET, config, depth, marked, outcome, wait_until_gone
from tests.agent.test_processes import ROW, WORLDS, run

ROOT = Path(__file__).resolve().parents[3]
APART = Path(__file__).parents[1] / "apart.py"
SETPRIV = ("setpriv", "--bounding-set=-sys_admin")
WALLS = ("namespaces", "user namespaces")


@pytest.fixture(params=WALLS)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An interpreter whose environment processes get namespaces of this kind."""
    file = tmp_path / "python"
    drop: tuple[str, ...] = ()
    if request.param == "user namespaces" and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv")
        # What a process without CAP_SYS_ADMIN does.
        drop = SETPRIV
    file.write_text(f'#!/bin/sh\nexec {" ".join([*drop, sys.executable])} "$@"\n')
    file.chmod(0o755)
    if why := refusal(AgentConfig(tools=[WORLDS], isolation="namespaces", python=str(file))):
        assert "this machine cannot isolate environments" in why, why
        pytest.skip(why)
    return str(file)


def refusal(config: AgentConfig) -> str:
    """Why processes do not start."""

    async def start(processes: Processes) -> str:
        try:
            await processes.start()
        except ValueError as error:
            return str(error)
        return ""

    return str(run(config, start))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The folder of the user's files."""
    folder = tmp_path / "code"
    folder.mkdir()
    shutil.copy(APART, folder)
    (folder / "beside.py").write_text("GREETING = 'begin'")
    return folder


def told(config: AgentConfig, *orders: str) -> list[str]:
    """What an environment says to orders."""

    async def play(processes: Processes) -> list[str]:
        session = await processes.open(ROW, 1, 30)
        assert session.opened == "begin"
        return [str((await session.step(Message(order), 30)).content) for order in orders]

    return list(run(config, play))


def apart(code: Path, python: str, kind: str = "namespaces", **settings: Any) -> AgentConfig:
    return AgentConfig(environment=f"{code}/apart.py:Told", isolation=kind, python=python, **settings)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Orders that reach what lies outside, and are done without isolation."""
    home, folder = tmp_path / "home", tmp_path / "run"
    for place in (home, folder):
        place.mkdir()
        (place / "canary").write_text("canary")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield {
                "read home": f"open({str(home / 'canary')!r}).read()",
                "read the run's folder": "open('canary').read()",
                "write home": f"open({str(home / 'new')!r}, 'w').write('x')",
                "write its own file": f"open({str(tmp_path / 'code' / 'beside.py')!r}, 'a').write('#')",
                "read the system's settings": "open('/etc/passwd').read(1)",
                "connect": f"__import__('socket').create_connection({server.getsockname()!r})",
                "see": f"open('/proc/{victim.pid}/cmdline').read(0)",
                "signal": f"os.kill({victim.pid}, 0)",
                "write below /proc": "open('/proc/self/comm', 'w').write('x')",
                "see the network": "open('/proc/net/dev').read().count(':') - 1 or 1 / 0",
            }
    finally:
        victim.kill()
        victim.wait()


def test_nothing_outside_is_reached(code: Path, python: str, outside: dict[str, str], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for interpreter in (python, None):
        said = told(apart(code, interpreter), *outside.values())
        assert not [(name, text) for name, text in zip(outside, said, strict=True) if text.startswith("done")]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_process_serves_several_episodes(code: Path, python: str) -> None:
    async def play(processes: Processes) -> list[bool]:
        fresh = []
        for _ in range(3):
            session = await processes.open(ROW, 1, 30)
            fresh.append(session.fresh)
            await session.close(True)
            await session.closing
        return fresh

    assert run(apart(code, python, episodes_per_process=2), play) == [True, False, True]


def test_without_isolation_all_of_it_is_reached(code: Path, outside: dict[str, str]) -> None:
    """So the test above shows the isolation, and no mistake in the orders."""
    said = dict(zip(outside, told(apart(code, sys.executable, "none"), *outside.values()), strict=True))
    if len(os.listdir("/sys/class/net")) == 1:
        outside.pop("see the network")
    assert not [(name, text) for name, text in said.items() if name in outside and not text.startswith("done")]


def test_what_an_environment_has_inside(code: Path, python: str) -> None:
    file = f"isolation-test-{os.getpid()}"
    libc = "__import__('ctypes').CDLL(None)"
    said = told(
        apart(code, python),
        f"open('/tmp/{file}', 'w').write('x'), os.path.dirname(__import__('tempfile').mkdtemp())",
        "__import__('numpy').arange(3).sum().item()",
        "sorted(name for name in os.listdir('/proc') if name.isdigit())",
        "[line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'Seccomp:'))]",
        f"{libc}.unshare(0x10000000), {libc}.setuid(0), {libc}.ptrace(16, 1, 0, 0), {libc}.umount2(b'/tmp', 2)",
        "os.kill(1, 9)",
        "os.fchmod(0, 0o666)",
        "__import__('subprocess').run(['echo', 'x'], stdout=-1, start_new_session=True).stdout",
        "open('/proc/self/oom_score_adj').read(), 4 < __import__('resource').getrlimit(2)[0] / 2**30 < 5",
    )
    assert said == [
        "done: (1, '/tmp')",
        "done: 3",
        "done: ['1', '2']",
        "done: ['0000000000000000', '2']",
        "done: (-1, -1, -1, -1)",
        "done: None",
        "OSError: [Errno 30] Read-only file system",
        "done: b'x\\n'",
        "done: ('1000\\n', True)",
    ]
    assert not os.path.exists(f"/tmp/{file}")


@pytest.mark.parametrize("threads", [False, True])
def test_episodes_are_played(tmp_path: Path, python: str, threads: bool) -> None:
    """With threads, each episode starts an interpreter inside."""
    folder = tmp_path / "code"
    folder.mkdir()
    shutil.copy(WORLDS, folder)
    (folder / "game.py").write_text(
        "import threading, time\nfrom worlds import HigherLower, calc\n"
        + "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n" * threads
    )

    async def play(processes: Processes) -> None:
        assert (await processes.start()).forks != threads
        session, other = await asyncio.gather(*(processes.open(ROW, 7, 30) for _ in range(2)))
        assert await other.call("calc", {"expression": "1+2"}, 10) == "3"
        seen = [await session.step(Message(guess), 10) for guess in "123"]
        assert Observation(done=True, reward=1.0, parts={"acc": 1}) in seen
        await session.close()

    settings: dict[str, Any] = {"kwargs": {"most": 3}, "tools": [f"{folder}/game.py:calc"], "python": python}
    run(AgentConfig(environment=f"{folder}/game.py:HigherLower", isolation="namespaces", **settings), play)


def test_nothing_is_left_of_episodes_that_fail(tmp_path: Path, code: Path, python: str) -> None:
    mark = str(tmp_path)

    async def play(processes: Processes) -> None:
        kinds = {"exit": 60, "crash": 60, "kill": 60, "sleep": 1, "daemons": 60}
        await processes.start()
        outcomes = await asyncio.gather(*(outcome(processes, kind, limit) for kind, limit in kinds.items()))
        errors = ["ProcessError"] * 3 + ["TimeoutError"]
        assert [str(error).partition(":")[0] for error in outcomes[:4]] == errors
        assert outcomes[4] == await outcome(processes, "good") == GOOD
        # The keeper, the process that waits for process 1, and that one.
        await asyncio.to_thread(wait_until_gone, mark, 3)
        session = await processes.open(ROW, 1, 30)
        [zygote] = [process for process in marked(mark) if depth(process) == 3]
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(EpisodeLost, match="the process that starts those of episodes ended with signal SIGKILL"):
            await session.step(Message("sleep"), 30)
        assert await outcome(processes, "good") == GOOD

    async def grow(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        with pytest.raises(EpisodeFailed, match="no answer from step after 1 s"):
            await session.step(Message("tree"), 1)

    run(config(mark, isolation="namespaces", python=python), play)
    wait_until_gone(mark)
    run(apart(code, python, env_vars={SECRET: mark}), grow)
    wait_until_gone(mark)


def test_nothing_is_left_of_a_run_or_a_keeper_that_is_killed(tmp_path: Path, python: str) -> None:
    script = PARENT.replace("config(sys.argv[1])", "config(sys.argv[1], isolation='namespaces', python=sys.argv[2])")
    kills: list[Callable[[subprocess.Popen[str]], None]] = [
        lambda process: process.kill(),
        lambda process: os.kill(min(marked(str(tmp_path))), signal.SIGKILL),  # the keeper was there first
    ]
    for kill in kills:
        command = [sys.executable, "-c", script, str(tmp_path), python]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(marked(str(tmp_path))) == 3 + 3 + 6
            kill(process)
            wait_until_gone(str(tmp_path))
            process.kill()


def test_a_machine_that_cannot_isolate_is_a_sentence(tmp_path: Path, code: Path) -> None:
    """Here: one whose system calls are filtered, as in a container."""
    file = tmp_path / "python"
    file.write_text(f"""#!{sys.executable}
import os, sys
sys.path.append({str(ROOT)!r})
from pipeline.reward.sandbox.inside import limits
limits.drop_privileges()
limits.filter_calls(None)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
""")
    file.chmod(0o755)
    refused = refusal(apart(code, str(file)))
    assert refused.startswith(
        "agent.isolation is namespaces, but this machine cannot isolate environments ([Errno 1] making"
    )
    assert refusal(apart(code, str(file), "none")) == ""


def test_folders_that_hold_too_much_are_refused(
    code: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(code)
    monkeypatch.setenv("HOME", str(code / "home"))
    for folder in (code, link):
        words = f"agent.isolation would show environments the folder {folder}, which holds {code / 'home'}; put the"
        assert refusal(apart(folder, python)).startswith(words)


def test_what_is_shown(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, link = tmp_path / "packages" / "game", tmp_path / "link"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: game.inner.Tool}]")
    link.symlink_to(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(package.parent), str(link), str(tmp_path / "gone"), ""])
    monkeypatch.chdir(package.parent)
    given = {"environment": "game.inner:Game", "tools": [f"{link}/a.py", "json:loads"], "kwargs": {}}
    settings = {"package": str(ROOT / "pipeline"), "home": str(tmp_path / "home"), "code": given}
    found = isolation.shown(settings)
    assert {str(package), str(link), str(code)} <= set(found)
    assert not {str(package.parent), "", str(tmp_path), str(tmp_path / "gone")} & set(found)
    assert not [(one, other) for one in found for other in found if one.startswith(f"{other}/")]
