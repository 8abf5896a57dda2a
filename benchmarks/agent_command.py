"""CPU time and memory of episodes that an OpenAI client drives, as a command and as a program (`agent.program`).

    python -m benchmarks.agent_command --episodes 32 --repeats 3

The client is `examples/agents/higher_lower_client.py`; its answers come from a server that always sends the same one,
six for an episode. The ways take turns, and only ratios within one run are to be trusted. CPU time includes all
processes below this one, up to the end of the episode. Memory is the unshared memory of the processes (USS), summed up
when all episodes have sent their first request.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig

SCRIPT = str(Path(__file__).parents[1] / "examples" / "agents" / "higher_lower_client.py")
WAYS = {"command": AgentConfig(command=["python", SCRIPT]), "program": AgentConfig(program=f"{SCRIPT}:play")}
ROW = {"prompt": [{"role": "user", "content": "Guess."}], "data_source": "x", "ground_truth": "1", "extra_info": None}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "99"}}],
}


class Server:
    """A server of chat completions; it answers the first requests after all episodes have sent theirs."""

    def __init__(self, episodes: int) -> None:
        self.missing, self.all, self.measured = episodes, asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which is one episode."""
        body = json.dumps(ANSWER).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.missing -= 1
        if not self.missing:
            self.all.set()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                length = next(int(field.split(":")[1]) for field in fields if field.startswith("content-length"))
                await reader.readexactly(length)
                await self.measured.wait()
                writer.write(head.encode() + body)
        writer.close()


def below() -> tuple[float, float]:
    """Sum the CPU seconds of the processes below this one, ended ones included, and their unshared memory in MiB."""
    seconds, memory = 0.0, 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
            memory += process.memory_full_info().uss
    return seconds, memory / (1 << 20)


async def play(processes: Processes, episodes: int) -> tuple[float, float]:
    """Run episodes; returns CPU milliseconds and MiB of an episode."""
    server = Server(episodes)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    variables = {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "x"}
    begun, memory = below()

    async def one(number: int) -> Any:
        session = await processes.open(ROW, number, 60)
        ended = asyncio.Event()
        session.when_ended(lambda _: ended.set())
        played = await session.command(ROW, variables)
        assert played.parts["guesses"] == 6
        await session.close()
        await ended.wait()

    playing = asyncio.gather(*(one(number) for number in range(episodes)))
    waits: list[asyncio.Future[Any]] = [playing, asyncio.ensure_future(server.all.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    memory = below()[1] - memory
    server.measured.set()
    await playing
    listening.close()
    return (below()[0] - begun) / episodes * 1e3, memory / episodes


async def measure(args: argparse.Namespace) -> None:
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    held = {}
    for way, config in WAYS.items():
        held[way] = Processes(config)
        began = time.perf_counter()
        await held[way].start()
        print(f"{way}: {time.perf_counter() - began:.1f} s to start", file=sys.stderr)
    for _ in range(args.repeats):
        for way, processes in held.items():
            found[way].append(await play(processes, args.episodes))
    for processes in held.values():
        await processes.close()
    for way, repeats in found.items():
        cpu, memory = (statistics.median(values) for values in zip(*repeats, strict=True))
        ratios = [
            statistics.median(one[which] / other[which] for one, other in zip(found["command"], repeats, strict=True))
            for which in range(2)
        ]
        print(f"{way:13} CPU {cpu:6.1f} ms ({ratios[0]:.1f} times less), memory {memory:5.1f} MiB ({ratios[1]:.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))
