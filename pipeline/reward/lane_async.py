"""A lane's calls of `async def` functions: all at once, on one event loop that lives as long as the lane."""

import asyncio
import json
import os
from collections.abc import Awaitable
from typing import Any

from pipeline.reward.lane import LENGTH, Channel, Runner, frame, no_score_after


def serve(runner: Runner, channel: Channel, call: dict[str, Any]) -> None:
    """Answer calls of `async def` functions, `call` being the first, until the parent closes the socket."""
    asyncio.run(_serve(runner, channel, call))


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """What a single awaitable gives."""

    async def result() -> Any:
        return await awaitable

    return asyncio.run(result())


async def _serve(runner: Runner, channel: Channel, call: Any) -> None:
    reader, writer = await asyncio.open_connection(sock=channel.connection)
    tasks: set[asyncio.Task[None]] = set()

    async def one(call: Any) -> None:
        result = await _run(runner, call)
        writer.write(frame(runner.answer(call, result)))

    while True:
        task = asyncio.create_task(one(call))
        # The loop itself holds tasks weakly.
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            (count,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            call = json.loads(await reader.readexactly(count))
        except asyncio.IncompleteReadError:
            # The parent has gone; so is whoever waits for what is still under way.
            os._exit(0)


async def _run(runner: Runner, call: dict[str, Any]) -> Any:
    """What the function gives within the limit of the call, or the exception it raised."""
    limit = call["limit_s"]
    clock = asyncio.timeout(limit)
    result: Any
    try:
        async with clock:
            result = await runner.begin(call)
    except TimeoutError as error:
        result = TimeoutError(no_score_after(limit)) if clock.expired() else error
    except BaseException as error:  # noqa: BLE001
        result = error
    runner.end_copies()
    return result
