"""Hosts: Ray actors that run the processes of episodes on other nodes than the engines' (`agent.hosts`).

    engine: RemoteProcesses ─── Ray calls ───► Host: Processes ─► keeper ─► zygote ─► episode

All hosts are alike, and each serves all agents of all engines. They live as long as the run: Ray restarts a host that
has died, and its episodes begin again on the available hosts (`ray_client.py`). The episodes of an engine that died end
as soon as Ray reports its death.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.agent.endpoint.chat_server import Send
from pipeline.agent.errors import EpisodeFailed, EpisodeLost, PolicyMistake
from pipeline.agent.inside.chat_client import MAX_CHATS
from pipeline.agent.inside.interface import Content, EpisodeOver
from pipeline.agent.processes import Processes
from pipeline.agent.session import Session
from pipeline.agent.zygote import LoadedCode
from pipeline.config.agent import AgentConfig
from pipeline.config.trainer import TrainerConfig

if TYPE_CHECKING:
    from ray import ObjectRef

MAX_CALLS = 100_000  # calls that a host works on at once; each open episode has one or two
EpisodeKey = tuple[str, int]
"""Key of an episode: (id of the engine, number of the episode in the engine)."""
CallResult = tuple[Any, Exception | None]
"""The result of a call as (value, None), or (None, error). The error is returned because Ray would wrap a raised one in
an error of its own."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run: their Ray actors, and how long an engine waits for them."""

    actors: tuple[Any, ...] = ()
    fewest: int = 0
    """Minimum number of hosts that must have started before an engine begins."""
    start_s: float = 0.0
    """Maximum number of seconds to wait for the start of that many hosts."""

    @classmethod
    def start(cls, agent: AgentConfig, trainer: TrainerConfig) -> "Hosts":
        """Request `agent.hosts` hosts from Ray, without waiting for them. If `agent.hosts` is 0, start none."""
        import ray

        options: dict[str, Any] = {"num_cpus": agent.host_cpus, "label_selector": trainer.placed("agent")}
        host = ray.remote(Host).options(
            # Ray does not repeat calls: a new host does not have the old one's episodes.
            **options,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy="SPREAD",
        )
        actors = tuple(host.remote() for _ in range(agent.hosts))
        return cls(actors, agent.fewest_hosts, trainer.deadlines.engine_start)

    def end(self) -> None:
        """Kill the hosts and with them the processes of all episodes."""
        for actor in self.actors:
            # A dry run has no hosts, and does without the import.
            import ray

            ray.kill(actor)


BESIDE_ENGINES = Hosts()
"""The empty set of hosts, for a run without `agent.hosts`: each engine starts the processes of its episodes itself."""


class HostedEpisode:
    """The state of one episode on a host: session, running request, and queue of the program's questions."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.send: Send | None = None
        self._request: asyncio.Task[Any] | None = None
        self._program: asyncio.Queue[CallResult] = asyncio.Queue()  # the program's questions, and at last its result
        self._room = asyncio.Semaphore(MAX_CHATS)  # for questions that the engine has not fetched

    def begin(self, request: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a request of the engine as a task, which `stop` cancels."""
        self._request = asyncio.create_task(request)
        return self._request

    async def stop(self) -> None:
        """Cancel the running request, for which the engine no longer waits."""
        if self._request is not None:
            self._request.cancel()
            await asyncio.wait([self._request])

    def run(self, row: dict[str, Any]) -> None:
        """Start the program of the episode with the fields of `row`; `next` returns its questions and its result."""

        def asked(send: Send) -> AbstractAsyncContextManager[HostedEpisode]:
            self.send = send
            return nullcontext(self)

        async def run(session: Session) -> None:
            self._program.put_nowait(await outcome(session.drive(row, asked)))

        assert self.session is not None
        self.begin(run(self.session))

    async def take(self, frame: dict[str, Any]) -> None:
        """Queue a question of the program until the engine fetches it; see `FrameReceiver`."""
        await self._room.acquire()
        self._program.put_nowait((frame, None))

    async def next(self) -> CallResult:
        """Wait for the next question of the program, a frame (dict), or at the end for the program's result."""
        asked = await self._program.get()
        if isinstance(asked[0], dict):
            self._room.release()
        return asked


async def outcome(request: Awaitable[Any]) -> CallResult:
    """Await a request. Returns (result, None), or (None, error) if the request raised an error of an episode."""
    try:
        return await request, None
    except (EpisodeFailed, EpisodeOver, PolicyMistake) as error:
        return None, error
    except asyncio.CancelledError:
        return None, EpisodeFailed("the engine gave up a request of the episode")


class Host:
    """A host as a Ray actor.

    Methods on an episode return a `CallResult`, with `EpisodeLost` as the error if the host does not know the episode,
    since it was restarted.
    """

    def __init__(self) -> None:
        # Each episode takes a descriptor, and a host may have the episodes of many engines.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._processes: dict[str | None, Processes] = {}
        self._held: dict[EpisodeKey, HostedEpisode] = {}

    async def start(self, agent: str | None, config: AgentConfig) -> tuple[str, LoadedCode | str]:
        """Load the files of an agent. Returns the host's name, and the loaded user code or an error message."""
        processes = self._processes.setdefault(agent, Processes(config))
        try:
            return self.name, await processes.start()
        except ValueError as refused:
            return self.name, str(refused)

    async def hold(self) -> None:
        """Wait forever: the engine that awaits this call gets an error when the host dies."""
        await asyncio.Event().wait()

    async def watch(self, engine: str, life: "list[ObjectRef]") -> None:
        """Wait until an engine has died, then end its episodes.

        Args:
            engine: id of the engine.
            life: the engine's call of `hold`, as a list of one reference. The engine owns it, so Ray raises
                `OwnerDiedError` here when the engine dies.
        """
        from ray.exceptions import RayError

        try:
            await life[0]
        except RayError:
            await asyncio.gather(*(self.close(key) for key in list(self._held) if key[0] == engine))

    async def open(
        self, key: EpisodeKey, agent: str | None, row: dict[str, Any], seed: int, timeout_s: float
    ) -> CallResult:
        """Begin an episode; the value of the result is the content that the environment's `reset` returned, and its
        images.

        See `Processes.open`.
        """
        processes = self._processes.get(agent)
        if processes is None:
            return None, self._unknown()
        held = self._held[key] = HostedEpisode()

        async def opened() -> tuple[Content, list[str]]:
            held.session = await processes.open(row, seed, timeout_s)
            return held.session.opened, held.session.opened_images

        return await outcome(held.begin(opened()))

    async def step(self, key: EpisodeKey, *arguments: Any) -> CallResult:
        """See `Session.step`."""
        return await self._ask(key, lambda session: session.step(*arguments))

    async def call(self, key: EpisodeKey, *arguments: Any) -> CallResult:
        """See `Session.call`."""
        return await self._ask(key, lambda session: session.call(*arguments))

    async def _ask(self, key: EpisodeKey, do: Callable[[Session], Coroutine[Any, Any, Any]]) -> CallResult:
        held = self._held.get(key)
        if held is None or held.session is None:
            return None, self._unknown()
        return await outcome(held.begin(do(held.session)))

    def _unknown(self) -> EpisodeLost:
        return EpisodeLost(f"ProcessError: the environment host {self.name} was started again")

    async def run(self, key: EpisodeKey, row: dict[str, Any]) -> CallResult:
        """Start the program of the episode; returns the first result of `next`."""
        if key in self._held:
            self._held[key].run(row)
        return await self.next(key)

    async def next(self, key: EpisodeKey) -> CallResult:
        """See `HostedEpisode.next`."""
        held = self._held.get(key)
        return (None, self._unknown()) if held is None else await held.next()

    async def answer(self, key: EpisodeKey, frame: dict[str, Any]) -> CallResult:
        """Send the program the answer to its question, as a frame."""
        held = self._held.get(key)
        if held is not None and held.send is not None:
            # If the process has ended, its request reports how.
            with suppress(OSError):
                await held.send(frame)
        return None, None

    async def place(self, key: EpisodeKey) -> CallResult:
        """Cancel the running request, and return the file and line at which the process is; see `Session.place`."""
        held = self._held.get(key)
        if held is None or held.session is None:
            return "", None
        await held.stop()
        return await held.session.place(), None

    async def close(self, key: EpisodeKey, well: bool = False) -> CallResult:
        """End the episode, and wait for its end; see `Session.close`."""
        held = self._held.pop(key, None)
        if held is not None:
            await held.stop()
            if held.session is not None:
                await held.session.close(well)
                assert held.session.closing is not None
                await held.session.closing
        return None, None
