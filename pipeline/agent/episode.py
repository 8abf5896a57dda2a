"""One episode: the policy answers, the world replies, until the episode ends."""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.agent.conversation import Ask, Conversation
from pipeline.agent.driven import Program, drive
from pipeline.agent.errors import EpisodeFailed, EpisodeLost
from pipeline.agent.inside.forms import joined
from pipeline.agent.tokens.context import Context
from pipeline.agent.tokens.language import Language
from pipeline.agent.world import Played, World
from pipeline.config.agent import AgentConfig

Opened = tuple[Played | None, World] | tuple[Program, None]
"""The process of an episode, None for a single answer; and its world, None if a program drives it."""


@dataclass
class Episode:
    """The result of an episode."""

    contexts: list[Context]
    messages: list[dict[str, Any]]
    """The conversation, the prompt included; conversations of a program as `forms.joined` joins them."""
    finish_reason: str = "abort"
    """Finish reason of the last answer, from the engine."""
    response: str = ""
    """Text of the last answer."""
    turns: int = 0
    ended: str = "error"
    """The end of the episode, as in the column `ended`."""
    error: str | None = None
    """The error of an episode that failed."""
    lost: bool = False
    """True if the episode failed with its zygote or its host, so that it may begin again."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Further numbers of the environment."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The column `episode`."""

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the first context's prompt; empty if the episode failed before it."""
        return self.contexts[0].prompt_ids if self.contexts else []

    @property
    def score(self) -> float:
        """Sum of the answers' rewards; 0 for an episode that failed."""
        if self.error is not None:
            return 0.0
        return float(sum(reward or 0.0 for context in self.contexts for _, _, reward in context.spans))

    @staticmethod
    def to_json(value: Any) -> str:
        """Write the value of a column as JSON in valid UTF-8, even if the model wrote lone surrogates."""
        return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


async def run(
    row: dict[str, Any],
    opened: Awaitable[Opened],
    language: Language,
    ask: Ask,
    longest: int,
    stop: Sequence[str] = (),
    spent_s: float = 0.0,
) -> Episode:
    """Run one episode to its end; if it fails, the result has an `error`.

    Args:
        row: `prompt`, `data_source`, `ground_truth` and `extra_info`.
        opened: the process of the episode, and its world; see `Opened`.
        language: language of the engine.
        ask: the policy.
        longest: most tokens after the prompt, by the row's settings.
        stop: texts that end an answer.
        spent_s: seconds that the episode took before it began again.
    """
    config: AgentConfig = language.config
    began = time.monotonic() - spent_s
    conversation = Conversation(language, ask, min(longest, language.max_response_length), stop)
    episode = Episode(conversation.contexts, list(row["prompt"]))
    session: Played | Program | None = None
    world: World | None = None
    well = False
    try:
        async with asyncio.timeout(config.episode_timeout_s - spent_s):
            begun = await opened
            session = begun[0]
            if begun[1] is None:
                episode.ended, episode.parts = await drive(conversation, begun[0], row)
            else:
                world = begun[1]
                episode.ended = await _turns(episode, conversation, row, begun[0], world)
        well = True
    except EpisodeFailed as failed:
        episode.ended, episode.error, episode.lost = "error", str(failed), isinstance(failed, EpisodeLost)
    except TimeoutError:
        episode.ended = "timeout"
        if config.on_timeout == "error":
            limit = f"{config.episode_timeout_s:g} s (agent.episode_timeout_s)"
            place = await session.place() if session is not None and world is None else ""
            episode.error = str(EpisodeFailed(f"the episode took longer than {limit}{place}"))
    finally:
        if session is not None:
            await session.close(well)
    seconds = time.monotonic() - began
    episode.turns = conversation.turns
    last = max(conversation.contexts, key=lambda context: context.turn, default=None)
    if last is not None:
        episode.finish_reason, episode.response = last.finish_reason, last.text
    if world is None:
        # The last answer of the row is the answer to the last request.
        conversation.contexts.sort(key=lambda context: context.turn)
        if conversation.contexts:
            episode.messages = joined([context.messages for context in conversation.contexts])
    calls, mistakes = conversation.calls, conversation.mistakes
    if world is not None:
        episode.parts = world.parts
        calls, mistakes = world.calls, world.mistakes
    episode.numbers = {
        **{name: mistakes[name] for name in ("malformed", "unknown", "tool_errors")},
        "calls": dict(calls),
        "cut_observations": conversation.cut_observations,
        "episode_s": round(seconds, 4),
        "engine_s": round(conversation.engine_s, 4),
        "env_s": round(seconds - conversation.engine_s, 4),
    }
    return episode


async def _turns(
    episode: Episode, conversation: Conversation, row: dict[str, Any], session: Played | None, world: World
) -> str:
    """Take turns until the episode ends; returns its end, as in the column `ended`."""
    first = (session.opened if session is not None else None) or []
    if isinstance(first, str):
        # Many templates write a message of role `tool` only after a call.
        first = [{"role": "user", "content": first}]
    context = conversation.begin([*row["prompt"], *first])
    episode.messages = context.messages
    while True:
        answer = await conversation.answer(context)
        last = answer.full or conversation.turns == world.config.max_turns
        reply = await world.reply(answer.message, answer.malformed, last)
        context.set_reward(reply.reward, reply.trains)
        ended = reply.ended or ("length" if answer.full else "turns" if last else "")
        following = None if ended else conversation.observe(context, reply.messages)
        if following is None:
            # The last reply is for readers of the record; the policy does not read it.
            episode.messages = context.messages + ([conversation.cut(m) for m in reply.messages] if ended else [])
            return ended or "length"
        context = following
        episode.messages = context.messages
