"""Environments that fail: exactly their episodes fail, and nothing is left of them."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Message, Observation
from pipeline.agent.errors import EpisodeFailed, EpisodeLost, PolicyMistake
from pipeline.agent.inside.frames import MAX_REASON, MAX_TEXT
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import ROW, run

FILE = str(Path(__file__).parent / "hostile.py")
GOOD = Observation("well", reward=0.5)
SECRET = "AGENT_TEST_MARK"

FAILURES = {
    "boom": r"^Boom \(hostile.py, line \d+\)$",
    "tool_error": r"^ToolError: no tool \(hostile.py, line \d+\)$",
    "leave": r"^SystemExit: bye \(hostile.py, line \d+\)$",
    "interrupt": r"^KeyboardInterrupt \(hostile.py, line \d+\)$",
    "exit": r"^ProcessError: its process ended with exit code 3, in step$",
    "crash": r"^ProcessError: its process ended with signal SIGSEGV, in step$",
    "kill": r"^ProcessError: its process ended with signal SIGKILL, in step$",
    "loop": r"^TimeoutError: no answer from step after 2 s \(hostile.py, line \d+\)$",
    "sleep": r"^TimeoutError: no answer from step after 2 s \(hostile.py, line \d+\)$",
    "stop": r"^TimeoutError: no answer from step after 2 s$",
    "catch": r"^TimeoutError: no answer from step after 2 s \(hostile.py, line \d+\)$",
    "fork": r"^ProcessError: its process ended with exit code 4, in step$",
    "close_all": r"^ProcessError: its process closed its connection, in step$",
    "spend": r"^MemoryError \(hostile.py, line \d+\)$",
    "nothing": r"^ValueError: Hostile.step returned None; expected an Observation or a text$",
    "nan": r"^ValueError: \w+.step returned a reward of nan; expected a finite number$",
    "large": r"^ValueError: \w+.step returned a reward of 1e\+39; expected a float32, at most 3.403e\+38$",
    "long_parts": r"^ValueError: \w+.step returned parts of 1,000,012 bytes as JSON; at most 100,000 fit$",
    "bad_list": r"^Boom \(hostile.py, line \d+\)$",
    "text_acc": r"^ValueError: \w+.step returned parts with acc='good'; expected a number, which validation counts$",
    "large_part": r"^ValueError: \w+.step returned parts with x=10{190,200}\.\.\.; expected a number of float32$",
    "text_reward": r"^ValueError: Hostile.step returned a reward of '1.0'; expected a number or None$",
    "content": r"^ValueError: Hostile.step returned a content of b'bytes'; expected a text, a list of messages",
    "message": r"^ValueError: Hostile.step returned the message {'role': 'user', 'content': 'x', 'name': 'y'}; ",
    "done": r"^ValueError: Hostile.step returned done='no'; expected True or False$",
    "parts": r"^ValueError: Hostile.step returned no JSON",
    "object_parts": r"^ValueError: Hostile.step returned no JSON \(a object\)$",
    "deep": r"^ValueError: Hostile.step returned no JSON",
    "write": r"^ValueError: between the run and step stands a frame of 2,147,483,647 bytes",
    "unknown": r"^AttributeError: 'Hostile' object has no attribute 'unknown' \(hostile.py, line \d+\)$",
}


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark: str, but: int = 0) -> None:
    deadline = time.monotonic() + 10
    while len(marked(mark)) > but:
        assert time.monotonic() < deadline, [Path(f"/proc/{process}/stat").read_text() for process in marked(mark)]
        time.sleep(0.02)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def config(mark: str, kind: str = "Hostile", **settings: Any) -> AgentConfig:
    return AgentConfig(environment=f"{FILE}:{kind}", env_vars={SECRET: mark}, **settings)


async def outcome(processes: Processes, what: str, timeout_s: float = 2) -> Observation | str:
    """What a step gives, or the error of its episode."""
    session = await processes.open(ROW, 1, 30)
    try:
        return await session.step(Message(what), timeout_s)
    except EpisodeFailed as error:
        return str(error)
    finally:
        await session.close()


def test_exactly_the_episodes_that_fail_fail_and_nothing_is_left(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descriptors()
    well = ["good", "daemons", "print", "thread", "fork_on", "fork_and_leave"]
    kinds = [*FAILURES, *well, "surrogates"]

    async def play(processes: Processes) -> list[Observation | str]:
        await processes.start()
        all_of_them = [name for kind in kinds for name in (kind, "good")]
        hang = ("loop", "sleep", "stop", "catch")
        return await asyncio.gather(*(outcome(processes, name, 2 if name in hang else 60) for name in all_of_them))

    outcomes = run(config(str(tmp_path)), play)
    assert outcomes[1::2] == [GOOD] * len(kinds)
    of = dict(zip(kinds, outcomes[::2], strict=True))
    for kind, words in FAILURES.items():
        with pytest.raises(ValueError, match=words):
            raise ValueError(f"{of[kind]}")
    assert of["surrogates"] == Observation("a?b", reward=0.5)
    assert [of[kind] for kind in well] == [GOOD] * len(well)
    wait_until_gone(str(tmp_path))
    assert descriptors() == before
    assert os.listdir(tmp_path) == []


def test_daemons_end_with_their_episode_and_not_before(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        await processes.start()
        few = len(marked(str(tmp_path)))
        session = await processes.open(ROW, 1, 10)
        await session.step(Message("daemons"), 10)
        assert await outcome(processes, "exit") == "ProcessError: its process ended with exit code 3, in step"
        await asyncio.sleep(0.2)
        assert len(marked(str(tmp_path))) == few + 1 + 6
        await session.close()
        await asyncio.to_thread(wait_until_gone, str(tmp_path), few)

    run(config(str(tmp_path)), play)


def test_what_open_returns_is_checked() -> None:
    async def play(processes: Processes) -> None:
        with pytest.raises(EpisodeFailed, match="Hostile.reset returned a content of 5; expected a text, a list"):
            await processes.open({**ROW, "ground_truth": "content"}, 1, 10)

    run(config("x"), play)


def test_a_coroutine_that_is_late_has_its_place() -> None:
    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 10)
        words = r"TimeoutError: no answer from step after 0.3 s \(hostile.py, line (\d+)\)"
        with pytest.raises(EpisodeFailed, match=words) as failed:
            await session.step(Message(""), 0.3)
        line = int(str(failed.value).rpartition(" ")[2][:-1])
        assert "asyncio.sleep(1000)" in Path(FILE).read_text().splitlines()[line - 1]

    run(config("x", "Waiting"), play)


def test_close_is_called_and_has_its_time(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("pipeline.agent.session.CLOSE_S", 1.0)
    files = [tmp_path / name for name in ("plain", "cancelled", "hang", "fail")]

    async def play(processes: Processes) -> None:
        sessions = [await processes.open({**ROW, "ground_truth": str(file)}, 1, 10) for file in files]
        step = asyncio.create_task(sessions[1].step(Message("0.3"), 10))
        await asyncio.sleep(0.1)
        step.cancel()
        for session in sessions:
            await session.close()
        assert [file.exists() for file in files] == [False] * 4
        with pytest.raises(EpisodeFailed, match="cancelled"):
            await sessions[1].step(Message("0"), 10)

    run(config(str(tmp_path), "Forgetful"), play)
    assert [file.read_text() for file in files] == ["closed"] * 4
    problems = sorted(record.getMessage().partition("left: ")[2] for record in caplog.records)
    assert [problem.partition(" (")[0] for problem in problems] == ["ValueError: shut", "not done after 1 s"]
    wait_until_gone(str(tmp_path))


def test_a_zygote_that_dies_fails_its_episodes_and_another_one_starts(tmp_path: Path) -> None:
    async def play(processes: Processes) -> None:
        sessions = [await processes.open(ROW, 1, 10) for _ in range(3)]
        await sessions[0].step(Message("daemons"), 10)
        hanging = asyncio.create_task(sessions[1].step(Message("sleep"), 10))
        await asyncio.sleep(0.1)
        (zygote,) = [process for process in marked(str(tmp_path)) if depth(process) == 2]
        os.kill(zygote, signal.SIGKILL)
        words = "the process that starts those of episodes ended with signal SIGKILL"
        with pytest.raises(EpisodeLost, match=words):
            await hanging
        with pytest.raises(EpisodeLost, match=words):
            await sessions[2].step(Message("good"), 10)
        assert await outcome(processes, "good") == GOOD
        with pytest.raises(EpisodeFailed):
            await sessions[0].step(Message("good"), 10)
        await asyncio.to_thread(wait_until_gone, str(tmp_path), 2)

    run(config(str(tmp_path)), play)
    wait_until_gone(str(tmp_path))


def depth(process: int) -> int:
    """How many processes are between this one and a descendant, itself included; 0 for none."""
    steps = 0
    while process > 1:
        if process == os.getpid():
            return steps
        steps += 1
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0
    return 0


PARENT = """
import asyncio, sys
from pipeline.agent.processes import Processes
from pipeline.agent import Message
from pipeline.config.agent import AgentConfig
from tests.agent.test_hostile import ROW, config
async def main():
    processes = Processes(config(sys.argv[1]))
    sessions = [await processes.open(ROW, 1, 10) for _ in range(3)]
    await sessions[0].step(Message("daemons"), 10)
    tasks = [asyncio.create_task(session.step(Message("loop"), 100)) for session in sessions[1:]]
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(marked(str(tmp_path))) == 2 + 3 + 6
    process.kill()
    process.wait()
    wait_until_gone(str(tmp_path))
    process.stdout.close()


def test_ctrl_c_of_the_terminal_does_not_reach_environments(tmp_path: Path) -> None:
    """A run that handles the signal can still close its episodes."""
    script = PARENT.replace("asyncio.run(main())", "import signal; signal.signal(2, print); asyncio.run(main())")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert len(marked(str(tmp_path))) == 2 + 3 + 6
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone(str(tmp_path))


TOOLS = str(Path(__file__).parent / "hostile_tools.py")
SAID = {
    "long": r"^begin(?s:.)*\[\.\.\. 18,951,432 characters are left out \.\.\.\]\n(?s:.)*end$",
    "long list": r'^\["xxx(?s:.)* characters are left out (?s:.)*"\]$',
}
MISTAKES = {
    "long mistake": r"^begin(?s:.)* characters are left out (?s:.)*end$",
    "half a character": r"^\?$",
    "mute": "^$",
    "leaving": "^$",
    "odd": "^$",
}
ERRORS = {
    "syntax": r"^SyntaxError: xxx(?s:.)* characters are left out ",
    "odd syntax": r"^SyntaxError: ",
    "long error": r"^ValueError: xxx(?s:.)* characters are left out (?s:.)* \(hostile_tools.py, line \d+\)$",
    "long name": r"^NNN(?s:.)* characters are left out ",
    "long type": r"^ValueError: tool say returned no JSON(?s:.)* characters are left out ",
    "over": r"^EpisodeOver: xxx(?s:.)* characters are left out ",
}


def test_what_a_tool_says_is_cut_wherever_it_goes() -> None:
    async def say(processes: Processes, kind: str) -> tuple[str, str, float]:
        session = await processes.open(ROW, 1, 60)
        began = time.monotonic()
        try:
            return "said", await session.call("say", {"kind": kind}, 60), time.monotonic() - began
        except PolicyMistake as mistake:
            return "mistake", str(mistake), time.monotonic() - began
        except EpisodeFailed as failed:
            return "error", str(failed), time.monotonic() - began
        finally:
            await session.close()

    async def play(processes: Processes) -> None:
        for how, kinds, most in (("said", SAID, MAX_TEXT), ("mistake", MISTAKES, MAX_TEXT), ("error", ERRORS, 1100)):
            for kind, words in kinds.items():
                came, text, seconds = await say(processes, kind)
                assert came == how and len(text) <= most and re.search(words, text), (kind, came, text[:200])
                assert seconds < 30, kind

    run(AgentConfig(tools=[TOOLS]), play)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 10**309}, "the argument count of numbers must have finite numbers of at most 308 digits"),
        (
            {"count": 3, "ratio": -(10**400)},
            "the argument ratio of numbers must have finite numbers of at most 308 digits",
        ),
        ({"count": 1e300}, ""),
        ({"count": 3.0}, ""),
        ({"count": 10**300, "ratio": 10**300}, ""),
        ({"count": float("inf")}, "the argument count of numbers must have finite numbers"),
        ({"count": True}, "True is not of type 'integer'"),
        ({"self": 1}, "numbers has no argument 'self'"),
        ({"x" * 100_000: 1}, r"numbers has no argument 'x{79};"),
    ],
)
def test_numbers_that_a_policy_writes_are_at_worst_mistakes(arguments: dict[str, Any], words: str) -> None:
    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        if words:
            with pytest.raises(PolicyMistake, match=words) as mistake:
                await session.call("numbers", arguments, 30)
            assert len(str(mistake.value)) < 400
        assert float(await session.call("numbers", {"count": 3} if words else arguments, 30)) >= 0
        await session.close()

    run(AgentConfig(tools=[TOOLS]), play)


def test_a_long_observation_is_cut_and_many_messages_are_refused() -> None:
    async def play(processes: Processes) -> None:
        await processes.start()
        long = await outcome(processes, "long", 30)
        assert isinstance(long, Observation) and isinstance(long.content, str)
        assert len(long.content) <= MAX_TEXT and " characters are left out " in long.content
        assert await outcome(processes, "many", 30) == (
            "ValueError: Hostile.step returned 300,000 messages; at most 4,096 are read"
        )
        messages = await outcome(processes, "long_messages", 30)
        assert isinstance(messages, Observation) and isinstance(messages.content, list)
        assert sum(len(message["content"]) for message in messages.content) <= MAX_TEXT

    run(config("x"), play)


def test_forged_frames_put_no_more_into_an_error_than_others() -> None:
    """Code of an environment may write to the connection what it likes."""

    async def play(processes: Processes) -> None:
        await processes.start()
        late, error = await outcome(processes, "forge_late", 1), await outcome(processes, "forge_error", 30)
        assert isinstance(late, str) and late.startswith("TimeoutError: no answer from step after 1 s")
        assert isinstance(error, str) and error.startswith("xxx") and " characters are left out " in error
        assert len(late) < 400 and len(error) <= MAX_REASON
        deep = await outcome(processes, "forge_deep", 30)
        assert deep == "ValueError: between the run and step stands JSON of more than 100 levels"

    run(config("x"), play)
