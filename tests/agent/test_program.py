"""Episodes that a program drives, with a toy format and a scripted policy: what becomes of tokens and of rewards."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipeline.agent import EpisodeOver, episode
from pipeline.agent.conversation import Ask, Conversation
from pipeline.agent.endpoint.messages import checked_messages, checked_tools
from pipeline.agent.episode import Episode
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.checks import ProgramResult
from pipeline.agent.inside.forms import split
from pipeline.agent.inside.frames import MAX_REASON
from pipeline.agent.program import ProgramPlayer
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.agent.tokens.context import Answer, joined
from pipeline.config.agent import AgentConfig
from pipeline.generation import Generation
from pipeline.replay.checks import _last_answer
from pipeline.rows import ANSWER, OBSERVATION
from tests.agent.test_episode import ROW, Policy, ToyBridge, ToyReader, text

Chat = Callable[..., Awaitable[Answer]]
Drive = Callable[[Chat], Awaitable[Any]]
DEEP = "[" * 200 + "]" * 200
DEEP_CALL = {"function": {"name": "f", "arguments": f'{{"x": {DEEP}}}'}}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


class ToyProgram:
    """A program in this process; `drive` is given the conversation's chat."""

    def __init__(self, drive: Drive) -> None:
        self._drive, self.closed = drive, 0

    async def run(self, row: dict[str, Any], chat: Chat) -> ProgramResult:
        result = await self._drive(chat)
        return result if isinstance(result, ProgramResult) else ProgramResult(result)

    async def place(self) -> str:
        return " (toy.py, line 3)"

    async def close(self, well: bool = False) -> None:
        self.closed += 1


def play(policy: Ask, drive: Drive, longest: int = 1000, stop: tuple[str, ...] = (), **config: Any) -> Episode:
    section = AgentConfig(program="toy:run", **config)
    proven: Any = ToyBridge(), ToyReader()
    chat_format = ChatFormat(section, proven[0], proven[1], [], 20, longest, lambda tools: proven)
    program = ToyProgram(drive)

    async def opened() -> Any:
        return ProgramPlayer(program)  # type: ignore[arg-type]

    played = asyncio.run(episode.run(ROW, opened(), chat_format, policy, longest, stop))
    assert program.closed == 1
    return played


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(answer: Answer) -> dict[str, Any]:
    return {"role": "assistant", "content": answer.message.text}


async def count(chat: Chat) -> float:
    """Two chats, of which the second continues the first."""
    messages = [user("go")]
    first = await chat(messages)
    await chat([*messages, said(first), user("up")])
    return 1.5


def test_a_chat_that_repeats_the_conversation_continues_it() -> None:
    policy = Policy("12", "40", versions=(3, 4))
    played = play(policy, count)
    (context,) = played.contexts
    assert text(context.prompt_ids) == "go" and text(context.ids) == "12$<up>40$"
    assert context.mask == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert context.spans == [(ANSWER, 3, None), (OBSERVATION, 4, None), (ANSWER, 3, 1.5)]
    assert (played.score, played.turns, played.ended, played.response) == (1.5, 2, "done", "40")
    assert [message["content"] for message in played.messages] == ["go", "12", "up", "40"]
    assert [text(ids) for ids, _, _ in policy.asked] == ["go", "go12$<up>"]


def test_messages_that_are_edited_begin_a_conversation_of_their_own() -> None:
    async def edit(chat: Chat) -> float:
        answer = await chat([user("go")])
        await chat([user("go"), said(answer) | {"content": "99"}, user("up")])
        return 1.0

    played = play(Policy("12", "40"), edit, max_contexts=2)
    assert [text(context.prompt_ids) for context in played.contexts] == ["go", "go99$<up>"]
    assert [context.spans for context in played.contexts] == [[(ANSWER, 3, None)], [(ANSWER, 3, 1.0)]]
    assert [message["content"] for message in played.messages] == ["go", "12", "go", "99", "up", "40"]
    assert [message.get("new_context") for message in played.messages] == [None, None, True, None, None, None]
    assert split(played.messages) == [context.messages for context in played.contexts]
    played = play(Policy("12", "40"), edit)
    assert played.ended == "error" and "agent.max_contexts=1; repeat those of the chat before" in str(played.error)


def test_what_an_assistant_says_next_continues_nothing() -> None:
    async def put(chat: Chat) -> float:
        answer = await chat([user("go")])
        await chat([user("go"), said(answer), said(answer), user("up")])
        return 1.0

    played = play(Policy("12", "40"), put, max_contexts=2)
    assert [text(context.prompt_ids) for context in played.contexts] == ["go", "go12$12$<up>"]


def test_the_last_answer_is_of_the_last_context_and_has_the_reward() -> None:
    async def return_to_the_first(chat: Chat) -> ProgramResult:
        first = await chat([user("a")])
        await chat([user("b")])
        await chat([user("a"), said(first), user("c")])
        return ProgramResult(2.0, parts={"acc": 1})

    played = play(Policy("1", "2", "3"), return_to_the_first, max_contexts=2)
    assert [text(context.ids) for context in played.contexts] == ["2$", "1$<c>3$"]
    assert [context.spans[-1][2] for context in played.contexts] == [None, 2.0]
    assert (played.response, played.parts, text(played.prompt_ids)) == ("3", {"acc": 1}, "b")
    assert [[message["content"] for message in talk] for talk in split(played.messages)] == [["b", "2"], [*"a1c3"]]
    spans = [dict(zip(("kind", "tokens"), span, strict=False)) for each in played.contexts for span in each.spans]
    ids = joined(played.contexts, "stop", 0)[0].token_ids.tolist()
    assert text(_last_answer({"response_ids": ids, "spans": spans})) == "3$", "a replay compares it with the response"


@pytest.mark.parametrize(("score", "last"), [(None, 4.0), (9.0, 6.5)])
def test_answers_have_the_rewards_that_the_program_returns_in_the_order_of_its_questions(
    score: float | None, last: float
) -> None:
    async def three(chat: Chat) -> ProgramResult:
        first = await chat([user("a")])
        await chat([user("b")])
        await chat([user("a"), said(first), user("c")])
        return ProgramResult(score, [0.5, 2.0, 4.0])

    played = play(Policy("1", "2", "3"), three, max_contexts=2)
    assert [text(context.ids) for context in played.contexts] == ["2$", "1$<c>3$"]
    rewards = [[reward for kind, _, reward in context.spans if kind == ANSWER] for context in played.contexts]
    assert (rewards, played.score) == ([[2.0], [0.5, last]], score or 6.5), "what they leave of a score is the last's"


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 1.0, 1.0]])
def test_rewards_of_more_or_fewer_answers_are_an_error(rewards: list[float]) -> None:
    async def drive(chat: Chat) -> ProgramResult:
        await count(chat)
        return ProgramResult(1.0, rewards)

    played = play(Policy("12", "40"), drive, reward="function")
    assert (played.ended, played.score) == ("error", 0.0)
    assert f"the program returned {len(rewards)} `rewards`, and the episode has 2 answers" in str(played.error)


def test_chats_at_once_have_numbers_of_their_own_and_contexts() -> None:
    async def both(chat: Chat) -> float:
        answers = await asyncio.gather(chat([user("a")]), chat([user("a")]))
        return float(len({answer.message.text for answer in answers}))

    policy = Slow("1", "2")
    policy.seconds = 0.5
    played = play(policy, both, max_contexts=2)
    assert played.score == 2.0 and [turn for _, _, turn in policy.asked] == [0, 1], "equal seeds give equal answers"
    assert 0.5 <= played.numbers["engine_s"] < 1.0, "seconds in which two answers are made count once"


class Slow(Policy):
    seconds = 0.1

    async def __call__(self, ids: list[int], most: int, turn: int) -> Generation:
        await asyncio.sleep(self.seconds)
        return await super().__call__(ids, most, turn)


def test_a_chat_that_is_cancelled_leaves_no_trace() -> None:
    async def impatient(chat: Chat) -> float:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(chat([user("go")]), 0.01)
        first = await chat([user("go")])
        further = [user("go"), said(first), user("up"), user("!")]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(chat(further), 0.01)
        await chat(further)
        return 1.0

    played = play(Slow("", "", "12", "", "40"), impatient)
    (context,) = played.contexts
    assert text(context.ids) == "12$<up><!>40$" and played.turns == 2
    assert len(context.ids) == len(context.mask) == len(context.log_probs) == sum(n for _, n in context.runs)
    assert [message["content"] for message in played.messages] == ["go", "12", "up", "!", "40"]


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize(("longest", "most", "ended"), [(6, 8, "length"), (1000, 1, "turns")])
def test_an_episode_that_is_over_is_scored(catches: bool, longest: int, most: int, ended: str) -> None:
    async def drive(chat: Chat) -> float:
        try:
            return await count(chat)
        except EpisodeOver:
            if not catches:
                raise
            with pytest.raises(EpisodeOver):
                await chat([user("go")])
            return 0.25

    played = play(Policy("12"), drive, longest=longest, max_turns=most)
    assert (played.ended, played.error, played.score) == (ended, None, 0.25 if catches else 0.0)
    assert text(played.contexts[0].ids) == "12$"


def test_a_later_prompt_that_is_too_long_ends_the_episode_and_the_first_fails_it() -> None:
    async def ask(chat: Chat) -> float:
        await chat([user("go")])
        await chat([user("x" * 21)])
        return 1.0

    played = play(Policy("12"), ask, max_contexts=2)
    assert (played.ended, played.error, played.score) == ("length", None, 0.0)

    async def ask_first(chat: Chat) -> None:
        await chat([user("x" * 21)])

    assert "21 tokens, more than data.max_prompt_length=20" in str(play(Policy(), ask_first).error)


@pytest.mark.parametrize(
    ("returns", "reward", "error"),
    [
        (None, None, "the program returned no reward"),
        (None, "function", None),
        (None, "sum", "the program returned no reward"),
        (EpisodeOver("x"), None, "the episode was not over"),
        (EpisodeFailed("ValueError: boom"), None, "ValueError: boom"),
    ],
)
def test_programs_that_return_no_reward(returns: Any, reward: str | None, error: str | None) -> None:
    async def drive(chat: Chat) -> Any:
        await chat([user("go")])
        if isinstance(returns, Exception):
            raise returns
        return returns

    played = play(Policy("12"), drive, reward=reward)
    assert (error in str(played.error)) if error else (played.error is None)
    assert played.ended == ("error" if error else "done") and text(played.contexts[0].ids) == "12$"


def test_a_program_that_asks_nothing_fails() -> None:
    async def nothing(chat: Chat) -> float:
        return 1.0

    assert "without an answer of the policy" in str(play(Policy(), nothing).error)


@pytest.mark.parametrize("on_timeout", ["error", "score"])
def test_a_program_that_takes_too_long(on_timeout: str) -> None:
    async def hang(chat: Chat) -> None:
        await chat([user("go")])
        await asyncio.sleep(100)

    played = play(Policy("12"), hang, on_timeout=on_timeout, episode_timeout_s=0.05)
    limit = "the episode took longer than 0.05 s (agent.episode_timeout_s) (toy.py, line 3)"
    assert (played.ended, played.error) == ("timeout", limit if on_timeout == "error" else None)
    assert played.turns == 1


def test_calls_of_answers_are_counted_and_have_ids_of_their_own() -> None:
    async def call(chat: Chat) -> float:
        messages, ids = [user("go")], set()
        for _ in range(3):
            answer = await chat(messages, [TOOL])
            calls = answer.message.calls
            ids |= {made.id for made in calls}
            made = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
            messages = [*messages, said(answer) | {"tool_calls": made}, {"role": "tool", "content": "7"}]
        return float(len(ids))

    played = play(Policy("call calc", "call gone", "bad"), call)
    assert played.numbers["calls"] == {"calc": 1}
    assert (played.numbers["unknown"], played.numbers["malformed"], played.score) == (1, 1, 2.0)
    assert text(played.contexts[0].ids) == "call calc$<7>call gone$<7>bad$"


def test_a_tool_that_a_program_offers_in_vain_counts_as_one_without_calls() -> None:
    async def offer(chat: Chat) -> float:
        await chat([user("go")], [TOOL])
        return 1.0

    assert play(Policy("12"), offer).numbers["calls"] == {"calc": 0}


def test_a_conversation_has_the_same_tools_to_its_end() -> None:
    async def change(chat: Chat) -> float:
        answer = await chat([user("go")], [TOOL])
        await chat([user("go"), said(answer), user("up")])
        return 1.0

    assert "agent.max_contexts=1" in str(play(Policy("1", "2"), change).error)


def test_a_stop_text_may_not_cut_a_call() -> None:
    async def ask(chat: Chat) -> float:
        await chat([user("go")])
        await chat([user("on")], [TOOL])
        return 1.0

    policy = Policy("1", "2")
    played = play(policy, ask, stop=("end",), max_contexts=2)
    assert "sampling_params.stop is ['end'] where the policy is shown tools" in str(played.error)
    assert len(policy.asked) == 1, "answers without tools may have stop texts"
    assert play(Policy("1", "2"), ask, max_contexts=2).error is None


def test_an_answer_may_be_asked_for_in_fewer_tokens() -> None:
    async def ask(chat: Chat) -> float:
        answer = await chat([user("go")], None, 2)
        assert answer.message.truncated and not answer.full
        assert (answer.prompt_tokens, answer.tokens) == (2, 2)
        return 1.0

    assert text(play(Policy("12345"), ask).contexts[0].ids) == "12"


def test_an_engine_that_dies_is_no_failure_of_the_program() -> None:
    async def dead(ids: list[int], most: int, turn: int) -> Generation:
        raise ConnectionError("dead")

    with pytest.raises(ConnectionError):
        play(dead, count)


def test_the_longest_conversation_is_continued() -> None:
    async def ask(ids: list[int], most: int, turn: int) -> Generation:
        return await Policy("1", "1", "1")(ids, most, turn)

    async def main() -> list[int]:
        section = AgentConfig(program="toy:run", max_contexts=2)
        chat_format = ChatFormat(section, ToyBridge(), ToyReader(), [], 90, 99)  # type: ignore[arg-type]
        conversation = Conversation(chat_format, ask, 99)
        one = {"role": "assistant", "content": "1"}
        await conversation.chat([user("a")])
        await conversation.chat([user("a"), one, user("b"), one, user("c")])
        await conversation.chat([user("a"), one, user("b"), one, user("c"), one, user("d")])
        return [len(context.spans) for context in conversation.contexts]

    assert asyncio.run(main()) == [1, 3]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "a list of at least one message"),
        ([], "a list of at least one message"),
        (["x"], "messages[0] is a str"),
        ([{"content": "x"}], "messages[0] has the role None"),
        ([user("x") | {"content": 5}], "messages[0]: `content` must be a text"),
        ([user("x") | {"content": [{"type": "image_url"}]}], "messages[0]: `content` must be a text"),
        ([user("x") | {"weight": 1}], "messages[0] has 'weight'"),
        ([user("x"), {"role": "assistant", "content": "y"}], "the last of the messages is the policy's own"),
        ([{"role": "assistant", "tool_calls": [DEEP_CALL]}, user("x")], "of few levels"),
        ([{"role": "assistant", "tool_calls": [1]}, user("x")], "messages[0] has tool_calls that are not a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, user("x")],
            "an object",
        ),
    ],
)
def test_messages_that_are_none(messages: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        checked_messages(messages)
    assert words in str(refused.value)


def test_messages_in_openais_forms() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "content": parts, "tool_call_id": "c"},
    ]
    assert checked_messages(given) == [
        {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "ab", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    "tools",
    [5, [5], json.loads(DEEP), [{"type": "x"}], [{"type": "function", "function": {}}], [TOOL, TOOL]],
)
def test_tools_that_are_none(tools: Any) -> None:
    with pytest.raises(ValueError, match="^tools"):
        checked_tools(tools)


def test_what_a_program_raises_is_cut() -> None:
    async def over(chat: Chat) -> float:
        await chat([user("go")])
        raise EpisodeOver("x" * 5_000_000)

    played = play(Policy("12"), over)
    assert played.error is not None and len(played.error) <= MAX_REASON
    assert played.error.startswith("EpisodeOver: xxx") and played.error.endswith("the episode was not over")
