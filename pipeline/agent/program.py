"""Episodes that a program drives: it requests turns of the policy, and returns rewards at the end."""

import asyncio
from typing import Any

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.chat_server import ChatHandler
from pipeline.agent.endpoint.server import Endpoint, Route
from pipeline.agent.errors import CommandFailed, EpisodeFailed
from pipeline.agent.inside.checks import ProgramResult
from pipeline.agent.inside.forms import joined
from pipeline.agent.inside.interface import EpisodeOver
from pipeline.agent.player import EpisodeProcess
from pipeline.agent.session import Session


class ProgramPlayer:
    """The `Player` of an episode with a program `async def run(row, chat)`.

    Args:
        process: the process of the episode.
    """

    def __init__(self, process: EpisodeProcess) -> None:
        self._process = process
        self.messages: list[dict[str, Any]] = []
        """Empty while the program runs; afterwards its conversations, joined by `forms.joined`."""
        self.parts: dict[str, Any] = {}
        self.place, self.close = process.place, process.close

    async def play(self, conversation: Conversation, row: dict[str, Any]) -> str:
        """Run the program until it ends the episode; see `Player.play`.

        Each turn gets its entry of the program's `rewards`. If the program returns a score as `reward`, the last turn
        gets the score minus the rewards of the other turns. If the program does not catch `EpisodeOver`, the episode
        scores 0.

        Raises:
            EpisodeFailed: the program failed, requested no turn, returned no reward although it scores the episode, or
                returned more or fewer `rewards` than the episode has turns.
        """
        try:
            returned = await self._returned(conversation, row)
        finally:
            # The last turn of the row is the turn of the last request.
            conversation.contexts.sort(key=lambda context: context.turn)
            if conversation.contexts:
                self.messages = joined([context.messages for context in conversation.contexts])
        _set_rewards(conversation, returned)
        self.parts = returned.parts
        return conversation.over or "done"

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """Run the program, whose requests for turns go to `chat`, and return its result."""
        return await self._process.run(row, chat)

    async def _returned(self, conversation: Conversation, row: dict[str, Any]) -> ProgramResult:
        config = conversation.config
        try:
            returned = await self.run(row, conversation.chat)
        except EpisodeOver as over:
            if not conversation.over:
                words = f"EpisodeOver: {over}; the program raised it, and the episode was not over"
                raise EpisodeFailed(words) from None
            return ProgramResult()
        if returned.reward is None and returned.rewards is None and config.scored_by != "function":
            how = "the program returned no reward; return a number,"
            if config.command:
                how = "the last line that agent.command printed is no object with a reward; print"
            raise EpisodeFailed(
                how + ' {"reward": number} or {"rewards": [one for each answer]}, or set agent.reward=function'
            )
        return returned


def _set_rewards(conversation: Conversation, returned: ProgramResult) -> None:
    """Give each turn of the policy its reward from the program's result.

    Raises:
        EpisodeFailed: the policy generated no turn, or the number of `rewards` differs from the number of turns.
    """
    if not conversation.contexts:
        raise EpisodeFailed("the program ended without an answer of the policy, so that there is nothing to train")
    answers = sorted(turn for context in conversation.contexts for turn in context.turns)
    rewards: list[float | None] = [None] * len(answers) if returned.rewards is None else [*returned.rewards]
    if len(rewards) != len(answers):
        raise EpisodeFailed(
            f"the program returned {len(rewards)} `rewards`, and the episode has {len(answers)} answers of the policy; "
            "return one for each answer, in the order in which they were asked for"
        )
    if returned.reward is not None:
        rewards[-1] = returned.reward - sum(reward or 0.0 for reward in rewards[:-1])
    by_turn = dict(zip(answers, rewards, strict=True))
    for context in conversation.contexts:
        context.set_rewards([by_turn[turn] for turn in context.turns])


class ClientPlayer(ProgramPlayer):
    """The player of a command, or of a program `def run(row)`, whose client sends its requests to the endpoint.

    Args:
        session: the process of the episode.
        endpoint: HTTP server that receives the requests of the client.
        sampling: `temperature`, `top_p` and `top_k` of the turns.
        longest: maximum number of tokens of one turn.
    """

    def __init__(self, session: Session, endpoint: Endpoint, sampling: dict[str, float], longest: int) -> None:
        super().__init__(session)
        self._session, self._endpoint = session, endpoint
        self._sampling, self._longest = sampling, longest

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """Run the command or the program and return its result.

        Raises:
            EpisodeOver: the command or program failed after the endpoint had refused a request because the episode is
                over; a client that does not catch the refusal fails in this way.
            EpisodeFailed: the command or program failed otherwise.
        """
        refused: list[EpisodeOver] = []

        async def ask(*args: Any) -> Any:
            try:
                return await chat(*args)
            except EpisodeOver as over:
                refused.append(over)
                raise

        route = Route(ask, self._sampling, self._longest)
        variables = self._endpoint.open(route)
        running = asyncio.ensure_future(self._session.command(row, variables))
        both: list[asyncio.Future[Any]] = [running, route.failed]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if route.failed.done():
                raise route.failed.result().error
            return await running
        except CommandFailed:
            if refused:
                raise refused[0] from None
            raise
        finally:
            running.cancel()
            await self._endpoint.end(variables)
            await asyncio.gather(running, return_exceptions=True)
