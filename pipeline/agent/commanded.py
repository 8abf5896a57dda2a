"""Commands, and programs with a client, that drive episodes, on the run's side: each uses a path of the endpoint."""

import asyncio
from typing import Any

from pipeline.agent.endpoint.chat_server import Chat
from pipeline.agent.endpoint.server import Endpoint, Line
from pipeline.agent.errors import CommandFailed
from pipeline.agent.inside.interface import EpisodeOver
from pipeline.agent.inside.replies import Returned
from pipeline.agent.session import Session


class Command:
    """The command of one episode, as `driven.Program`.

    Args:
        session: the process of the episode.
        endpoint: server for the requests of the command.
        sampling: `temperature`, `top_p` and `top_k` of the answers.
        longest: most tokens of one answer.
    """

    def __init__(self, session: Session, endpoint: Endpoint, sampling: dict[str, float], longest: int) -> None:
        self._session, self._endpoint = session, endpoint
        self._sampling, self._longest = sampling, longest
        self.place, self.close = session.place, session.close

    async def run(self, row: dict[str, Any], chat: Chat) -> Returned:
        """Run the command and return its result.

        Raises:
            EpisodeOver: the command failed after the endpoint refused a request because the episode is over; a client
                that does not catch the refusal fails in this way.
            EpisodeFailed: the command failed otherwise.
        """
        refused: list[EpisodeOver] = []

        async def ask(*args: Any) -> Any:
            try:
                return await chat(*args)
            except EpisodeOver as over:
                refused.append(over)
                raise

        line = Line(ask, self._sampling, self._longest)
        variables = self._endpoint.open(line)
        running = asyncio.ensure_future(self._session.command(row, variables))
        both: list[asyncio.Future[Any]] = [running, line.failed]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if line.failed.done():
                raise line.failed.result().error
            return await running
        except CommandFailed:
            if refused:
                raise refused[0] from None
            raise
        finally:
            running.cancel()
            await self._endpoint.end(variables)
            await asyncio.gather(running, return_exceptions=True)
