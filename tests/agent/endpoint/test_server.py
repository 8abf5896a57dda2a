"""OpenAI's client, as it is, against the endpoint, with a toy format and a scripted policy; commands that use it."""

import asyncio
import json
import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.agent import Message, episode
from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.server import Endpoint, Route
from pipeline.agent.episode import Episode
from pipeline.agent.processes import Processes
from pipeline.agent.program import ClientPlayer
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.config.agent import AgentConfig
from pipeline.rollout.agents import Agent
from pipeline.rows import ANSWER
from tests.agent.test_episode import ROW, Policy, ToyBridge, ToyReader, text
from tests.agent.test_program import TOOL, Slow, user

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
Use = Callable[[openai.AsyncOpenAI, Conversation, Route], Awaitable[Any]]


def chat_format(config: AgentConfig, longest: int) -> ChatFormat:
    toys: Any = ToyBridge(), ToyReader()
    return ChatFormat(config, toys[0], toys[1], [], 200, longest, lambda tools: toys)


def talk(policy: Any, use: Use, longest: int = 1000, **config: Any) -> Any:
    """What `use` returns, which is given a client, the conversation that it leads to, and its line."""

    async def main() -> Any:
        section = AgentConfig(command=["x"], **config)
        conversation, endpoint = Conversation(chat_format(section, longest), policy, longest), Endpoint()
        await endpoint.start()
        line = Route(conversation.chat, SAMPLING, 100)
        variables = endpoint.open(line)
        base, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        try:
            async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=1) as client:
                result = await use(client, conversation, line)
                if key in endpoint._routes:
                    await endpoint.end(variables)
                with pytest.raises(openai.APIStatusError) as ended:
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
                assert ended.value.status_code == 410
                return result
        finally:
            await endpoint.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_the_client_plays_two_turns() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        messages: list[Any] = [user("go")]
        first = await client.chat.completions.create(model="m", messages=messages, temperature=0.7, seed=3, user="me")
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("12", "stop")
        assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (2, 3, 5)
        messages += [first.choices[0].message, user("up")]
        second = await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("40", "length")
        assert second.id != first.id
        (context,) = conversation.contexts
        assert text(context.ids) == "12$<up>40"

    talk(Policy("12", "40"), use)


def test_the_plain_client_in_a_thread_streams() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> Any:
        def stream() -> tuple[str, int, Any]:
            plain: Any = openai.OpenAI(base_url=str(client.base_url), api_key="any")
            events = plain.chat.completions.create(
                model="m", messages=[user("go")], stream=True, stream_options={"include_usage": True}
            )
            parts = list(events)
            said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            return said, parts[-1].usage.total_tokens, parts[1].choices[0].finish_reason

        return await asyncio.to_thread(stream)

    assert talk(Policy("12"), use) == ("12", 5, "stop")


def test_tools_are_called_and_answered() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        messages: list[Any] = [user("go")]
        for number in range(2):
            said = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            [call] = said.choices[0].message.tool_calls
            assert said.choices[0].finish_reason == "tool_calls" and call.id == f"call0000{number}"
            assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"x": 1})
            messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        last = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        assert last.choices[0].message.content == "42" and last.choices[0].message.tool_calls is None
        (context,) = conversation.contexts
        assert text(context.ids) == "call calc$<7>call calc$<7>42$"
        assert conversation.calls == {"calc": 2}
        results = [message for message in context.messages if message["role"] == "tool"]
        assert results[1] == {"role": "tool", "content": "7", "tool_call_id": "call_0", "name": "calc"}

    talk(Policy("call calc", "call calc", "42"), use)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"extra_body": {"guided_json": "x"}}, "guided_json"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": [user("go")], **asked})
        assert refused.value.param == named
        assert conversation.turns == 0 and not line.failed.done()

    talk(Policy(), use)


def test_bodies_that_are_none_and_other_paths() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> list[int]:
        base = str(client.base_url)
        web, codes = client._client, []
        for body in (b"{", b"[1]", b"[" * 100_000, b'{"messages": NaN}', b"x" * (17 << 20)):
            codes.append((await web.post(f"{base}chat/completions", content=body)).status_code)
        codes.append((await web.get(f"{base}embeddings")).status_code)
        codes.append((await web.post(base.replace("/v1/", "x/v1/") + "chat/completions", json={})).status_code)
        return codes

    assert talk(Policy(), use) == [400, 400, 400, 400, 413, 404, 410]


def test_clients_that_send_no_http_or_leave_write_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    requests = (b"Content-Length: -5\r\n\r\n", b"x: " + b"a" * 10_000 + b"\r\n\r\n", b"Content-Length: 9\r\n\r\n{")

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        address = client.base_url
        for rest in requests:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(f"POST {address.path}chat/completions HTTP/1.1\r\nHost: a\r\n".encode() + rest)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
        await asyncio.sleep(0.05)
        assert await client.chat.completions.create(model="m", messages=[user("go")])

    talk(Policy("12"), use)
    assert not caplog.records


def test_a_client_that_asks_again_gets_the_first_answer() -> None:
    policy = Slow("12", "40", "99")

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        policy.seconds = 0.9
        said = await client.with_options(timeout=0.4, max_retries=2).chat.completions.create(
            model="m", messages=[user("go")]
        )
        assert said.choices[0].message.content == "12", "it asked while the answer was made"
        policy.seconds = 0
        body = {"model": "m", "messages": [user("go")]}
        url, again = f"{client.base_url}chat/completions", {"x-stainless-retry-count": "1"}
        one = await client._client.post(url, json={**body, "user": "a"})
        two = await client._client.post(url, json={**body, "user": "a"}, headers=again)
        assert one.json() == two.json() and one.json()["choices"][0]["message"]["content"] == "40"
        assert conversation.turns == 2 and len(conversation.contexts) == 2

    talk(policy, use, max_contexts=2)


class Held(Policy):
    """Answers when it is let."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.let = asyncio.Event()

    async def __call__(self, ids: list[int], most: int, turn: int) -> Any:
        generation = await super().__call__(ids, most, turn)
        await self.let.wait()
        return generation


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("late", [False, True])
def test_a_client_that_hung_up_gets_the_answer_that_it_did_not_hear(late: bool) -> None:
    policy = Held("12", "40", "99")

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        url, body = f"{client.base_url}chat/completions", {"messages": [user("go")]}
        for turn in range(2):
            policy.let.clear()
            waits = asyncio.create_task(client._client.post(url, json=body))
            await until(lambda turn=turn: len(policy.asked) > turn)  # type: ignore[misc]
            [asked] = [asked for asked in line._answers.values() if not asked.completion.done()]
            waits.cancel()
            await until(lambda asked=asked: asked.lost)  # type: ignore[misc]
            if late:
                policy.let.set()
                await until(lambda turn=turn: conversation.turns > turn)  # type: ignore[misc]
            again = asyncio.create_task(client._client.post(url, json=body))
            await until(lambda asked=asked: late or not asked.lost)  # type: ignore[misc]
            policy.let.set()
            said = (await again).json()["choices"][0]["message"]
            body = {"messages": [*body["messages"], said, user("up")]}
        (context,) = conversation.contexts
        assert text(context.ids) == "12$<up>40$" and conversation.turns == 2

    talk(policy, use)


def test_a_request_of_two_clients_at_once_is_answered_once() -> None:
    policy = Held("12", "40", "99")

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        def ask(**more: Any) -> Any:
            return asyncio.ensure_future(client.chat.completions.create(model="m", messages=[user("go")], **more))

        first = ask()
        await until(lambda: len(policy.asked) == 1)
        with pytest.raises(openai.ConflictError, match="let a key such as `seed`"):
            await ask()
        other = ask(seed=2)
        await until(lambda: len(policy.asked) == 2)
        policy.let.set()
        assert [(await each).choices[0].message.content for each in (first, other)] == ["12", "40"]
        assert (conversation.turns, len(conversation.contexts)) == (2, 2) and not line.failed.done()
        assert (await ask()).choices[0].message.content == "99", "its answer was heard, so it asks for another one"

    talk(policy, use, max_contexts=3)


@pytest.mark.parametrize(("longest", "most", "code"), [(6, 8, "context_length_exceeded"), (99, 1, "max_turns_reached")])
def test_an_episode_that_is_over(longest: int, most: int, code: str) -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        said = await client.chat.completions.create(model="m", messages=[user("go")])
        messages = [user("go"), said.choices[0].message, user("up")]
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=messages)
            assert refused.value.code == code
        assert not line.failed.done()

    talk(Policy("12"), use, longest=longest, max_turns=most)


def test_half_a_character_is_a_question_mark() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        body = b'{"messages": [{"role": "user", "content": "a\\ud800"}]}'
        answer = await client._client.post(f"{client.base_url}chat/completions", content=body)
        assert answer.status_code == 200
        assert text(conversation.contexts[0].prompt_ids) == "a?"

    talk(Policy("12"), use)


def test_a_failure_is_told_to_the_run() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[user("x" * 300)])
        assert "data.max_prompt_length=200" in str(line.failed.result().error)

    talk(Policy(), use)


def test_a_chat_that_waits_ends_with_the_episode() -> None:
    asked = asyncio.Event()

    async def never(ids: list[int], most: int, turn: int) -> Any:
        asked.set()
        await asyncio.sleep(1000)

    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("go")]))
        await asked.wait()
        await line.close()
        with pytest.raises(openai.APIStatusError) as ended:
            await asking
        assert ended.value.status_code == 410 and conversation.contexts == []

    talk(never, use)


START = """
import json, os, sys, time, urllib.request
row = json.load(open(os.environ["SLIPSTREAM_ROW"]))
def ask(messages, **more):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps({"messages": messages, **more}).encode(), method="POST")
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = row["prompt"]
"""
TWICE = """
messages += [ask(messages), {"role": "user", "content": "up"}]
last = ask(messages)["content"]
"""


def command(
    body: str,
    policy: Any,
    *,
    start: str = START,
    longest: int = 1000,
    mark: str = "no such mark",
    row: dict[str, Any] = ROW,
    **config: Any,
) -> Episode:
    """The episode of a command that is this script; no process is left behind it whose command has the mark."""
    section = AgentConfig(**{"command": ["python", "-c", start + body], **config})

    async def main() -> Episode:
        processes, endpoint = Processes(section), Endpoint()
        await endpoint.start()

        async def opened() -> Any:
            session = await processes.open(row, 7, 20)
            return ClientPlayer(session, endpoint, SAMPLING, 100)

        try:
            played = await episode.run(row, opened(), chat_format(section, longest), policy, longest)
            assert endpoint._routes == {}
            async with asyncio.timeout(5):
                while any(mark.encode() in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
                    await asyncio.sleep(0.02)
            return played
        finally:
            await processes.close()
            await endpoint.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_command_plays() -> None:
    body = TWICE + 'print("bye"); print(json.dumps({"reward": float(last), "acc": row["ground_truth"]}))'
    played = command(body, Policy("12", "40"))
    assert (played.error, played.ended, played.score, played.parts) == (None, "done", 40.0, {"acc": 1})
    (context,) = played.contexts
    assert text(context.prompt_ids) == "go" and text(context.ids) == "12$<up>40$"
    assert [span[2] for span in context.spans] == [None, None, 40.0]


def test_a_command_rewards_each_answer() -> None:
    played = command(TWICE + 'print(\'{"rewards": [0.5, 2], "acc": 1}\')', Policy("12", "40"))
    (context,) = played.contexts
    assert [span[2] for span in context.spans] == [0.5, None, 2.0]
    assert (played.error, played.score, played.parts) == (None, 2.5, {"acc": 1})


def test_a_command_that_prints_nothing_is_scored_by_the_function() -> None:
    assert "printed is no object with a reward; print" in str(command(TWICE + "print(5)", Policy("12", "40")).error)
    played = command(TWICE, Policy("12", "40"), reward="function")
    assert (played.error, played.ended, played.turns) == (None, "done", 2)


@pytest.mark.parametrize("body", [TWICE, TWICE.replace("last = ask", "try:\n    last = ask") + "except: print('{}')"])
def test_a_command_whose_episode_is_over_is_no_error(body: str) -> None:
    played = command(body, Policy("12"), max_turns=1, reward="function")
    assert (played.error, played.ended, played.score) == (None, "turns", 0.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('boom')", "exit code 1; the last line on its standard error: ValueError: boom"),
        ("os.kill(os.getpid(), 9)", "agent.command ended with signal 9"),
        ("print('x' * (1 << 26)); print('{\"reward\": NaN}')", "a reward of nan"),
        ('ask(messages); print(\'{"reward": "much"}\')', "a reward of 'much'"),
        ("ask(messages); print('{\"rewards\": [1, 2]}')", "returned 2 `rewards`, and the episode has 1 answers"),
        ("ask(messages); print('{\"rewards\": [NaN]}')", "a reward of nan (rewards[0])"),
        ("print('{\"reward\": 1}')", "without an answer of the policy"),
        ("ask(messages, temperature=0.1)", "HTTP Error 400"),
        ("ask([{'role': 'user', 'content': 'x' * 300}])", "data.max_prompt_length=200"),
        ("print('[' * 60000, end=''); time.sleep(30)", "took longer than 1 s (agent.episode_timeout_s)"),
    ],
)
def test_commands_that_fail(body: str, words: str) -> None:
    timeout_s = 1.0 if "sleep" in body else 20.0
    assert words in str(command(body, Policy("12"), episode_timeout_s=timeout_s).error)


def test_nothing_is_left_of_a_command(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    body = f"""
import subprocess
ask(messages)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; open({mark!r}, 'w').write('x'); time.sleep(1000)"])
while not os.path.exists({mark!r}): time.sleep(0.01)
print(json.dumps({{"reward": 1.0, "seen": sorted(os.environ)}}))
"""
    played = command(body, Policy("12"), env_vars={"GAME": "x"}, mark=mark)
    assert played.error is None and played.score == 1.0
    seen = set(played.parts["seen"])
    assert {"GAME", "OPENAI_API_KEY", "OPENAI_BASE_URL", "SLIPSTREAM_ROW"} <= seen
    assert not any("TOKEN" in name or "PROXY" in name.upper() for name in seen)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_command_that_is_no_program() -> None:
    async def main() -> None:
        processes = Processes(AgentConfig(command=["no-such-program"]))
        try:
            with pytest.raises(ValueError, match="agent.command begins with no-such-program"):
                await processes.start()
        finally:
            await processes.close()

    asyncio.run(main())


CLIENT = str(Path(__file__).parents[3] / "examples" / "agents" / "higher_lower_client.py")
WAYS: list[dict[str, Any]] = [{"command": ["python", CLIENT]}, {"command": [], "program": f"{CLIENT}:play"}]


@pytest.mark.parametrize("way", WAYS, ids=["command", "program"])
def test_the_example_plays_higher_lower(way: dict[str, Any]) -> None:
    policy = Policy("99", "x", "1")
    played = command("", policy, env_vars={"GUESSES": "3"}, **way)
    assert (played.error, played.score, played.parts) == (None, 1.0, {"acc": 1, "guesses": 3})
    assert text(played.contexts[0].ids) == "99$<lower>x$<A number.>1$"


@pytest.mark.parametrize("guesses", [("40", "x", "3"), ("40", "1")])
def test_the_example_rewards_guesses_as_the_environment_does(guesses: tuple[str, ...]) -> None:
    """The number is 1. Of 32 numbers that the first guess can exclude, 40 excludes 24, and of 20 then, 3 excludes 3."""
    folder = Path(__file__).parents[3] / "examples" / "agents"
    game = runpy.run_path(str(folder / "higher_lower.py"))["HigherLower"](guesses=3, worth=0.5)
    game.reset(ROW, 7)
    played = command("", Policy(*guesses), env_vars={"GUESSES": "3", "WORTH": "0.5"}, **WAYS[1])
    rewards = [reward for kind, _, reward in played.contexts[0].spans if kind == ANSWER]
    assert rewards == [game.step(Message(guess)).reward for guess in guesses]
    assert rewards[0] == 0.5 * 24 / 32 and (played.error, played.score) == (None, sum(rewards))
    assert played.parts == {"acc": int("1" in guesses), "guesses": len(guesses)}


def test_the_models_are_one_that_answers_to_any_name() -> None:
    async def use(client: Any, conversation: Conversation, line: Route) -> None:
        (listed,) = [model async for model in client.models.list()]
        assert (listed.id, listed.object) == ("policy", "model")
        assert (await client.models.retrieve("org/some-model")).id == "org/some-model"
        said = await client.chat.completions.create(model=listed.id, messages=[user("go")])
        assert said.model == listed.id
        raw = (await client._client.get(f"{client.base_url}models")).json()
        assert raw["object"] == "list" and raw["data"][0]["type"] == "model" and raw["has_more"] is False
        ended = await client._client.get(str(client.base_url).replace("/v1/", "x/v1/") + "models")
        assert ended.status_code == 410

    talk(Policy("12"), use)


PROGRAM = """
import asyncio
from openai import AsyncOpenAI, OpenAI

imported = []

def answers(row):
    client, said = OpenAI(max_retries=0), []
    for turn in range(row["extra_info"]["turns"]):
        messages = [{"role": "user", "content": f"{turn}"}] if not said else messages + [said[-1], {
            "role": "user", "content": "more"}]
        said.append(client.chat.completions.create(model="m", messages=messages).choices[0].message)
    imported.append(1)
    return {"rewards": [float(message.content) for message in said], "calls": len(imported)}

async def waits(row):
    async with AsyncOpenAI() as client:
        said = await client.chat.completions.create(model="m", messages=row["prompt"])
    return float(said.choices[0].message.content)

def asks_in_vain(row):
    OpenAI()
    raise KeyError("no game")

def says_nothing(row):
    answers(row)
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Episode]:
    """Plays an episode of a function of `PROGRAM`."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def play(name: str, *said: str, **config: Any) -> Episode:
        row = {**ROW, "extra_info": {"turns": len(said)}}
        way = {"command": [], "program": f"{tmp_path}/program.py:{name}"}
        return command("", Policy(*said), row=row, **way, **config)

    return play


def test_a_function_with_a_client_plays_in_a_fork(program: Callable[..., Episode]) -> None:
    for _ in range(2):
        played = program("answers", "1", "2")
        assert (played.error, played.score, played.parts) == (None, 3.0, {"calls": 1})
    assert text(played.contexts[0].ids) == "1$<more>2$"
    assert program("waits", "5").score == 5.0


def test_a_function_with_a_client_that_fails_has_its_place(program: Callable[..., Episode]) -> None:
    played = program("asks_in_vain", "1")
    assert played.error is not None and "KeyError: 'no game' (program.py, line " in played.error
    played = program("says_nothing", "1")
    assert played.error is not None and "the program returned no reward" in played.error


def test_a_function_with_a_client_that_is_refused_at_the_end_gets_nothing(program: Callable[..., Episode]) -> None:
    played = program("answers", "1", "2", "3", max_turns=2)
    assert (played.error, played.score, played.ended) == (None, 0.0, "turns")


@pytest.mark.parametrize(("settings", "words"), [({"hosts": 1}, "agent.hosts"), ({"isolation": "namespaces"}, "isola")])
def test_a_client_without_a_way_to_the_endpoint_is_refused(settings: dict[str, Any], words: str) -> None:
    agent = Agent.__new__(Agent)
    agent.config = AgentConfig(program="a.py:run", **settings)
    with pytest.raises(ValueError, match=f"agent.program=a.py:run .*{words}"):
        agent._check_client()
