"""Anthropic's client, as it is, against the endpoint, with a toy chat format and a scripted policy."""

from typing import Any

import anthropic
import pytest

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.server import Route
from tests.agent.endpoint.test_server import talk
from tests.agent.test_episode import Policy, text
from tests.agent.test_program import user

pytestmark = pytest.mark.vllm  # its converter

TOOL = {"name": "calc", "description": "", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def client_of(client: Any) -> anthropic.AsyncAnthropic:
    base = str(client.base_url).removesuffix("/v1/")
    return anthropic.AsyncAnthropic(base_url=base, api_key=client.api_key, max_retries=1)


def test_two_turns_are_one_context_of_exact_tokens() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async with client_of(client) as asks:
            messages: list[Any] = [user("go")]
            first = await asks.messages.create(
                model="m", max_tokens=4096, messages=messages, extra_body={"temperature": 0.7}
            )
            assert [block.text for block in first.content] == ["12"] and first.stop_reason == "end_turn"
            assert (first.usage.input_tokens, first.usage.output_tokens) == (2, 3)
            messages += [{"role": "assistant", "content": first.content}, user("up")]
            second = await asks.messages.create(model="m", max_tokens=2, messages=messages)
            assert (second.content[0].text, second.stop_reason) == ("40", "max_tokens")
            (context,) = conversation.contexts
            assert text(context.ids) == "12$<up>40"

    talk(Policy("12", "40"), use)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(stream: bool) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async with client_of(client) as asks:
            messages: list[Any] = [user("go")]
            settings: Any = {"model": "m", "max_tokens": 50, "tools": [TOOL], "messages": messages}
            for _ in range(2):
                if stream:
                    async with asks.messages.stream(**settings) as events:
                        said = await events.get_final_message()
                else:
                    said = await asks.messages.create(**settings)
                [call] = [block for block in said.content if block.type == "tool_use"]
                assert (said.stop_reason, call.name, call.input) == ("tool_use", "calc", {"x": 1})
                assert said.usage.output_tokens == len("call calc$")
                result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}
                messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
            last = await asks.messages.create(**settings)
            assert [block.text for block in last.content] == ["42"]
            (context,) = conversation.contexts
            assert text(context.ids) == "call calc$<7>call calc$<7>42$"

    talk(Policy("call calc", "call calc", "42"), use)


def test_thinking_comes_first_and_may_be_sent_back() -> None:
    from pipeline.agent.endpoint.anthropic import as_completion, message, streamed

    calls = [{"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}]
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls"}
    answer = message({"id": "i", "model": "m", "choices": [choice], "usage": usage})
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert b'"thinking_delta", "thinking": "hm"' in streamed(answer)
    again = {
        "model": "m",
        "max_tokens": 9,
        "messages": [user("go"), {"role": "assistant", "content": answer["content"]}],
    }
    sent = as_completion(again, 5)
    assert sent["messages"][1]["tool_calls"] == calls and sent["max_tokens"] == 5


def test_the_models_are_listed() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async with client_of(client) as asks:
            assert [model.id async for model in asks.models.list()] == ["policy"]
            assert (await asks.models.retrieve("claude-x")).display_name == "claude-x"

    talk(Policy(), use)


REMOVAL = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "absent"}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"extra_body": {"temperature": 0.5}}, "temperature=0.5"),
        ({"stop_sequences": ["x"]}, "stop"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"extra_body": {"container": "x"}}, "'container'"),
        ({"extra_body": {"messages": [{"role": "user", "content": 3}]}}, "messages.0.content"),
        ({"max_tokens": 0}, "max_tokens: "),
        (
            {"extra_body": {"messages": [user("go"), {"role": "system", "content": [REMOVAL]}]}},
            "cannot be read as a chat",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async with client_of(client) as asks:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await asks.messages.create(**{"model": "m", "max_tokens": 9, "messages": [user("go")], **asked})
        assert words in refused.value.body["error"]["message"]  # type: ignore[index,call-overload]
        assert conversation.turns == 0 and not line.failed.done()

    talk(Policy(), use)


def test_a_path_that_has_ended() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        async with anthropic.AsyncAnthropic(base_url=str(client.base_url)[:-4] + "x", api_key="k") as asks:
            with pytest.raises(anthropic.APIStatusError) as gone:
                await asks.messages.create(model="m", max_tokens=9, messages=[user("go")])
        assert gone.value.status_code == 410

    talk(Policy(), use)
