"""Environment processes: one for each open episode, so that a crash or a hang fails only its own row.

    processes = Processes(config.agent)
    loaded = await processes.start()                              # imports the user's files once
    session = await processes.open(row, seed, timeout_s=60)       # forks a process
    observation = await session.step(message, timeout_s=30)
    text = await session.call("calc", {"expression": "1+1"}, timeout_s=30)
    await session.close()
    await processes.close()                                       # kills all processes

All calls run on one event loop. The processes run `inside/main.py`.

With `agent.episodes_per_process` a process serves further episodes, if the one before ended well and left no thread,
child, task or timer. If an episode cannot begin in such a process, it begins again in a fresh one.

With 512 open episodes on two cores: 2 ms to fork a process (10 ms if the user's files import torch), 0.1 ms for a step,
half of it CPU time of the run, and 1.8 MiB of memory of its own for each process.
"""

import asyncio
import itertools
import logging
from typing import Any

from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.session import Session
from pipeline.agent.zygote import LoadedCode, ZygoteHandle, ZygoteLost
from pipeline.config.agent import AgentConfig

log = logging.getLogger(__name__)

RETRY_S = 0.2  # seconds until the next attempt to start a process that the machine had no room for


class Processes:
    """Starts and ends the environment processes for the episodes of one `agent` section."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._zygote: ZygoteHandle | None = None
        self._loaded: LoadedCode | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._sessions: set[Session] = set()
        self._free: list[Session] = []
        """Ended sessions whose processes may serve another session."""

    async def start(self) -> LoadedCode:
        """Import the user's files, unless they are imported already; returns their description.

        Raises:
            ValueError: the files do not load within `START_S`; the message names the key of the settings.
        """
        return (await self._started())[1]

    async def _started(self) -> tuple[ZygoteHandle, LoadedCode]:
        async with self._starting:
            if self._zygote is None or self._loaded is None or self._zygote.lost is not None:
                await self._end_zygote()
                self._zygote = ZygoteHandle(self._config)
                try:
                    self._loaded = await self._zygote.load()
                    if self._loaded.note:
                        log.warning(self._loaded.note)
                except BaseException:
                    await self._end_zygote()
                    raise
            return self._zygote, self._loaded

    async def _end_zygote(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.close()

    async def open(self, row: dict[str, Any], seed: int, timeout_s: float) -> Session:
        """Start the process of an episode, and begin the episode if it has an environment.

        Args:
            row: `prompt`, `data_source`, `ground_truth` and `extra_info`, as JSON data.
            seed: seed of the environment's `reset`.
            timeout_s: seconds for start and reset together; if the machine has no memory or descriptors left for a
                process, the start is repeated until then.

        Raises:
            EpisodeFailed: the process could not be started, or the environment failed.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        further = self._config.episodes_per_process - 1
        fresh = False
        while True:
            try:
                zygote, loaded = await self._started()
                session = None if fresh else self._used()
                session = session or Session(zygote, next(self._numbers), loaded, further, self._keep)
            except (ValueError, OSError, ZygoteLost) as error:
                raise EpisodeFailed(f"ProcessError: no process could be started: {error}") from None
            self._sessions.add(session)
            try:
                await session.open(row, seed, max(0.0, deadline - clock()))
                session.when_ended(self._sessions.discard)
                return session
            except EpisodeFailed:
                self._sessions.discard(session)
                if (session.found_room and session.fresh) or clock() + RETRY_S > deadline:
                    raise
                fresh = True
            except BaseException:
                session.kill()
                self._sessions.discard(session)
                raise
            await asyncio.sleep(RETRY_S)

    def _keep(self, session: Session) -> None:
        self._sessions.discard(session)
        self._free.append(session)

    def _used(self) -> Session | None:
        """Return a session in a process that has served earlier episodes; None if no such process is free."""
        while self._free:
            former = self._free.pop()
            if former.is_there:
                return former.following()
            former.kill()
        return None

    async def close(self) -> None:
        """Kill all processes. Environments that are closing get `CLOSE_S` seconds to finish."""
        await asyncio.gather(*(session.closing for session in self._sessions if session.closing is not None))
        for session in [*self._sessions, *self._free]:
            session.kill()
        async with self._starting:
            await self._end_zygote()
