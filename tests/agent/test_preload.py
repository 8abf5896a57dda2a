"""Python commands as forks (`agent.preload`): the same as with a fresh interpreter, one by one."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.processes import Processes
from pipeline.agent.replies import Returned
from pipeline.config.agent import AgentConfig
from tests.agent.test_hostile import SECRET, wait_until_gone
from tests.agent.test_load import refusal
from tests.agent.test_processes import ROW, run

ENDS = "agent.command ended with"
LINE = "; the last line on its standard error: "
OUTCOMES: dict[str, Returned | str] = {
    "no_line": Returned(),
    "unflushed": Returned(reward=2.0),
    "raised": f"{ENDS} exit code 1",
    "chained": f"{ENDS} exit code 1",
    "exit_number": f"{ENDS} exit code 3",
    "exit_text": f"{ENDS} exit code 1{LINE}no game",
    "exit_nothing": Returned(reward=3.0),
    "exit_true": f"{ENDS} exit code 1",
    "interrupted": f"{ENDS} signal 2{LINE}KeyboardInterrupt",
    "left": f"{ENDS} exit code 4",
    "killed": f"{ENDS} signal 9",
    "ended": f"{ENDS} signal 15",
    "own_hook": f"{ENDS} exit code 1{LINE}ValueError 2",
    "bad_pipe": f"{ENDS} exit code 1{LINE}BrokenPipeError: [Errno 32] Broken pipe",
    "at_exit": Returned(reward=4.0),
    "exit_raises": Returned(reward=5.0),
    "in_thread": Returned(reward=6.0, parts={"main": True}),
    "daemon": Returned(reward=7.0),
    "open_file": Returned(reward=8.0),
    "deleted": Returned(reward=9.0),
    "loops": Returned(reward=11.0),
    "child": Returned(reward=12.0),
    "forked": Returned(reward=12.0),
    "spawned": Returned(reward=12.0),
    "outlived": Returned(reward=13.0),
    "file_of_a_module": Returned(reward=14.0),
    "spends": f"{ENDS} exit code 1{LINE}MemoryError",
}
"""How each function of `commands.py` ends."""
HEAVY = """
import os
open(os.environ["HEAVY"], "a").write("x")
log = open(os.environ["HEAVY"] + " log", "a")
if "QUIET" not in os.environ:
    print("imported", file=log)
if "QUIET" not in os.environ:
    print("imported")
"""
AT_ONCE = 4


def outcomes(folder: Path, **settings: Any) -> dict[str, Any]:
    """How the functions end, by name, and what they write into the folder."""
    folder.mkdir()
    script = folder.parent / "commands.py"
    variables = {SECRET: str(folder.parent), "HEAVY": str(folder / "imports")}
    config = AgentConfig(command=["python", str(script), str(folder)], env_vars=variables, **settings)

    async def play(processes: Processes) -> dict[str, Any]:
        places, found = asyncio.Semaphore(AT_ONCE), {}

        async def one(name: str, key: str) -> None:
            async with places:
                session = await processes.open({**ROW, "ground_truth": name}, 1, 30)
                try:
                    found[key] = await asyncio.wait_for(
                        session.command({**ROW, "ground_truth": name}, {"URL": "x"}), 30
                    )
                except EpisodeFailed as error:
                    found[key] = str(error)
                await session.close()

        names = [*OUTCOMES, "tell", "drawn"]
        await asyncio.gather(*(one(name, name) for name in names), one("drawn", "drawn again"))
        return found

    found = run(config, play)
    wait_until_gone(str(folder.parent))
    written = {f"file {file.name}": file.read_text() for file in folder.iterdir()}
    shutil.rmtree(folder)
    return {**found, **written}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the functions end with fresh interpreters, and as forks."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copy(Path(__file__).parent / "commands.py", folder)
    (folder / "heavy.py").write_text(HEAVY)
    return outcomes(folder / "out"), outcomes(folder / "out", preload=["heavy", "multiprocessing", "numpy"])


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_fork_ends_as_a_fresh_interpreter(name: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = both
    assert fresh[name] == OUTCOMES[name] == forked[name]


def test_a_fork_finds_and_writes_the_same(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = both
    for key, value in fresh["tell"].parts.items():
        assert forked["tell"].parts[key] == value, key
    for name in ("raised", "chained", "open_file"):
        assert forked[f"file {name}"] == fresh[f"file {name}"] != ""
    assert fresh["file imports log"].count("written") == 1 == forked["file imports log"].count("written")
    assert forked["file imports log"].count("imported") == 1, "forks do not write again what was there before"
    assert len({found.reward for found in drawn(both)}) == 4 == len({found.parts["numpy"] for found in drawn(both)})


def drawn(both: tuple[dict[str, Any], dict[str, Any]]) -> list[Any]:
    """Random numbers of four episodes."""
    return [way[name] for way in both for name in ("drawn", "drawn again")]


def test_modules_are_imported_once(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = both
    assert fresh["file imports"] == "x" * (len(OUTCOMES) + 4) and forked["file imports"] == "xx", "and by spawn"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "x = y",
            r"^agent.preload: importing ready failed with NameError: name 'y' is not defined \(ready.py, line 1\)$",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
            r"^agent.preload: importing ready starts threads, which a fork would lose; leave it out$",
        ),
        ("", r"^agent.preload: importing ready.py failed with ModuleNotFoundError: No module named 'ready.py'"),
        (None, r"^agent.command names the script .*game.py, which does not exist; name one that exists$"),
    ],
)
def test_what_cannot_be_preloaded_is_a_sentence(text: str | None, words: str, tmp_path: Path) -> None:
    script = tmp_path / "game.py"
    if text is not None:
        script.touch()
        (tmp_path / "ready.py").write_text(text)
    config = AgentConfig(command=["python", str(script)], preload=["ready" if text else "ready.py"])
    with pytest.raises(ValueError, match=words):
        raise ValueError(refusal(config))


def test_an_episode_that_is_killed_takes_its_command_along(tmp_path: Path) -> None:
    script = tmp_path / "game.py"
    script.write_text("import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)\n")

    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.command(ROW, {}), 0.3)
        await session.close()
        await asyncio.to_thread(wait_until_gone, str(tmp_path), 2)

    run(AgentConfig(command=["python", str(script)], preload=["json"], env_vars={SECRET: str(tmp_path)}), play)
    wait_until_gone(str(tmp_path))
