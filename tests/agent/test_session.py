"""What the process of an episode sends leaves the run's event loop free."""

import asyncio
import threading
from typing import Any

import pytest

from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.frames import encode
from pipeline.agent.session import Session
from pipeline.agent.zygote import LoadedCode


class Alone:
    """A zygote without processes: the test holds the other end."""

    def open(self, number: int, theirs: Any) -> "asyncio.Future[Any]":
        """Keep the other end."""
        self.theirs = theirs
        return asyncio.get_running_loop().create_future()

    def signal(self, number: int, what: str) -> None:
        """Do nothing."""


def loaded(*schemas: dict[str, Any]) -> LoadedCode:
    return LoadedCode(list(schemas), {}, environment=False, closes=False, forks=False)


async def largest_gap(work: Any) -> float:
    """Seconds for which the event loop stood still during `work`."""
    loop, gaps = asyncio.get_running_loop(), [0.0]

    async def tick() -> None:
        while True:
            start = loop.time()
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - start)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    await work
    ticking.cancel()
    return max(gaps)


class Endless(asyncio.SelectorEventLoop):
    """A loop whose sockets always have a frame that answers nothing, as that of a process that floods."""

    pieces = 0

    async def sock_recv(self, sock: Any, count: int) -> bytes:  # type: ignore[override]
        """A frame."""
        self.pieces += 1
        return encode({"id": 99}) if self.pieces < 300_000 else b""


def test_frames_without_an_end_are_read_until_the_deadline() -> None:
    async def play() -> None:
        session = Session(Alone(), 0, loaded(), 0, lambda session: None)  # type: ignore[arg-type]
        with pytest.raises(EpisodeFailed, match="no answer from step after 0.1 s"):
            await session._ask("step", "step", 0.1)

    with asyncio.Runner(loop_factory=Endless) as runner:
        runner.run(play())


def test_a_schema_of_many_forms_does_not_hold_the_event_loop() -> None:
    forms: list[dict[str, Any]] = [{"type": "object", "required": [str(number)]} for number in range(100)]
    items = {"type": "array", "items": {"anyOf": [*forms, {"type": "integer"}]}}
    schema = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": items}}}}
    threads: set[int] = set()

    class Noted(dict[str, Any]):
        def get(self, *key: Any) -> Any:
            threads.add(threading.get_ident())
            return super().get(*key)

    schema["function"]["parameters"] = Noted(schema["function"]["parameters"])  # type: ignore[arg-type]

    async def play() -> None:
        zygote = Alone()
        session = Session(zygote, 0, loaded(schema), 0, lambda session: None)  # type: ignore[arg-type]
        with pytest.raises(EpisodeFailed):
            await session.call("f", {"a": [1] * 10}, 0.1)

    asyncio.run(play())
    assert len(threads) == 2, "checked in a thread of its own, and made whole on the loop"
