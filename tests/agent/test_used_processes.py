"""Processes that serve several episodes (`agent.episodes_per_process`), and episodes that fail in them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pipeline.agent import Message
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.processes import Processes
from pipeline.agent.ray_hosts import Host
from pipeline.config.agent import AgentConfig
from tests.agent.inside.test_chat_client import PROMPT, Policy
from tests.agent.test_hostile import FAILURES, GOOD, config, wait_until_gone
from tests.agent.test_processes import ROW, run

FAULTS = ("boom", "exit", "crash", "loop", "close_all", "write", "nan")
LEAVES = ("daemons", "running", "task", "alarm", "virtual_alarm", "profiling_alarm", "badly")


async def episode(processes: Processes, *steps: str, well: bool = True, truth: str = "x") -> tuple[list[str], str]:
    """Process, number there and random number of an episode; and its error, if it fails."""
    session, error = await processes.open({**ROW, "ground_truth": truth}, 1, 30), ""
    try:
        for step in steps:
            await session.step(Message(step), 2 if step == "loop" else 60)
    except EpisodeFailed as failed:
        error = str(failed)
    await session.close(well)
    assert session.closing is not None
    await session.closing
    return str(session.opened).split(), error


def served(mark: str, most: int = 9) -> AgentConfig:
    return config(mark, "Served", episodes_per_process=most)


@pytest.mark.parametrize("most", [1, 3])
def test_a_process_serves_as_many_episodes_as_it_may(most: int, tmp_path: Path) -> None:
    async def play(processes: Processes) -> list[list[str]]:
        return [(await episode(processes, "good"))[0] for _ in range(7)]

    seen = run(served(str(tmp_path), most), play)
    assert [int(begun) for _, begun, _ in seen] == [number % most + 1 for number in range(7)]
    assert len({process for process, _, _ in seen}) == -(-7 // most)
    assert len({drawn for _, _, drawn in seen}) == 1, "each begins at its seed"
    wait_until_gone(str(tmp_path))


def test_an_episode_that_fails_fails_alone_and_its_process_serves_no_other(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        beside = await processes.open(ROW, 1, 30)
        for fault in FAULTS:
            seen = [await episode(processes, *steps) for steps in (["good"], ["good"], ["good", fault])]
            assert [int(begun) for (_, begun, _), _ in seen] == [1, 2, 3] and seen[0][0][0] == seen[2][0][0]
            assert [error for _, error in seen[:2]] == ["", ""]
            with pytest.raises(ValueError, match=FAILURES[fault]):
                raise ValueError(seen[2][1])
        assert await beside.step(Message("good"), 10) == GOOD

    run(served(str(tmp_path)), play)
    wait_until_gone(str(tmp_path))


def test_a_process_in_which_something_goes_on_serves_no_other_episode(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        for left in LEAVES:
            seen = [await episode(processes, step) for step in ("good", left)]
            assert [(int(begun), error) for (_, begun, _), error in seen] == [(1, ""), (2, "")], left
        assert (await episode(processes, "good", well=False))[0][1] == "1", "it was given up"
        assert (await episode(processes, "good"))[0][1] == "1"

    run(served(str(tmp_path)), play)
    wait_until_gone(str(tmp_path))


def test_an_episode_that_does_not_begin_in_a_used_process_begins_in_a_fresh_one(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        for truth in ("raise", "exit", "killed"):
            (process, begun, _), _ = await episode(processes, "good")
            assert begun == "1"
            if truth == "killed":
                os.kill(int(process), signal.SIGKILL)
            seen, error = await episode(processes, "good", "exit", truth=truth)
            assert seen[1] == "1" and seen[0] != process and "exit code 3, in step" in error

    run(served(str(tmp_path)), play)
    wait_until_gone(str(tmp_path))


def test_programs_in_a_used_process() -> None:
    async def play(processes: Processes) -> list[bool]:
        fresh = []
        for name in ("hundred", "unheard", "cancel", "leave_some", "hundred", "count"):
            row = {**ROW, "ground_truth": name}
            session = await processes.open(row, 7, 10)
            fresh.append(session.fresh)
            assert (await session.run({**row, "prompt": PROMPT}, Policy())).reward in (1.0, 5.0), name
            await session.close(True)
            assert session.closing is not None
            await session.closing
        return fresh

    file = Path(__file__).parent / "programs.py"
    section = AgentConfig(program=f"{file}:run", episodes_per_process=9)
    # `leave_some` does not wait for a chat.
    assert run(section, play) == [True, False, False, False, True, False]


def test_a_host_has_used_processes() -> None:
    async def main() -> list[str]:
        host, seen = Host(), []
        await host.start(None, served("x"))
        for number, well in enumerate((True, False, True)):
            key = ("engine", number)
            (opened, _), _ = await host.open(key, None, ROW, 1, 30)
            assert (await host.step(key, Message("good"), 10))[0] == GOOD
            await host.close(key, well)
            seen.append(opened.split()[1])
        await host._processes[None].close()
        return seen

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ["1", "2", "1"]
