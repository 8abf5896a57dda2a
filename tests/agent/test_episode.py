"""Episodes with a toy chat format, a scripted policy and a scripted world: a token is a byte."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.agent import Call, Message, Observation, episode
from pipeline.agent.conversation import TOKEN, Ask, ChatFormat
from pipeline.agent.episode import Episode
from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.tokens.context import joined
from pipeline.agent.turns import TurnsPlayer
from pipeline.config.agent import AgentConfig
from pipeline.generation import Generation
from pipeline.rows import ANSWER, OBSERVATION

END = 0
"""The token that ends an answer."""
MESSAGE = {"role": "user", "content": ""}
ROW = {"prompt": [{"role": "user", "content": "go"}], "data_source": "toy", "ground_truth": 1, "extra_info": {}}


class ToyBridge:
    """In a prompt, what stands before `#` in earlier answers is left out."""

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        ids = list("|".join(message["content"] for message in messages[:first]).encode())
        for message in messages[first:]:
            answer = message["role"] == "assistant"
            ids += [*message["content"].split("#")[-1].encode(), END] if answer else self.after([END], [message])
        return ids

    def after(self, sampled: list[int], messages: list[dict[str, Any]], calls: Sequence[Call] = ()) -> list[int]:
        if any(message["role"] == "system" for message in messages):
            raise ValueError("the template has no system message here")
        closing = [] if sampled[-1:] == [END] else [END]
        return closing + list("".join(f"<{message['content']}>" for message in messages).encode())

    def content_ids(self, text: str) -> list[int]:
        return list(text.encode())

    def text(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="ignore")


class ToyReader:
    """`call NAME` is a call, and `bad` a call that cannot be read."""

    def read(self, ids: list[int], truncated: bool) -> tuple[Message, str | None]:
        text = bytes(token for token in ids if token != END).decode(errors="replace")
        calls = [Call("call_0", text.split()[1], {"x": 1})] if text.startswith("call ") else []
        return Message(text, "", calls, truncated), "it is bad" if text == "bad" else None


class ToySession:
    """Replies with what the script says; an exception in it is raised."""

    def __init__(self, replies: Sequence[Any] = (), opened: Any = None) -> None:
        self.opened, self.opened_images = opened, list[str]()
        self._replies, self.heard = list(replies), []
        self.closed: list[bool] = []
        """Whether the episode had come to its end, each time that it was closed."""

    async def step(self, message: Message, timeout_s: float) -> Observation:
        self.heard.append(message)
        return await self._next()

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        self.heard.append((name, arguments, timeout_s))
        return await self._next()

    async def _next(self) -> Any:
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, float):
            await asyncio.sleep(reply)
        return reply

    async def close(self, well: bool = False) -> None:
        self.closed.append(well)


class Policy:
    """Answers with the texts of a script, cut to the tokens that are allowed; `asked` has what it was asked."""

    def __init__(self, *texts: str, versions: Sequence[int] = ()) -> None:
        self._texts, self._versions = list(texts), list(versions)
        self.asked: list[tuple[list[int], int, int]] = []

    async def __call__(self, ids: list[int], most: int, turn: int) -> Generation:
        self.asked.append((ids, most, turn))
        version = self._versions[turn] if self._versions else 3
        tokens = [*self._texts[turn].encode(), END][:most]
        cut = tokens[-1] != END
        log_probs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        ids32 = np.array(tokens, np.int32)
        return Generation(ids32, log_probs, "length" if cut else "stop", ((version, len(tokens)),))


def play(
    policy: Ask,
    session: ToySession,
    environment: bool = True,
    tools: dict[str, float | None] | None = None,
    longest: int = 1000,
    opened: Callable[[], Any] | None = None,
    **config: Any,
) -> Episode:
    section = AgentConfig(environment="toy:Toy" if environment else None, **config)
    chat_format = ChatFormat(section, ToyBridge(), ToyReader(), [], 20, longest)  # type: ignore[arg-type]

    async def open_world() -> TurnsPlayer:
        if opened is not None:
            opened()
        return TurnsPlayer(section, session, tools or {}, environment)  # type: ignore[arg-type]

    return asyncio.run(episode.run(ROW, open_world(), chat_format, policy, longest))


def text(ids: list[int]) -> str:
    return bytes(ids).decode().replace("\0", "$")


def test_an_episode_is_answers_and_observations_one_behind_the_other() -> None:
    session = ToySession([Observation("up", reward=0.5), Observation(done=True, reward=1.0, parts={"acc": 1})])
    policy = Policy("12", "40", versions=(3, 4))
    played = play(policy, session)
    (context,) = played.contexts
    assert text(context.prompt_ids) == "go"
    assert text(context.ids) == "12$<up>40$"
    assert context.mask == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert context.log_probs == [-1, -2, -3, 0, 0, 0, 0, -1, -2, -3]
    assert context.runs == [(3, 7), (4, 3)], "an observation has the version of the answer before it"
    assert context.spans == [(ANSWER, 3, 0.5), (OBSERVATION, 4, None), (ANSWER, 3, 1.0)]
    assert (played.score, played.parts, played.turns, played.ended) == (1.5, {"acc": 1}, 2, "done")
    assert played.response == "40" and played.error is None and session.closed == [True]
    assert [message["content"] for message in played.messages] == ["go", "12", "up", "40"]
    # The policy is asked with all tokens so far.
    assert [text(ids) for ids, _, _ in policy.asked] == ["go", "go12$<up>"]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_first_message_of_the_environment_is_a_users_and_stands_in_the_prompt(role: str) -> None:
    session = ToySession([Observation("up"), Observation(done=True)], opened="guess")
    played = play(Policy("1", "2"), session, observation_role=role)
    assert text(played.prompt_ids) == "go|guess"
    assert [message["role"] for message in played.messages] == ["user", "user", "assistant", role, "assistant"]


def test_a_prompt_that_is_too_long_is_an_error_of_the_row() -> None:
    played = play(Policy("1"), ToySession(opened="x" * 30))
    assert played.ended == "error" and "33 tokens, more than data.max_prompt_length=20" in str(played.error)
    assert played.turns == 0 and joined(played.contexts, "abort", 7)[0].version_runs == ((7, 0),)


def test_the_environment_hears_the_last_answer_before_turns_run_out() -> None:
    session = ToySession([Observation("a"), Observation("b", reward=0.25)])
    played = play(Policy("1", "2", "3"), session, max_turns=2)
    assert (played.ended, played.turns, played.score) == ("turns", 2, 0.25)
    assert text(played.contexts[0].ids) == "1$<a>2$", "nobody predicts from the last observation"
    assert played.messages[-1]["content"] == "b", "people read it"


def test_an_answer_that_is_cut_gets_its_end_as_an_observation() -> None:
    policy = Policy("12345", "6")
    played = play(policy, ToySession([Observation("a"), Observation(done=True)]), max_turn_tokens=3)
    assert text(played.contexts[0].ids) == "123$<a>6$"
    assert played.contexts[0].mask[:4] == [1, 1, 1, 0]
    assert [most for _, most, _ in policy.asked] == [3, 3]


def test_no_observation_is_added_behind_which_nothing_fits() -> None:
    session = ToySession([Observation("abc", reward=1.0)])
    played = play(Policy("1"), session, longest=7)
    assert text(played.contexts[0].ids) == "1$" and (played.ended, played.score) == ("length", 1.0)
    played = play(Policy("1", "2345"), ToySession([Observation("abc"), Observation("x", reward=2.0)]), longest=8)
    assert text(played.contexts[0].ids) == "1$<abc>2", "one token fits"
    assert (played.ended, played.score) == ("length", 2.0)
    assert joined(played.contexts, played.finish_reason, 0)[0].finish_reason == "length"


def test_a_long_observation_is_cut_in_the_middle_and_says_so() -> None:
    played = play(
        Policy("1", "2"), ToySession([Observation("x" * 500), Observation(done=True)]), max_observation_tokens=70
    )
    shown = played.messages[2]["content"]
    assert len(shown) == 70 and "[... 465 tokens are left out ...]" in shown
    assert shown.count("x") == 500 - 465
    assert played.numbers["cut_observations"] == 1


def test_texts_that_cannot_fit_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take half a minute for the longest, in which all other episodes of the engine stand still."""
    encoded: list[int] = []

    def content_ids(bridge: ToyBridge, text: str) -> list[int]:
        encoded.append(len(text))
        return list(text.encode())

    monkeypatch.setattr(ToyBridge, "content_ids", content_ids)
    long = Observation("a" * 5_000_000 + "b" * 5_000_000)
    last = Observation("c" * 10_000_000, done=True)
    played = play(Policy("1", "2"), ToySession([long, last]), max_observation_tokens=100)
    assert max(encoded) == 100 * TOKEN
    shown, mark = played.messages[2]["content"], "\n[... more than 12747 tokens are left out ...]\n"
    assert shown == "a" * 27 + mark + "b" * 26 and len(shown) == 100
    assert len(played.messages[-1]["content"]) == 100, "people read it, too"
    assert (played.ended, played.error, played.numbers["cut_observations"]) == ("done", None, 1)

    few = TOKEN * 20
    for opened, words in (("x" * few, f"{few + 2:,} characters"), ([MESSAGE] * 20, "21 messages")):
        with monkeypatch.context() as patched:
            patched.setattr(ToyBridge, "prompt", None)
            failed = play(Policy(), ToySession(opened=opened))
        assert f"{words}, more than data.max_prompt_length=20" in str(failed.error)


def test_more_messages_than_tokens_that_are_left_end_the_episode() -> None:
    played = play(Policy("1"), ToySession([Observation([MESSAGE] * 100_000, reward=1.0)]), longest=50)
    assert (played.ended, played.score, len(played.messages)) == ("length", 1.0, 2)


@pytest.mark.parametrize("most", [8, 9, 30, 60])
def test_at_least_half_of_a_short_observation_is_its_content(most: int) -> None:
    session = ToySession([Observation("ab" * 50), Observation(done=True)])
    played = play(Policy("1", "2"), session, max_observation_tokens=most)
    shown = played.messages[2]["content"]
    assert len(shown) == most and len(shown.replace("...", "")) == most - 3
    assert shown.startswith("ab") and shown.endswith("b")


def test_where_the_template_rewrites_an_answer_a_new_context_begins() -> None:
    replies = [Observation("a", reward=1.0), Observation("b", reward=2.0), Observation(done=True, reward=4.0)]
    played = play(Policy("12", "x#34", "5"), ToySession(replies), context="rerender")
    first, second = played.contexts
    assert text(first.prompt_ids + first.ids) == "go12$<a>x#34$", "as long as nothing differs, it is one sequence"
    assert text(second.prompt_ids) == "go12$<a>34$<b>" and text(second.ids) == "5$"
    assert played.prompt_ids == first.prompt_ids and played.score == 7.0
    generation, mask = joined(played.contexts, "stop", 0)
    assert text(generation.token_ids.tolist()) == "12$<a>x#34$5$" and mask.sum() == 10
    assert [message["content"] for message in played.messages] == ["go", "12", "a", "x#34", "b", "5"]
    kept = play(Policy("12", "x#34", "5"), ToySession(replies))
    assert [text(context.ids) for context in kept.contexts] == ["12$<a>x#34$<b>5$"]


def test_a_rewritten_conversation_is_no_longer_than_one_that_is_kept() -> None:
    replies = [Observation("a" * 9), Observation("b" * 9), Observation("c")]
    played = play(Policy("x#1", "x#2", "x#3"), ToySession(replies), context="rerender", longest=4)
    prompts = [len(context.prompt_ids) for context in played.contexts]
    assert prompts == [2, 15] and played.ended == "length"
    assert max(len(context.prompt_ids + context.ids) for context in played.contexts) <= 20 + 4


def test_calls_go_to_tools_and_an_answer_without_calls_ends_the_episode() -> None:
    session = ToySession(["42", PolicyMistake("x is too large")])
    played = play(Policy("call calc", "call calc", "call gone", "42"), session, False, {"calc": 2.0, "other": None})
    results = [message["content"] for message in played.messages if message["role"] == "tool"]
    assert results == ["42", "Error: x is too large", "Error: there is no tool 'gone'; the tools are calc, other."]
    assert session.heard == [("calc", {"x": 1}, 2.0)] * 2
    assert (played.ended, played.turns, played.response) == ("stop", 4, "42")
    assert played.numbers["calls"] == {"calc": 2, "other": 0}
    assert (played.numbers["unknown"], played.numbers["tool_errors"]) == (1, 1)
    assert played.messages[1]["calls"] == [{"name": "calc", "arguments": {"x": 1}}]


def test_calls_of_the_last_answer_are_not_made() -> None:
    session = ToySession(["42"])
    played = play(Policy("call calc", "call calc"), session, False, {"calc": None}, max_turns=2)
    assert (played.ended, len(session.heard)) == ("turns", 1)


@pytest.mark.parametrize(
    ("on_malformed", "ended", "turns", "mask"),
    [("retry", "stop", 2, 4), ("end", "malformed", 1, 4), ("mask", "stop", 2, 0)],
)
def test_a_call_that_cannot_be_read(on_malformed: str, ended: str, turns: int, mask: int) -> None:
    played = play(Policy("bad", "ok"), ToySession(), False, {"calc": None}, on_malformed=on_malformed)
    assert (played.ended, played.turns, sum(played.contexts[0].mask[:4])) == (ended, turns, mask)
    assert played.error is None and played.numbers["malformed"] == 1
    told = [message["content"] for message in played.messages[1:] if message["role"] == "user"]
    assert told == ["Error: it is bad"] * (turns - 1)


def test_tools_and_an_environment() -> None:
    session = ToySession(["42", Observation(done=True, reward=1.0)])
    played = play(Policy("call calc", "42"), session, True, {"calc": None})
    assert text(played.contexts[0].ids) == "call calc$<42>42$" and played.score == 1.0


def test_a_failing_environment_is_an_error_and_keeps_what_was_sampled() -> None:
    session = ToySession([Observation("a", reward=0.5), EpisodeFailed("ValueError: boom (game.py, line 3)")])
    played = play(Policy("1", "2"), session)
    assert (played.ended, played.error, played.score) == ("error", "ValueError: boom (game.py, line 3)", 0.0)
    assert text(played.contexts[0].ids) == "1$<a>2$" and session.closed == [False]


def test_an_observation_must_hold_something_or_end_the_episode() -> None:
    assert "without content" in str(play(Policy("1"), ToySession([Observation()])).error)


def test_a_world_that_does_not_open_is_an_error() -> None:
    def fail() -> None:
        raise EpisodeFailed("no process")

    assert play(Policy(), ToySession(), opened=fail).error == "no process"


def test_a_message_that_the_template_refuses_is_an_error() -> None:
    played = play(Policy("1"), ToySession([Observation([{"role": "system", "content": "x"}])]))
    assert played.error == "the template has no system message here"


@pytest.mark.parametrize(("on_timeout", "error"), [("error", True), ("score", False)])
def test_an_episode_that_takes_too_long(on_timeout: str, error: bool) -> None:
    session = ToySession([Observation("a", reward=0.5), 5.0])
    played = play(Policy("1", "2"), session, episode_timeout_s=0.1, on_timeout=on_timeout)
    assert played.ended == "timeout" and session.closed == [False]
    assert (played.score, played.error is not None) == ((0.0, True) if error else (0.5, False))


def test_an_engine_that_dies_is_no_failure_of_the_environment() -> None:
    async def dead(ids: list[int], most: int, turn: int) -> Generation:
        raise ConnectionError("dead")

    session = ToySession()
    with pytest.raises(ConnectionError):
        play(dead, session)
    assert session.closed == [False]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.text("0123456789", max_size=6), st.text("ab", max_size=6)), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_the_prompt_of_a_turn_is_everything_before_it(turns: list[tuple[str, str]], longest: int) -> None:
    policy = Policy(*(answer for answer, _ in turns), "")
    played = play(
        policy, ToySession([Observation(seen) for _, seen in turns] + [Observation(done=True)]), longest=longest
    )
    (context,) = played.contexts
    places = np.cumsum([0, *(tokens for _, tokens, _ in context.spans)])
    starts = [int(places[i]) for i, (kind, _, _) in enumerate(context.spans) if kind == ANSWER]
    assert [ids for ids, _, _ in policy.asked] == [context.prompt_ids + context.ids[:start] for start in starts]
    assert len(context.ids) <= longest
    assert len(context.ids) == len(context.mask) == len(context.log_probs) == places[-1]
    assert len(context.ids) == sum(tokens for _, tokens in context.runs)
    for start, (kind, tokens, _) in zip(places, context.spans, strict=False):
        assert context.mask[start : start + tokens] == [kind] * tokens


def test_parts_of_all_observations_have_one_bound() -> None:
    replies = [Observation("up", parts={f"part {turn}": "x" * 30_000}) for turn in range(5)]
    played = play(Policy(*"12345"), ToySession(replies), max_turns=5)
    assert played.error == "the observations of the episode have parts of more than 100,000 bytes as JSON"
    assert played.turns == 4 and played.score == 0
