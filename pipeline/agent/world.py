"""Replies to the answers of one episode, by an environment, tools, or both.

Calls of an answer go to the tools. An answer without calls goes to the environment, and ends the episode if there is
none. The model reads its mistakes (`Reply.messages`); a failure of the environment raises `EpisodeFailed`.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.inside.interface import Call, Content, Message, Observation
from pipeline.agent.inside.replies import MAX_PARTS
from pipeline.config.agent import AgentConfig


class Played(Protocol):
    """The process of an episode, here (`session.Session`) or on a host (`hosted.HostedSession`)."""

    opened: Content
    """The content that the environment's `open` returned."""

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """See `session.Session.step`."""

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """See `session.Session.call`."""

    async def place(self) -> str:
        """See `session.Session.place`."""

    async def close(self, well: bool = False) -> None:
        """See `session.Session.close`."""


@dataclass
class Reply:
    """The reply to an answer."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The next messages that the model reads."""
    ended: str = ""
    """The end of the episode, as in the column `ended`; empty if it goes on."""
    reward: float | None = None
    """Reward of the answer."""
    trains: bool = True
    """False to mask the answer out of the training."""


class World:
    """The replies of one episode.

    Args:
        config: the section `agent`.
        session: the process of the episode's environment and tools; None if there are none.
        tools: names of the tools that the model may call, with the seconds of one call or None.
        environment: true if the episode has an environment.
    """

    def __init__(
        self, config: AgentConfig, session: Played | None, tools: dict[str, float | None], environment: bool
    ) -> None:
        self.config, self._session, self._tools, self._environment = config, session, tools, environment
        self.calls: Counter[str] = Counter(dict.fromkeys(tools, 0))
        """Number of calls of every tool, by name."""
        self.mistakes: Counter[str] = Counter()
        """`malformed` and `unknown` calls, and calls that the tool refused (`tool_errors`)."""
        self.parts: dict[str, Any] = {}
        """Further numbers of the environment."""

    async def reply(self, message: Message, malformed: str | None, last: bool) -> Reply:
        """Reply to an answer.

        Args:
            message: the answer as it was read.
            malformed: the reason if a call in the answer could not be read; else None.
            last: true if no further answer may follow; then calls are not made.

        Raises:
            EpisodeFailed: the environment or a tool failed.
        """
        if malformed is not None:
            self.mistakes["malformed"] += 1
            if self.config.on_malformed == "end":
                return Reply(ended="malformed")
            # A template may write a tool's message only after a call that it answers.
            reply = [{"role": "user", "content": f"Error: {malformed}"}]
            return Reply(reply, trains=self.config.on_malformed != "mask")
        if message.calls:
            if last:
                return Reply()
            return Reply([self._result(call, await self._call(call, i)) for i, call in enumerate(message.calls)])
        if not self._environment:
            return Reply(ended="length" if message.truncated else "stop")
        return await self._step(message)

    async def _step(self, message: Message) -> Reply:
        assert self._session is not None
        observation = await self._session.step(message, self.config.step_timeout_s)
        self.parts |= observation.parts
        if len(json.dumps(self.parts)) > MAX_PARTS:
            raise EpisodeFailed(f"the observations of the episode have parts of more than {MAX_PARTS:,} bytes as JSON")
        content = observation.content
        if isinstance(content, str):
            content = [{"role": self.config.observation_role, "content": content}]
        if not content and not observation.done:
            raise EpisodeFailed("`step` returned an observation without content that does not end the episode")
        return Reply(content or [], "done" if observation.done else "", observation.reward)

    async def _call(self, call: Call, number: int) -> str:
        if number >= self.config.max_parallel_calls:
            return f"Error: only {self.config.max_parallel_calls} calls are allowed in one answer."
        if call.name not in self._tools:
            self.mistakes["unknown"] += 1
            return f"Error: there is no tool {call.name!r:.80}; the tools are {', '.join(self._tools)}."
        self.calls[call.name] += 1
        seconds = self._tools[call.name] or self.config.step_timeout_s
        assert self._session is not None
        try:
            return await self._session.call(call.name, call.arguments, seconds)
        except PolicyMistake as mistake:
            self.mistakes["tool_errors"] += 1
            return f"Error: {mistake}"

    def _result(self, call: Call, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
