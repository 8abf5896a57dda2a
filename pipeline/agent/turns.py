"""Episodes in turns: the policy generates a turn, then an environment or tools reply.

Tool calls of a turn go to the tools. A turn without calls goes to the environment; if there is none, such a turn ends
the episode. The model reads about its mistakes in `Reply.messages`; a failure of the environment raises
`EpisodeFailed`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.agent.conversation import Conversation
from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.inside.checks import MAX_PARTS
from pipeline.agent.inside.interface import Call, Message, ToolResult
from pipeline.agent.player import EpisodeProcess
from pipeline.agent.tokens.context import Answer
from pipeline.agent.tokens.pictures import Source, decoded
from pipeline.config.agent import AgentConfig


@dataclass
class Reply:
    """The reply of environment or tools to a turn of the policy."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages that the model reads next."""
    sources: Sequence[Source] = ()
    """The same messages with their images; empty if there are none."""
    ended: str = ""
    """How the episode ended, as in the column `ended`; "" if it goes on."""
    reward: float | None = None
    """Reward of the turn; None if there is none."""
    trains: bool = True
    """False to leave the tokens of the turn out of the loss."""


class TurnsPlayer:
    """The `Player` of an episode with an environment, with tools, or with neither.

    Args:
        config: the section `agent`.
        process: the process of the episode's environment and tools; None if there are none.
        tools: names of the tools that the model may call, each with the seconds that a call may take; None takes
            `agent.step_timeout_s`.
        environment: true if the episode has an environment.
    """

    def __init__(
        self, config: AgentConfig, process: EpisodeProcess | None, tools: dict[str, float | None], environment: bool
    ) -> None:
        self._config, self._process, self._tools, self._environment = config, process, tools, environment
        self.messages: list[dict[str, Any]] = []
        self.parts: dict[str, Any] = {}

    async def play(self, conversation: Conversation, row: dict[str, Any]) -> str:
        """Take turns until the episode ends; see `Player.play`."""
        conversation.calls.update(dict.fromkeys(self._tools, 0))
        first: Any = []
        opened: list[bytes] = []
        if self._process is not None:
            first, opened = self._process.opened or [], _images(self._process.opened_images)
        if isinstance(first, str):
            # Many templates write a message of role `tool` only after a call.
            first = [{"role": "user", "content": first}]
        own = list(conversation.pictures.prompt if conversation.pictures else ())
        await conversation.prepare(None, [*own, *opened])
        context = conversation.begin([*row["prompt"], *first], sources=[(row["prompt"], own), (first, opened)])
        self.messages = context.messages
        while True:
            answer = await conversation.answer(context)
            last = answer.full or conversation.turns == self._config.max_turns
            reply = await self._reply(conversation, answer, last)
            context.set_reward(reply.reward, reply.trains)
            ended = reply.ended or ("length" if answer.full else "turns" if last else "")
            if not ended and conversation.wrote_placeholder(context):
                conversation.mistakes["malformed"] += 1
                ended = "malformed"
            if not ended:
                await conversation.prepare(context, [image for _, images in reply.sources for image in images])
            following = None if ended else conversation.observe(context, reply.messages, reply.sources)
            if following is None:
                # The last reply is for readers of the record; the policy does not read it.
                unread = [conversation.cut(message) for message in reply.messages] if ended else []
                self.messages = context.messages + unread
                return ended or "length"
            context = following
            self.messages = context.messages

    async def place(self) -> str:
        """Return "": the deadline of each single request to the process already names the file and line."""
        return ""

    async def close(self, well: bool = False) -> None:
        """See `Player.close`."""
        if self._process is not None:
            await self._process.close(well)

    async def _reply(self, conversation: Conversation, answer: Answer, last: bool) -> Reply:
        """Reply to a turn of the policy.

        Args:
            conversation: the conversation, whose counts of mistakes and calls grow.
            answer: the turn.
            last: true if no further turn may follow; its tool calls are then not made.

        Raises:
            EpisodeFailed: the environment or a tool failed.
        """
        message = answer.message
        if answer.malformed is not None:
            conversation.mistakes["malformed"] += 1
            if self._config.on_malformed == "end":
                return Reply(ended="malformed")
            # A template may write a tool's message only after a call that it answers.
            reply = [{"role": "user", "content": f"Error: {answer.malformed}"}]
            return Reply(reply, trains=self._config.on_malformed != "mask")
        if message.calls:
            if last:
                return Reply()
            sources = [await self._call(conversation, call, i) for i, call in enumerate(message.calls)]
            return Reply([message for messages, _ in sources for message in messages], sources)
        if not self._environment:
            return Reply(ended="length" if message.truncated else "stop")
        return await self._step(message)

    async def _step(self, message: Message) -> Reply:
        assert self._process is not None
        observation = await self._process.step(message, self._config.step_timeout_s)
        self.parts |= observation.parts
        if len(json.dumps(self.parts)) > MAX_PARTS:
            raise EpisodeFailed(f"the observations of the episode have parts of more than {MAX_PARTS:,} bytes as JSON")
        content = observation.content
        if isinstance(content, str):
            content = [{"role": self._config.observation_role, "content": content}]
        if not content and not observation.done:
            raise EpisodeFailed("`step` returned an observation without content that does not end the episode")
        sources = [(content or [], _images(observation.images))]
        return Reply(content or [], sources, "done" if observation.done else "", observation.reward)

    async def _call(self, conversation: Conversation, call: Call, number: int) -> Source:
        """Make the tool call `number` (from 0) of a turn; returns the tool's message with its images."""
        found = await self._result(conversation, call, number)
        if isinstance(found, str):
            found = ToolResult(found)
        message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": found.text}
        return [message], _images(found.images)

    async def _result(self, conversation: Conversation, call: Call, number: int) -> str | ToolResult:
        if number >= self._config.max_parallel_calls:
            return f"Error: only {self._config.max_parallel_calls} calls are allowed in one answer."
        if call.name not in self._tools:
            conversation.mistakes["unknown"] += 1
            return f"Error: there is no tool {call.name!r:.80}; the tools are {', '.join(self._tools)}."
        conversation.calls[call.name] += 1
        seconds = self._tools[call.name] or self._config.step_timeout_s
        assert self._process is not None
        try:
            shows = () if conversation.pictures is None else (True,)
            return await self._process.call(call.name, call.arguments, seconds, *shows)
        except PolicyMistake as mistake:
            conversation.mistakes["tool_errors"] += 1
            return f"Error: {mistake}"


def _images(texts: Sequence[str | bytes]) -> list[bytes]:
    """Return the encoded images that a process sent. Raises EpisodeFailed for anything else."""
    try:
        return decoded([text for text in texts if isinstance(text, str)])
    except ValueError as error:
        raise EpisodeFailed(str(error)) from None
