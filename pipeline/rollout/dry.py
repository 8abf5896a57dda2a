"""A trial of a run's first episodes before engines start: fixed, made-up turns take the place of the policy's."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.agent.conversation import Ask
from pipeline.agent.episode import Episode
from pipeline.agent.inside.interface import Call
from pipeline.agent.tokens.calls import example
from pipeline.config import Config
from pipeline.config.agent import TOOL_AGENT
from pipeline.derived import uses_images
from pipeline.generation import Generation, PromptImages
from pipeline.models.processor import load_vision
from pipeline.omissions import remedy
from pipeline.rollout.engine import Lease
from pipeline.rollout.episodes import Episodes
from pipeline.sampling import Sampling

ANSWER = "The answer is 42."
"""The turn that an environment gets in the trial. It need not make sense, nor do the first turns of a policy."""
ROWS = 4
LONGEST = 300
"""Maximum number of characters of a reply that are shown."""


def dry_episodes(config: Config, tokenizer: Any, prompts: Iterable[pa.Table], calls: bool) -> list[tuple[str, str]]:
    """Begin the first episodes of a run as an engine would, with made-up turns.

    Args:
        config: the run's configuration.
        tokenizer: tokenizer of the model.
        prompts: tables of prompts; the first `ROWS` rows of each agent are tried.
        calls: true to call each tool, too, with made-up arguments.

    Returns:
        Lines for `--dry-run` as (name, text).

    Raises:
        ValueError: environment or tools do not load, the chat template cannot continue a conversation, no parser parses
            the calls that the template writes, or each of the episodes fails.
    """
    return asyncio.run(_try(config, tokenizer, pa.concat_tables(prompts), calls))


async def _try(config: Config, tokenizer: Any, prompts: pa.Table, calls: bool) -> list[tuple[str, str]]:
    names = prompts["agent_name"].to_pylist()
    declared = [name for name, agent in config.agent.declared().items() if agent.plays or name in config.agent.named]
    lines = []
    for name in dict.fromkeys([*declared, *names]):
        if name == TOOL_AGENT and name not in declared:
            continue
        own = prompts.filter(pa.array([name == other for other in names], pa.bool_())).slice(0, ROWS)
        rehearsal = Rehearsal(config, tokenizer, name)
        try:
            found = await _lines(config, rehearsal, tokenizer, own, calls)
        except ValueError as error:
            raise ValueError(f"the agent {name}: {error}" if name else str(error)) from None
        finally:
            await rehearsal.close()
        lines += [(f"{what} of {name}" if name else what, text) for what, text in found]
    return lines


async def _lines(
    config: Config, rehearsal: "Rehearsal", tokenizer: Any, prompts: pa.Table, calls: bool
) -> list[tuple[str, str]]:
    tools = await rehearsal.prove(config.rollout.stop)
    lines = [("episodes", rehearsal.summary())]
    if tools:
        signatures = ", ".join(_signature(tool) for tool in tools)
        lines.append(("tools", f"{signatures}; {rehearsal.reader.summary()}"))
        if not rehearsal.bridge.shows_tools:
            note = "the model's chat template leaves out the schemas of the tools; describe them in the prompts, or "
            lines.append(("note", note + remedy("writes them")))
    if len(prompts):
        lines += _shown(tokenizer, await rehearsal.play(prompts))
        lines += [await rehearsal.call(prompts[:1], tool) for tool in tools if calls]
    return lines


class Rehearsal(Episodes):
    """Episodes of one agent without an engine: the policy's turn is always the same text."""

    def __init__(self, config: Config, tokenizer: Any, name: str | None) -> None:
        own = config.agent.agents()[name]
        # The second turn shows that the conversation goes on. An episode past its deadline has failed.
        turns = own.max_turns if own.driven else min(2, own.max_turns)
        engine: Any = None
        agents = {name: replace(own, on_timeout="error", max_turns=turns)}
        vision = load_vision(config.model) if uses_images(config) else None
        super().__init__(agents, config.data, tokenizer, engine, config.trainer.seed, False, vision=vision)
        self._agent, self._most = self._agents[name], own.max_turns
        self._sampling = Sampling.of(config.rollout, config.data.max_response_length, "train")
        self._answer: list[int] = []

    async def prove(self, stop: list[str]) -> list[dict[str, Any]]:
        """Load environment and tools, and prove that conversations can go on; returns the schemas of the tools.

        Args:
            stop: texts that end a turn.

        Raises:
            ValueError: the code does not load, the proof fails, or the settings do not fit the tools. An environment
                may have its own tools, so that this is known only after loading.
        """
        agent, tools = self._agent.config, (await self._agent.load()).tools
        if not tools and not agent.driven and agent.parser not in ("auto", "none"):
            raise ValueError(f"agent.parser={agent.parser} finds calls of tools, and there are none; leave it out")
        if tools and agent.parser == "none":
            raise ValueError("agent.parser=none with tools: no call would be found; leave the parser at auto")
        if tools and stop:
            raise ValueError(f"rollout.stop={stop} with tools: a text could end an answer inside a call; leave it out")
        chat_format = await self._agent.start()
        self.bridge, self.reader = chat_format.bridge, chat_format.reader
        return tools

    def summary(self) -> str:
        """Describe the agent's episodes in one line."""
        if not self._agent.config.plays:
            return "single answers"
        return f"{self._most} answers at most; {self.bridge.summary()}"

    async def play(self, prompts: pa.Table) -> list[Episode]:
        """Run the prompts' episodes with `ANSWER` as every turn. Raises ValueError if all of them fail."""
        self._answer = self.bridge.answer(ANSWER, [])
        episodes = await self._run(prompts)
        if all(episode.error for episode in episodes):
            advice = ". A model may write anything, and must not make them raise" if episodes[0].turns else ""
            raise ValueError(
                f"the episode fails for each of the first {len(prompts)} prompts, with the made-up answer {ANSWER!r}: "
                f"{episodes[0].error}; such rows teach nothing. Check agent.environment, agent.tools, agent.program, "
                f"agent.command{advice}"
            )
        return episodes

    async def call(self, prompt: pa.Table, tool: dict[str, Any]) -> tuple[str, str]:
        """Call a tool with made-up arguments; returns (name, text) with the tool's result for `--dry-run`."""
        name, arguments = tool["function"]["name"], example(tool)
        self._answer = self.bridge.answer("", [Call("call00000", name, arguments)])
        [episode] = await self._run(prompt)
        if episode.error:
            shown = f"the row would be an error: {episode.error}; raise ToolError for errors that the model can correct"
        else:
            shown = next((repr(m["content"]) for m in episode.messages if m["role"] == "tool"), "no reply")
        return f"made-up call of {name}", f"{arguments} -> {_short(shown)}"

    async def _run(self, prompts: pa.Table) -> list[Episode]:
        return await self.run(prompts, [[self._sampling]] * len(prompts), Lease(one_version=True))

    def _policy(self, sampling: Sampling, name: str, lease: Lease, for_training: bool) -> Ask:
        async def ask(ids: list[int], most: int, turn: int, images: PromptImages | None = None) -> Generation:
            tokens = np.array(self._answer[:most], np.int32)
            reason = "stop" if len(self._answer) <= most else "length"
            return Generation(tokens, np.zeros(len(tokens), np.float32), reason, ((0, len(tokens)),))

        return ask


def _signature(tool: dict[str, Any]) -> str:
    function = tool["function"]
    return f"{function['name']}({', '.join(function.get('parameters', {}).get('properties', {}))})"


def _shown(tokenizer: Any, episodes: list[Episode]) -> list[tuple[str, str]]:
    """Make the lines for `--dry-run` on these episodes: the first that did not fail, and the number that failed."""
    first = next(episode for episode in episodes if not episode.error)
    lines = [("first prompt", str(tokenizer.decode(first.prompt_ids))), (f"reply to {ANSWER!r}", _reply(first))]
    failed = [episode.error for episode in episodes if episode.error]
    if failed:
        lines.append(("failed episodes", f"{len(failed)} of the first {len(episodes)}: {failed[0]}"))
    return lines


def _reply(episode: Episode) -> str:
    """Describe the reply to the first turn; for several contexts, only the numbers of turns and contexts, and the
    score."""
    if len(episode.contexts) > 1:
        return f"{episode.turns} answers in {len(episode.contexts)} contexts, score {episode.score:g}"
    [context] = episode.contexts
    answers = [place for place, message in enumerate(context.messages) if message["role"] == "assistant"]
    # The prompt may contain earlier assistant messages.
    mine = answers[-episode.turns :]
    replies = context.messages[mine[0] + 1 : mine[1] if len(mine) > 1 else None]
    texts = " ".join(repr(message["content"]) for message in replies) or "nothing"
    reward = context.spans[0][2]
    rewarded = "no reward" if reward is None else f"reward {reward:g}"
    then = "the episode goes on" if len(mine) > 1 else f"the episode ends ({episode.ended})"
    return f"{_short(texts)}, {rewarded}; {then}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
