"""An engine's side of episode processes on hosts: the interface of `processes.py`, implemented by calls of Ray actors.

The host enforces the deadlines of `Processes` and `Session`. An engine waits `MARGIN_S` seconds longer, so that a host
that does not answer is named in the error. An episode whose host died is lost (`EpisodeLost`) and begins again, on
another host or on the same one after Ray has restarted it.
"""

import asyncio
import itertools
import logging
import random
import uuid
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError

from pipeline.agent.endpoint.chat_server import ChatFailed, ChatHandler, ChatServer
from pipeline.agent.errors import EpisodeFailed, EpisodeLost
from pipeline.agent.inside.checks import ProgramResult
from pipeline.agent.inside.interface import Content, Message, Observation, ToolResult
from pipeline.agent.ray_hosts import EpisodeKey, Hosts
from pipeline.agent.session import CLOSE_S, PLACE_S
from pipeline.agent.zygote import LoadedCode
from pipeline.config.agent import AgentConfig

log = logging.getLogger(__name__)

MARGIN_S = 30.0  # seconds that a request and its answer may be on their way
RETRY_S = 0.5  # seconds between two checks of hosts that are not available


class HostConnection:
    """The connection of one engine, for one of its agents, to one host."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.name = actor, "that has not started"
        self.open = 0
        """Number of open episodes on the host."""
        self.loaded: LoadedCode | None = None
        """Description of the user code that the host has loaded; None while the host is not available."""
        self.refused: str | None = None
        """The error message if the user's files do not load on the host, else None."""
        self.problem = ""
        """Ray's error message if the host is unavailable, else ""."""
        self.life: asyncio.Future[None] | None = None
        """A future that is done when the host has died or is regarded as dead. After a restart there is a new
        future."""


class RemoteProcesses:
    """The environment processes of one agent on hosts; replaces `Processes`, whose processes are local.

    Args:
        agent: name of the agent, the same for all engines.
        config: settings of the agent.
        hosts: hosts of the run.
    """

    def __init__(self, agent: str | None, config: AgentConfig, hosts: Hosts) -> None:
        self._agent, self._config, self._hosts = agent, config, hosts
        self._links = [HostConnection(actor) for actor in hosts.actors]
        # Otherwise the first episodes of all engines would go to the same host.
        random.SystemRandom().shuffle(self._links)
        self._tending: list[asyncio.Task[None]] = []
        self._id, self._numbers = uuid.uuid4().hex, itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> LoadedCode:
        """Have the hosts import the user's files, unless they have; returns their description.

        Raises:
            ValueError: the files do not load on one of the hosts.
            TimeoutError: fewer than `agent.min_hosts` hosts have started in time.
        """
        if not self._tending:
            self._tending = [asyncio.create_task(self._tend(link)) for link in self._links]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._hosts.start_s):
                while len(found := [link.loaded for link in self._links if link.loaded]) < self._hosts.fewest:
                    for link in self._links:
                        if link.refused is not None:
                            raise ValueError(f"{link.refused} (on the environment host {link.name})")
                    await asyncio.sleep(RETRY_S)
                return found[0]
        raise TimeoutError(
            f"{len(found)} of agent.hosts={len(self._links)} have started within {self._hosts.start_s:g} s "
            f"(trainer.deadlines.engine_start), and the run needs {self._hosts.fewest}; the others wait for "
            f"agent.host_cpus={self._config.host_cpus:g} on a node with the labels of trainer.placement.agent"
            + next((f" ({link.problem})" for link in self._links if link.problem), "")
        )

    async def _tend(self, link: HostConnection) -> None:
        """Load the user's files on a host, wait for its death, and repeat when Ray has restarted the host."""
        while True:
            try:
                link.name, loaded = await link.actor.start.remote(self._agent, self._config)
                link.refused = loaded if isinstance(loaded, str) else None
                if isinstance(loaded, str):
                    log.warning("the environment host %s begins no episodes: %s", link.name, loaded)
                else:
                    life = link.actor.hold.remote()
                    link.actor.watch.remote(self._id, [life])
                    link.life, link.loaded = asyncio.ensure_future(life), loaded
                    await asyncio.wait([link.life])
                    link.problem = "" if link.life.cancelled() else first_line(link.life.exception())
            except RayError as error:
                link.problem = first_line(error)
            link.loaded = None
            await asyncio.sleep(RETRY_S)

    async def open(self, row: dict[str, Any], seed: int, timeout_s: float) -> "RemoteSession":
        """Begin an episode on the host with the fewest open episodes of this engine; see `Processes.open`.

        Raises:
            EpisodeFailed: no host is available in time, or `Processes.open` raised it on the host.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while not (there := [link for link in self._links if link.loaded is not None]):
            if clock() > deadline:
                refused = next((f": {link.refused}" for link in self._links if link.refused), "")
                raise EpisodeLost(f"ProcessError: no environment host is there after {timeout_s:g} s{refused}")
            await asyncio.sleep(RETRY_S)
        link = min(there, key=lambda link: link.open)
        session = RemoteSession(link, (self._id, next(self._numbers)), self._closing)
        try:
            await session.open(self._agent, row, seed, deadline - clock())
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """Wait until the episodes that are closing have ended. The hosts end with the run."""
        await asyncio.gather(*self._closing)
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)


class RemoteSession:
    """One episode on a host; replaces a local `Session`, and its methods raise the same errors."""

    def __init__(self, link: HostConnection, key: EpisodeKey, closing: set[asyncio.Task[None]]) -> None:
        self.opened: Content = None
        """Content that the environment's `reset` returned."""
        self.opened_images: list[str] = []
        """Images in this content, in base64."""
        self._link, self._key, self._closing, self._life = link, key, closing, link.life
        self._closed = False
        link.open += 1

    async def open(self, agent: str | None, row: dict[str, Any], seed: int, timeout_s: float) -> None:
        """Begin the episode; called by `RemoteProcesses.open`."""
        begun = await self._ask("open", timeout_s, agent, row, seed, timeout_s)
        self.opened, self.opened_images = begun

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """See `Session.step`."""
        return await self._ask("step", timeout_s, message, timeout_s)

    async def call(
        self, name: str, arguments: dict[str, Any], timeout_s: float, images: bool = False
    ) -> str | ToolResult:
        """See `Session.call`."""
        return await self._ask("call", timeout_s, name, arguments, timeout_s, images)

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """See `Session.run`."""

        async def answer(frame: dict[str, Any]) -> None:
            await self._ask("answer", 0, frame)

        try:
            async with ChatServer(chat, answer) as questions:
                # No deadline: the caller limits the time of the episode.
                reply = await self._ask("run", None, row)
                while isinstance(reply, dict):
                    await questions.take(reply)
                    reply = await self._ask("next", None)
            return reply
        except ChatFailed as failed:
            raise failed.error from None

    async def place(self) -> str:
        """Return the file and line at which the process is; see `Session.place`. If the host fails, the text says
        so."""
        try:
            return await self._ask("place", PLACE_S)
        except EpisodeFailed as failed:
            return f" ({failed})"

    async def close(self, well: bool = False) -> None:
        """End the episode in the background; see `Session.close`."""
        if not self._closed:
            self._closed = True
            self._link.open -= 1
            task = asyncio.create_task(self._close(well))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, well: bool) -> None:
        # Its host may have died.
        with suppress(EpisodeFailed):
            await self._ask("close", CLOSE_S, well)

    async def _ask(self, do: str, seconds: float | None, *arguments: Any) -> Any:
        """Call a method of the host for this episode and return the result.

        Args:
            do: name of the method.
            seconds: deadline that the host keeps; the call waits `MARGIN_S` longer. None waits without a limit.
            arguments: arguments of the method after the key of the episode.
        """
        limit = None if seconds is None else seconds + MARGIN_S
        try:
            async with asyncio.timeout(limit):
                value, error = await getattr(self._link.actor, do).remote(self._key, *arguments)
        except RayTaskError:
            raise
        except TimeoutError:
            words = f"the environment host {self._link.name} gave no answer to `{do}` in {limit:g} s"
            error = EpisodeLost(f"TimeoutError: {words}")
        except RayError as gone:
            words = f"the environment host {self._link.name} is gone: {first_line(gone)}"
            error = EpisodeLost(f"ProcessError: {words}")
        if isinstance(error, EpisodeLost) and self._life is not None:
            # The episode begins again, and must not come to an unavailable host.
            self._life.cancel()
            if self._life is self._link.life:
                self._link.loaded = None
        if error is not None:
            raise error
        return value


def first_line(error: BaseException | None) -> str:
    """Return the first line of Ray's error message, which may be a page long."""
    return str(error).partition("\n")[0]
