"""One episode: the policy and its player take turns until the end or a deadline; the result is recorded for the row.

The steps of an episode:

    rollout/episodes.py    starts one coroutine for each sample of a chunk of prompts
    rollout/agents.py      `Agent.open` forks the process of the episode, in which the user's code runs (`inside/`)
    episode.py             `run` sets the deadline, starts the player, and makes the record, an `Episode`
      player.py            `Player`: an episode goes in turns, or a program drives it
        turns.py           the policy generates a turn, environment or tools reply, the policy generates again
        program.py         the user's program requests turns: by `chat`, or by a client at the `endpoint/`
      conversation.py      keeps the contexts: each turn of the policy continues the tokens before it
        tokens/bridge.py   gives the tokens between two turns, by the model's own chat template
        the engine (`Ask`) samples the turn
        tokens/calls.py    parses text, reasoning and tool calls of the turn
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.agent.conversation import Ask, Conversation
from pipeline.agent.errors import EpisodeFailed, EpisodeLost
from pipeline.agent.player import Player
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.agent.tokens.context import Context
from pipeline.agent.tokens.pictures import Pictures
from pipeline.config.agent import AgentConfig


@dataclass
class Episode:
    """The result of an episode: token contexts, conversation, rewards, and how the episode ended."""

    contexts: list[Context]
    messages: list[dict[str, Any]]
    """The conversation, the prompt included. If a program had several conversations, `forms.joined` joins them."""
    finish_reason: str = "abort"
    """Finish reason of the last turn, from the engine."""
    response: str = ""
    """Text of the last turn."""
    turns: int = 0
    ended: str = "error"
    """How the episode ended; a value of the column `ended`."""
    error: str | None = None
    """Error message if the episode failed, else None."""
    lost: bool = False
    """True if the episode failed because its zygote or its host ended, so that the episode may begin again."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Further values that the environment or program reported, by name."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The contents of the column `episode`: counts and seconds, by name."""

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the first context's prompt; empty if the episode failed before there was one."""
        return self.contexts[0].prompt_ids if self.contexts else []

    @property
    def score(self) -> float:
        """Sum of the rewards of all turns; 0 for an episode that failed."""
        if self.error is not None:
            return 0.0
        return float(sum(reward or 0.0 for context in self.contexts for _, _, reward in context.spans))

    @staticmethod
    def to_json(value: Any) -> str:
        """Encode the value of a column as JSON in valid UTF-8, even if the model wrote lone surrogates."""
        return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


async def run(
    row: dict[str, Any],
    opened: Awaitable[Player],
    chat_format: ChatFormat,
    ask: Ask,
    longest: int,
    stop: Sequence[str] = (),
    spent_s: float = 0.0,
    pictures: Pictures | None = None,
) -> Episode:
    """Run one episode to its end; if it fails, the result has an `error`.

    Args:
        row: `prompt`, `data_source`, `ground_truth` and `extra_info`.
        opened: starts the process of the episode, and returns its player.
        chat_format: chat format of the engine.
        ask: the policy.
        longest: maximum number of tokens after the prompt, by the row's settings.
        stop: texts that end a turn.
        spent_s: seconds that earlier attempts at the episode took, which count toward its deadline.
        pictures: images of the prompt, and their processor; None in a run without images.
    """
    config: AgentConfig = chat_format.config
    began = time.monotonic() - spent_s
    conversation = Conversation(chat_format, ask, min(longest, chat_format.max_response_length), stop, pictures)
    player: Player | None = None
    well, ended, error = False, "error", None
    try:
        async with asyncio.timeout(config.episode_timeout_s - spent_s):
            player = await opened
            ended = await player.play(conversation, row)
        well = True
    except EpisodeFailed as failed:
        error = failed
    except TimeoutError:
        ended = "timeout"
        if config.on_timeout == "error":
            limit = f"{config.episode_timeout_s:g} s (agent.episode_timeout_s)"
            place = await player.place() if player is not None else ""
            error = EpisodeFailed(f"the episode took longer than {limit}{place}")
    finally:
        if player is not None:
            await player.close(well)
    return _record(row, conversation, player, ended, error, time.monotonic() - began)


def _record(
    row: dict[str, Any],
    conversation: Conversation,
    player: Player | None,
    ended: str,
    error: EpisodeFailed | None,
    seconds: float,
) -> Episode:
    """Make the result of an episode. `player` is None if the process of the episode has not begun."""
    episode = Episode(
        conversation.contexts,
        player.messages if player is not None and player.messages else list(row["prompt"]),
        turns=conversation.turns,
        ended=ended,
        error=None if error is None else str(error),
        lost=isinstance(error, EpisodeLost),
        parts={} if player is None else player.parts,
    )
    last = max(conversation.contexts, key=lambda context: context.turn, default=None)
    if last is not None:
        episode.finish_reason, episode.response = last.finish_reason, last.text
    episode.numbers = {
        **{name: conversation.mistakes[name] for name in ("malformed", "unknown", "tool_errors")},
        "calls": dict(conversation.calls),
        "cut_observations": conversation.cut_observations,
        "episode_s": round(seconds, 4),
        "engine_s": round(conversation.engine_s, 4),
        "env_s": round(seconds - conversation.engine_s, 4),
    }
    return episode
