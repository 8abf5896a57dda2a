"""Lists of tools that programs show: however many there are, none spoils the engine for other episodes."""

import asyncio
from typing import Any

import pytest

from pipeline.agent.conversation import Conversation
from pipeline.agent.tokens.chat_format import MAX_TOOL_LISTS, ChatFormat
from pipeline.config.agent import AgentConfig
from tests.agent.test_episode import Policy, ToyBridge, ToyReader, text
from tests.agent.test_program import TOOL, user


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat_format(**config: Any) -> tuple[ChatFormat, list[Any]]:
    """A chat_format, and the tools that were proven."""
    proven: list[Any] = []

    def prove(tools: list[dict[str, Any]]) -> Any:
        proven.append(tools[0]["function"]["name"])
        if tools[0]["function"]["name"] == "bad":
            raise KeyError("bad")
        return ToyBridge(), ToyReader()

    toys: Any = ToyBridge(), ToyReader()
    return ChatFormat(AgentConfig(program="toy:run", **config), *toys, [], 100, 1000, prove), proven


def test_more_lists_than_are_kept_are_proven_again() -> None:
    made, proven = chat_format()

    async def show() -> None:
        first = await made.with_tools([TOOL])
        assert await made.with_tools([TOOL]) is first and proven == ["calc"]
        for number in range(3 * MAX_TOOL_LISTS):
            await made.with_tools([tool(f"t{number}")])
            if number == MAX_TOOL_LISTS // 2:
                assert await made.with_tools([TOOL]) is first, "it was shown since then"
        assert len(made._others) == MAX_TOOL_LISTS
        again = await made.with_tools([TOOL])
        assert again is not first and again.key == first.key and proven.count("calc") == 2
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be shown the tools of the program: KeyError: 'bad'"):
                await made.with_tools([tool("bad")])
        assert await made.with_tools([]) is made

    asyncio.run(show())


def test_a_conversation_goes_on_when_its_tools_were_proven_again() -> None:
    made, proven = chat_format()

    async def play() -> Conversation:
        conversation = Conversation(made, Policy("12", "40"), 1000)
        said = await conversation.chat([user("go")], [TOOL])
        for number in range(MAX_TOOL_LISTS):
            await made.with_tools([tool(f"t{number}")])
        answer = {"role": "assistant", "content": said.message.text}
        await conversation.chat([user("go"), answer, user("up")], [TOOL])
        return conversation

    (context,) = asyncio.run(play()).contexts
    assert text(context.ids) == "12$<up>40$" and proven.count("calc") == 2


def test_tools_longer_than_a_prompt_are_not_proven() -> None:
    made, proven = chat_format()
    long = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}
    with pytest.raises(ValueError, match=r"have 100,\d+ characters, more than a prompt of data.max_prompt_length=100"):
        asyncio.run(made.with_tools([long]))
    assert proven == []
