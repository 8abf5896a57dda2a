"""Programs in processes of their own: what they ask, what comes back, and what is left when they fail."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent import EpisodeOver, Message
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.checks import ProgramResult
from pipeline.agent.processes import Processes
from pipeline.agent.session import Session
from pipeline.agent.tokens.context import Answer
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import run

PROGRAMS = str(Path(__file__).parents[1] / "programs.py")
PROMPT = [{"role": "user", "content": "5"}]


class Policy:
    """Answers with the last message; `over` ends the episode, `wait` takes long, `fail` and `dead` fail."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.answering = self.most = 0

    async def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        text = messages[-1]["content"]
        self.asked.append(messages)
        self.answering += 1
        self.most = max(self.most, self.answering)
        try:
            await asyncio.sleep(10 if text == "wait" else 0)
        finally:
            self.answering -= 1
        if text == "over":
            raise EpisodeOver("it is over")
        return Answer(Message(text.rstrip("!")), None, False)


def play(name: str, policy: Any = None, timeout_s: float = 20.0) -> tuple[ProgramResult, Session]:
    async def main(processes: Processes) -> tuple[ProgramResult, Session]:
        row = {"prompt": PROMPT, "data_source": "x", "ground_truth": name, "extra_info": None}
        session = await processes.open(row, 7, 10)
        async with asyncio.timeout(timeout_s):
            returned = await session.run(row, policy or Policy())
        await session.close()
        return returned, session

    return run(AgentConfig(program=f"{PROGRAMS}:run"), main)


def test_a_program_asks_and_returns() -> None:
    policy = Policy()
    returned, _ = play("count", policy)
    assert returned == ProgramResult(reward=5.0, parts={"calls": 0, "seed": None})
    assert [len(messages) for messages in policy.asked] == [1, 3, 5]
    assert policy.asked[2] == [
        *PROMPT,
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "5!"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "5!"},
    ]


def test_a_program_returns_rewards_of_its_answers() -> None:
    assert play("rewards")[0] == ProgramResult(rewards=[1.0, 0.5], parts={"acc": 1})


def test_thousands_of_chats_at_once_are_answered_some_at_a_time() -> None:
    policy = Policy()
    assert play("many", policy)[0].reward == 1.0
    assert len(policy.asked) == 3000 and policy.most <= 64


def test_a_fork_of_a_program_neither_asks_nor_returns() -> None:
    policy = Policy()
    assert play("fork", policy)[0].reward == 1.0
    assert [messages[-1]["content"] for messages in policy.asked] == ["1", "2"]


@pytest.mark.parametrize("name", ["let_pass", "let_group_pass"])
def test_a_program_may_let_the_end_pass(name: str) -> None:
    with pytest.raises(EpisodeOver):
        play(name)


@pytest.mark.parametrize("name", ["cancel", "leave_some", "same_numbers", "no_messages"])
def test_no_chat_is_left(name: str) -> None:
    policy = Policy()
    assert play(name, policy)[0].reward == 1.0
    assert policy.asked and policy.answering == 0 and policy.most <= 64


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("boom", "ValueError: boom (programs.py, line "),
        ("number", "ValueError: messages must be a list of at least one message {role, content} (programs.py, line "),
        ("mistaken", "ValueError: messages must be a list"),
        ("leave", "SystemExit: bye (programs.py, line "),
        ("exit", "its process ended with exit code 3, in the program"),
        ("text", "the program returned a reward of '1.0'"),
        ("nan", "the program returned a reward of nan"),
        ("nan_of_an_answer", "the program returned a reward of nan (rewards[1])"),
        ("one_reward", "the program returned rewards of 1.0; expected a list"),
        ("no_reward", "the program returned rewards of [None]; expected a list"),
        ("lie_about_answers", "the program returned a reward of 'much' (rewards[0])"),
        ("parts", "the program returned no JSON"),
        ("garbage", "no JSON"),
        ("no_number", "a chat without a number"),
        ("long_frame", "a frame of 4,294,967,295 bytes"),
        ("lie", "ValueError"),
    ],
)
def test_programs_that_fail(name: str, words: str) -> None:
    with pytest.raises(EpisodeFailed) as failed:
        play(name)
    assert words in str(failed.value)


@pytest.mark.parametrize("error", [EpisodeFailed("too many"), ConnectionError("dead"), ValueError("odd")])
def test_what_a_chat_raises_comes_through(error: Exception) -> None:
    async def policy(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer:
        raise error

    with pytest.raises(type(error)) as raised:
        play("hang", policy)
    assert raised.value is error


@pytest.mark.parametrize("name", ["hang", "block"])
def test_a_program_that_hangs_tells_where(name: str) -> None:
    async def main(processes: Processes) -> str:
        row = {"prompt": PROMPT, "data_source": "x", "ground_truth": name, "extra_info": None}
        session = await processes.open(row, 7, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await session.run(row, Policy())
        place = await session.place()
        session.kill()
        assert await session.place() == ""
        return place

    line = next(
        number
        for number, text in enumerate(Path(PROGRAMS).read_text().splitlines(), 1)
        if "sleep(1000)" in text and (name == "block") == ("time." in text)
    )
    assert run(AgentConfig(program=f"{PROGRAMS}:run"), main) == f" (programs.py, line {line})"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (f"{PROGRAMS}:plain", "which is no coroutine function; write async def run(row, chat)"),
        (f"{PROGRAMS}:no_row", "which can be called neither with (row, chat) nor with (row)"),
        (f"{PROGRAMS}:gone", "has no gone"),
        # Built in, and without a signature.
        ("builtins:max", "which can be called neither with (row, chat) nor with (row)"),
    ],
)
def test_programs_that_do_not_load(spec: str, words: str) -> None:
    async def main(processes: Processes) -> None:
        with pytest.raises(ValueError) as refused:
            await processes.start()
        assert str(refused.value).startswith("agent.program is") and words in str(refused.value)

    run(AgentConfig(program=spec), main)
