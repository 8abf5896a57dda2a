"""What the settings name is loaded, or refused in a sentence."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Message
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.load import load
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import ROW, WORLDS, run


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without any packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def refusal(config: AgentConfig) -> str:
    """The sentence that a start ends with."""

    async def start(processes: Processes) -> str:
        with pytest.raises(ValueError) as refused:
            await processes.start()
        with pytest.raises(EpisodeFailed):
            await processes.open(ROW, 1, 10)
        return str(refused.value)

    return str(run(config, start))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"environment": "nowhere:Game"}, "agent.environment: importing nowhere failed with ModuleNotFoundError: No"),
        ({"environment": "/no/file.py:Game"}, "agent.environment is /no/file.py, which does not exist (no /no/"),
        ({"environment": "json"}, "agent.environment is json, which names no class or function; write json:NAME"),
        (
            {"environment": "json:Game"},
            "agent.environment is json:Game, but json has no Game (it has: detect",
        ),
        ({"environment": "json:JSONDecoder"}, "agent.environment is json:JSONDecoder, which is no class that extends"),
        ({"environment": f"{WORLDS}:HigherLower", "kwargs": {"least": 1}}, "it takes HigherLower(most: int = 63)"),
        ({"tools": ["json"]}, "agent.tools[0] is json, in which no function is marked with @tool; mark it, or write"),
        ({"tools": [WORLDS, f"{WORLDS}:calc"]}, "but another tool is named calc too; a name stands for one"),
        ({"tools": [f"{WORLDS}:HigherLower"]}, "agent.tools[0]: <class 'worlds_"),
        ({"tools": ["os.path:join"]}, "agent.tools[0]: parameter a of join has no type hint, such as a: str"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(settings: dict[str, Any], words: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError) as refused:
        load(**{"environment": None, "kwargs": {}, "tools": [], **settings})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nx = y", r"importing .*game.py failed with NameError: name 'y' is not defined \(game.py, line 2\)$"),
        ("class", r"importing .*game.py failed with SyntaxError: invalid syntax \(game.py, line 1\)$"),
        ("raise SystemExit(3)", r"importing .*game.py failed with SystemExit: 3 \(game.py, line 1\)$"),
        (
            "import os, sys\nsys.stderr.write('no licence\\n')\nsys.stderr.flush()\nos._exit(3)",
            r"ended with exit code 3 as it began; the last line that it wrote: no licence$",
        ),
        ("import os\nos.kill(os.getpid(), 11)", r"ended with signal SIGSEGV as it began$"),
    ],
)
def test_a_file_that_fails_as_it_is_imported(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "game.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        raise ValueError(refusal(AgentConfig(environment=f"{tmp_path}/game.py:Game")))


TOOL = (
    "from pipeline.agent import Environment, tool\n{}def calc({}x: int) -> int:\n{}    'Twice x.'\n{}    return 2 * x\n"
)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("timeout_s=0", "@tool(timeout_s=0) of calc: expected seconds above 0"),
        ("timeout_s=-1", "@tool(timeout_s=-1) of calc: expected seconds above 0"),
        ("timeout_s='2'", "@tool(timeout_s='2') of calc: expected seconds above 0"),
        ("timeout_s=float('nan')", "@tool(timeout_s=nan) of calc: expected seconds above 0"),
        ("name='<|im_start|>'", "@tool(name='<|im_start|>') of calc: write letters, digits, _ . / -"),
        ("name=5", "@tool(name=5) of calc: write letters, digits, _ . / -"),
    ],
)
def test_a_mark_that_a_tool_cannot_have(tmp_path: Path, mark: str, words: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tools.py").write_text(TOOL.format(f"@tool({mark})\n", "", "", ""))
    with pytest.raises(ValueError) as refused:
        load(None, {}, [f"{tmp_path}/tools.py"])
    assert str(refused.value) == f"agent.tools[0]: {words}"


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod"])
@pytest.mark.parametrize("marks", ["    @tool\n    @{}\n    ", "    @{}\n    @tool\n    "])
def test_a_tool_of_an_environment_is_a_method(tmp_path: Path, kind: str, marks: str, monkeypatch: Any) -> None:
    """It would be no tool, or one whose first argument is the environment."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = TOOL.format("class Game(Environment):\n" + marks.format(kind), "", "    ", "    ")
    (tmp_path / "game.py").write_text(text)
    with pytest.raises(ValueError, match=f"of which calc is marked with @tool and is a {kind}; make it a method"):
        load(f"{tmp_path}/game.py:Game", {}, [])


def test_a_file_that_forks_as_it_is_imported_and_goes_on(tmp_path: Path) -> None:
    """The child would start processes of episodes that its parent does not know."""
    text = f"import os, time\nparent = os.fork()\ntime.sleep(0.2 * bool(parent))\n{TOOL.format('', '', '', '')}"
    game = "class Game(Environment):\n    def reset(self, row, seed):\n        return str(parent != 0)\n"
    (tmp_path / "game.py").write_text(text + game)

    async def play(processes: Processes) -> list[Any]:
        return [(await processes.open(ROW, 1, 30)).opened for _ in range(10)]

    assert run(AgentConfig(environment=f"{tmp_path}/game.py:Game"), play) == ["True"] * 10


def test_a_file_that_hangs_as_it_is_imported(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipeline.agent.zygote.START_S", 0.5)
    (tmp_path / "game.py").write_text("import time\ntime.sleep(1000)")
    words = "agent: importing environment and tools took longer than 0.5 s"
    assert refusal(AgentConfig(environment=f"{tmp_path}/game.py:Game")) == words


THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
from pipeline.agent import Environment
class Game(Environment):
    def step(self, message):
        if message.text == "fail":
            raise ValueError("boom")
        return str(threading.active_count())
"""


def test_files_that_leave_threads_are_imported_anew_for_each_episode(tmp_path: Path) -> None:
    """A fork would have no such threads."""
    (tmp_path / "game.py").write_text(THREADS)

    async def play(processes: Processes) -> None:
        assert not (await processes.start()).forks
        sessions = [await processes.open(ROW, 1, 30) for _ in range(2)]
        assert (await sessions[0].step(Message(""), 10)).content == "2"
        with pytest.raises(EpisodeFailed, match=r"ValueError: boom \(game.py, line 8\)"):
            await sessions[1].step(Message("fail"), 10)

    run(AgentConfig(environment=f"{tmp_path}/game.py:Game"), play)


def test_files_that_cannot_be_imported_anew_fail_the_episode_in_words(tmp_path: Path) -> None:
    once = f"import os\nos.mkdir({str(tmp_path / 'once')!r})\n"
    (tmp_path / "game.py").write_text(once + THREADS)

    async def play(processes: Processes) -> None:
        assert not (await processes.start()).forks
        with pytest.raises(EpisodeFailed, match=r"importing .*game.py failed with FileExistsError.*line 2"):
            await processes.open(ROW, 1, 30)

    run(AgentConfig(environment=f"{tmp_path}/game.py:Game"), play)


OTHER = """
import importlib.util, os, sys
from pipeline.agent import Environment, Observation, tool
import helper
class Game(Environment):
    def reset(self, row, seed):
        return sys.prefix
    def step(self, message):
        if message.text:
            import pipeline.config
        found = [name for name in ("numpy", "ray", "pipeline.rows") if importlib.util.find_spec(name)]
        return Observation(" ".join([helper.WORD, *found, *sorted(os.environ)]))
@tool
def double(x: int) -> int:
    '''Twice x.'''
    return 2 * x
"""


def test_another_interpreter_runs_an_environment(tmp_path: Path, bare: str, monkeypatch: Any) -> None:
    (tmp_path / "game.py").write_text(OTHER)
    (tmp_path / "helper.py").write_text("WORD = 'helped'")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")

    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.forks and loaded.tools[0]["function"]["name"] == "double"
        session = await processes.open(ROW, 1, 30)
        assert session.opened == str(Path(bare).parent.parent)
        words = str((await session.step(Message(""), 10)).content).split()
        assert words[0] == "helped"
        assert {"LANG", "PATH", "KEY"} <= set(words)
        assert not {"MLFLOW_TRACKING_TOKEN", "PYTHONPATH", "numpy", "ray", "pipeline.rows"} & set(words)
        assert await session.call("double", {"x": 4}, 10) == "8"
        with pytest.raises(EpisodeFailed, match="No module named 'pipeline.config'"):
            await session.step(Message("import"), 10)

    settings = {"environment": f"{tmp_path}/game.py:Game", "tools": [f"{tmp_path}/game.py"]}
    run(AgentConfig(python=bare, env_vars={"KEY": "x"}, **settings), play)


def test_an_interpreter_that_does_not_fit_is_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 8)\nexec(sys.argv[2])\n")
    old.chmod(0o755)
    game = f"{WORLDS}:HigherLower"
    assert "it is Python 3.8, but environments need Python 3.9 or later" in refusal(AgentConfig(game, python=str(old)))
    words = "agent.python: /no/python cannot be started (No such file or directory); name a Python interpreter, such as"
    assert words in refusal(AgentConfig(game, python="/no/python"))
    assert f"agent.python: {tmp_path} cannot be started (Permission" in refusal(AgentConfig(game, python=str(tmp_path)))
    assert "ended with exit code 1 as it began" in refusal(AgentConfig(game, python="/bin/false"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tools": ["mcp: true"]},
            r"^agent.tools\[0\] is mcp: true, which needs the package mcp, from version 2 on, in",
        ),
        (
            {"environment": "openenv:ws://x"},
            r"^agent.environment is openenv:ws://x, which needs the package websockets",
        ),
    ],
)
def test_an_interpreter_without_the_package_of_a_client(bare: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(refusal(AgentConfig(python=bare, **settings)))


def test_the_former_name_of_reset_works_with_a_note_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    game = tmp_path / "game.py"
    game.write_text(
        "from pipeline.agent import Environment\n\n\nclass Base(Environment):\n    async def open(self, row, seed):\n"
        "        return f'begin {seed}'\n\n\nclass Game(Base):\n    pass\n"
        "\n\nclass New(Base):\n    def reset(self, row, seed):\n        return 'new'\n"
    )

    async def play(processes: Processes) -> None:
        for seed in (1, 2):
            assert (await processes.open(ROW, seed, 10)).opened == f"begin {seed}"

    async def new(processes: Processes) -> None:
        assert (await processes.open(ROW, 1, 10)).opened == "new"

    run(AgentConfig(environment=f"{game}:Game"), play)
    [note] = [record.getMessage() for record in caplog.records]
    assert note == f"agent.environment is {game}:Game, whose method `open` is named `reset` now; rename it"
    caplog.clear()
    run(AgentConfig(environment=f"{game}:New"), new)
    assert not caplog.records


CROWDED = """
import errno, os
from pipeline.agent import Environment
fork, left = os.fork, [{times}]
def crowded():
    if left[0]:
        left[0] -= 1
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = crowded
class Game(Environment):
    def reset(self, row, seed):
        return "begin"
"""


def test_a_machine_without_room_is_asked_again_until_the_deadline(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        assert (await processes.open(ROW, 1, 30)).opened == "begin"

    async def fail(processes: Processes) -> None:
        await processes.start()
        words = r"ProcessError: no process could be started \(Resource temporarily unavailable\), in reset"
        with pytest.raises(EpisodeFailed, match=words):
            await processes.open(ROW, 1, 0.5)

    for times, use in ((3, play), (1000, fail)):
        (tmp_path / f"game{times}.py").write_text(CROWDED.format(times=times))
        run(AgentConfig(environment=f"{tmp_path}/game{times}.py:Game"), use)


def test_a_run_without_descriptors_fails_the_episode(monkeypatch: Any) -> None:
    def full() -> None:
        raise OSError(24, "Too many open files")

    async def play(processes: Processes) -> None:
        await processes.start()
        with monkeypatch.context() as patched:
            patched.setattr("pipeline.agent.session.socket.socketpair", full)
            with pytest.raises(EpisodeFailed, match=r"no process could be started: .*Too many open files"):
                await processes.open(ROW, 1, 10)

    run(AgentConfig(environment=f"{WORLDS}:HigherLower"), play)
