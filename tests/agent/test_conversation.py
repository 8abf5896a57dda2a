"""Conversations in a template family's own tokens, with a scripted policy: what was sampled is never encoded again."""

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from pipeline.agent import Message, Observation, episode
from pipeline.agent.conversation import Conversation
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.calls import AnswerParser
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.agent.tokens.context import Context, joined
from pipeline.agent.turns import TurnsPlayer
from pipeline.config.agent import AgentConfig
from pipeline.generation import Generation
from pipeline.rows import UNROUTED
from tests.agent.families import FAMILIES, plain, tokenizer
from tests.agent.test_episode import ROW, ToySession
from tests.bounds import bounded

UP = {"role": "user", "content": "up"}


def ambiguous(name: str) -> list[int]:
    """Two tokens whose text is encoded as two others."""
    backend = plain(name)
    for pair in itertools.product(range(backend.get_vocab_size()), repeat=2):
        text = backend.decode(list(pair))
        if text.isalpha() and len(again := backend.encode(text).ids) == 2 and again != list(pair):
            return list(pair)
    raise AssertionError(f"every pair of tokens of {name} is the encoding of its text")


class Sampler:
    """A policy that answers with the same tokens each time; `asked` has what it was asked."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self.asked = answer, list[list[int]]()

    async def __call__(self, ids: list[int], most: int, turn: int) -> Generation:
        self.asked.append(list(ids))
        count = len(self._answer)
        ids32 = np.array(self._answer, np.int32)
        return Generation(ids32, np.full(count, -1.0, np.float32), "stop", ((0, count),))


def chat_format(name: str, **config: Any) -> ChatFormat:
    section = AgentConfig(environment="toy:Toy", **config)
    bridge = Bridge.prove(tokenizer(name), {}, {"user"}, [])
    return ChatFormat(section, bridge, AnswerParser(tokenizer(name), [], bridge), [], 1000, 1000)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "cut"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_prompt_holds_the_tokens_that_were_sampled(name: str, closed: bool) -> None:
    """Their text has another encoding of the same length, which nothing but the tokens themselves tells apart."""
    made = chat_format(name)
    closing = made.bridge.tokens.ids[made.bridge.continuations["user"].closing]
    sampled = ambiguous(name) + [closing] * closed
    policy, session = Sampler(sampled), ToySession([Observation("up"), Observation(done=True)])

    async def opened() -> Any:
        return TurnsPlayer(made.config, session, {}, True)  # type: ignore[arg-type]

    played = asyncio.run(episode.run(ROW, opened(), made, policy, 1000))
    first = made.bridge.prompt(ROW["prompt"])
    between = made.bridge.after(sampled, [UP])
    assert played.error is None and policy.asked == [first, first + sampled + between]
    (context,) = played.contexts
    assert context.ids == joined(played.contexts, "stop", 0)[0].token_ids.tolist() == sampled + between + sampled
    assert tokenizer(name).encode(made.bridge.text(sampled), add_special_tokens=False) != sampled


@pytest.mark.parametrize("context", ["keep", "rerender"])
def test_a_chat_that_goes_on_has_the_tokens_that_were_sampled(context: str) -> None:
    made = chat_format("chatml", context=context, max_contexts=2)
    sampled = [*ambiguous("chatml"), made.bridge.tokens.ids["<|im_end|>"]]

    async def chat() -> Conversation:
        conversation = Conversation(made, policy, 1000)
        answer = await conversation.chat(ROW["prompt"])
        await conversation.chat([*ROW["prompt"], {"role": "assistant", "content": answer.message.text}, UP])
        return conversation

    policy = Sampler(sampled)
    (only,) = asyncio.run(chat()).contexts
    between = made.bridge.after(sampled, [UP])
    assert only.ids == sampled + between + sampled
    assert policy.asked[1] == only.prompt_ids + sampled + between


def test_the_experts_of_a_token_are_those_of_the_turn_that_passed_it_first() -> None:
    """A prefix that passes again for a later turn may get other experts; a context ends with tokens that never pass."""
    width = 4

    def generation(tokens: int, before: int, value: int) -> Generation:
        routes = np.full((before + tokens, width), value, np.int16)
        routes[-1] = UNROUTED
        ids = np.arange(tokens, dtype=np.int32)
        return Generation(ids, np.zeros(tokens, np.float32), "stop", ((0, tokens),), None, routes)

    context = Context([7, 7, 7], [])
    context.add_answer(generation(2, 3, 1))
    context.add_observation([5, 5])
    context.add_answer(generation(3, 7, 2))
    context.add_observation([6])
    other = Context([8], [])
    made, _ = joined([context, other], "stop", 0)
    assert made.routes is not None and made.routes.dtype == np.int16
    first = [1] * 4 + [2] * 5 + [UNROUTED] * 2  # the end of the first turn has passed in the second one
    assert made.routes.tolist() == [[value] * width for value in first], "a context without a turn is not in the row"
    assert joined([other], "stop", 0)[0].routes is None


def test_an_answer_is_not_continued() -> None:
    conversation = Conversation(chat_format("chatml"), Sampler([1]), 100)
    with pytest.raises(EpisodeFailed, match="begins end with the assistant's, and an answer of an episode cannot be"):
        conversation.begin([*ROW["prompt"], {"role": "assistant", "content": "So"}])


def test_texts_that_do_not_fit_are_not_encoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chat_format("chatml")
    encoded = list[int]()
    ordinary = type(made.bridge.tokens).ordinary

    def watched(self: Any, text: str) -> list[int]:
        encoded.append(len(text))
        return ordinary(self, text)

    monkeypatch.setattr(type(made.bridge.tokens), "ordinary", watched)
    monkeypatch.setattr(made.bridge, "prompt", lambda *_: pytest.fail("it is encoded as a whole"))
    conversation, long = Conversation(made, Sampler([1]), 1000), "b " * 60_000
    for messages in (
        [{"role": "user", "content": "ab " * 40_000}],
        [{"role": "user", "content": "12 " * 100, "name": "x"}] * 900,
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": long}}}]}],
        [{"role": "user", "content": "x"}] * 4000,
    ):
        with pytest.raises(EpisodeFailed, match="more than data.max_prompt_length=1000"):
            conversation.begin(messages)
    assert sum(encoded) < 100_000


def test_observations_of_many_messages_are_not_encoded() -> None:
    made = chat_format("chatml", max_observation_tokens=1024)

    async def play() -> Any:
        conversation = Conversation(made, Sampler([*ambiguous("chatml")]), 500)
        context = conversation.begin(ROW["prompt"])
        await conversation.answer(context)
        with bounded():
            return conversation.observe(context, [{"role": "user", "content": "12 " * 300}] * 400)

    assert asyncio.run(play()) is None


def test_a_long_answer_is_read_beside_the_event_loop() -> None:
    made = chat_format("chatml")
    threads = []

    def read(ids: list[int], truncated: bool) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return Message("", truncated=truncated), None

    made.reader.read = read  # type: ignore[method-assign]

    async def play(count: int) -> None:
        conversation = Conversation(made, Sampler([*ambiguous("chatml")] * count), 1_000_000)
        answer = await conversation.answer(conversation.begin(ROW["prompt"]))
        assert answer.tokens == 2 * count and conversation.turns == 1

    asyncio.run(play(10))
    asyncio.run(play(1000))
    assert threads == [True, False]
