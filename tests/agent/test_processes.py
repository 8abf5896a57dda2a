"""Environment processes: what they answer, and what is left when they fail."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import Call, Message, Observation
from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig

WORLDS = str(Path(__file__).parent / "worlds.py")
ROW = {"prompt": [], "data_source": "x", "ground_truth": "please", "extra_info": None}


def run(config: AgentConfig, use: Callable[[Processes], Awaitable[Any]]) -> Any:
    """What `use` returns, which is given the processes."""

    async def main() -> Any:
        processes = Processes(config)
        try:
            return await use(processes)
        finally:
            await processes.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_an_environment_answers() -> None:
    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.environment and not loaded.closes and loaded.forks and loaded.tools == []
        sessions = [await processes.open(ROW, 7, 10) for _ in range(2)]
        assert sessions[0].opened == "Guess a number from 1 to 3, please."
        for session in sessions:
            seen = []
            for guess in "123":
                seen.append(await session.step(Message(guess), 10))
                if seen[-1].done:
                    break
            assert seen[-1] == Observation(done=True, reward=1.0, parts={"acc": 1})
            assert all(one == Observation("higher") for one in seen[:-1])
            await session.close()

    run(AgentConfig(environment=f"{WORLDS}:HigherLower", kwargs={"most": 3}), play)


def test_a_crash_leaves_no_dump_and_episodes_end_first_when_memory_is_short(tmp_path: Path) -> None:
    """Without isolation; `test_isolation.py` has the other case."""
    shutil.copy(Path(WORLDS).with_name("apart.py"), tmp_path)
    (tmp_path / "beside.py").write_text("GREETING = 'begin'")
    score = Path("/proc/self/oom_score_adj")
    assert score.read_text() != "1000\n", "the tests themselves are to end first, so that nothing can be seen"

    async def play(processes: Processes) -> list[Any]:
        session = await processes.open(ROW, 1, 30)
        orders = "__import__('resource').getrlimit(4)", f"open({str(score)!r}).read()"
        return [(await session.step(Message(order), 30)).content for order in orders]

    assert run(AgentConfig(environment=f"{tmp_path}/apart.py:Told"), play) == ["done: (0, 0)", "done: '1000\\n'"]


def test_methods_may_be_coroutines_on_one_event_loop() -> None:
    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 0, 10)
        assert session.opened == [{"role": "user", "content": "begin"}]
        message = Message("", "thought", [Call("1", "f", {"x": 5})], truncated=True)
        assert await session.step(message, 10) == Observation("thought5True")

    run(AgentConfig(environment=f"{WORLDS}:Coroutines"), play)


@pytest.mark.parametrize("preloaded", [False, True])
def test_global_random_numbers_follow_the_seed(tmp_path: Path, preloaded: bool) -> None:
    """Processes that are forked from one would all draw the same."""
    (tmp_path / "dice.py").write_text(
        "import numpy\n" * preloaded
        + f"import sys\nsys.path.append({str(Path(WORLDS).parent)!r})\nfrom worlds import Dice"
    )

    async def play(processes: Processes) -> list[Any]:
        return [(await processes.open(ROW, seed, 30)).opened for seed in (1, 2, 1)]

    first, second, third = (said.split() for said in run(AgentConfig(environment=f"{tmp_path}/dice.py:Dice"), play))
    assert first[0] == third[0] != second[0]
    assert first[1] != second[1]
    assert (first[1] == third[1]) == preloaded


def test_tools_answer_and_each_episode_has_its_own() -> None:
    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert [tool["function"]["name"] for tool in loaded.tools] == ["calc", "count", "plain"]
        assert loaded.timeouts == {"calc": 2, "count": None, "plain": None}
        assert not loaded.environment
        first, second = [await processes.open(ROW, 7, 10) for _ in range(2)]
        assert first.opened is None
        assert await first.call("calc", {"expression": "1+2"}, 10) == "3"
        assert [await first.call("count", {}, 10) for _ in range(2)] == ["1", "2"]
        assert await second.call("count", {"step": 5}, 10) == "5"
        assert await first.call("plain", {"values": [1, 2.5]}, 10) == '{"sum":3.5}'

    run(AgentConfig(tools=[WORLDS, f"{WORLDS}:plain"]), play)


def test_a_mistake_of_the_policy_is_told_and_ends_nothing() -> None:
    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 7, 10)
        for name, arguments, words in [
            ("calc", {"expression": "1+2+3+4+5+6"}, "too long"),
            ("calc", {}, "the argument expression of calc is missing"),
            ("calc", {"expression": 3}, "the argument expression of calc: 3 is not of type 'string'"),
            ("calc", {"x": ""}, "calc has no argument 'x'; its arguments are: expression"),
            ("cook", {}, "there is no tool 'cook'; the tools are: calc, count"),
        ]:
            with pytest.raises(PolicyMistake) as told:
                await session.call(name, arguments, 10)
            assert str(told.value) == words
        assert await session.call("calc", {"expression": "2"}, 10) == "2"

    run(AgentConfig(tools=[WORLDS]), play)


def test_an_exception_fails_its_own_episode_and_has_its_place() -> None:
    async def play(processes: Processes) -> None:
        first, second = [await processes.open(ROW, 7, 10) for _ in range(2)]
        with pytest.raises(EpisodeFailed, match=r"^ValueError: invalid literal .* \(worlds.py, line 19\)$"):
            await first.step(Message("three"), 10)
        with pytest.raises(EpisodeFailed, match="invalid literal"):
            await first.step(Message("3"), 10)
        assert (await second.step(Message("0"), 10)).content == "higher"

    run(AgentConfig(environment=f"{WORLDS}:HigherLower"), play)
