"""An environment that fails in many ways."""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time

from pipeline.agent import Environment, Observation, ToolError
from pipeline.agent.inside import frames


class Boom(Exception):
    def __str__(self):
        raise RuntimeError


class Hostile(Environment):
    def reset(self, row, seed):
        if row["ground_truth"] == "content":
            return 5
        return "begin"

    def step(self, message):
        return getattr(self, message.text)()

    def good(self):
        return Observation("well", reward=0.5)

    def boom(self):
        raise Boom

    def tool_error(self):
        raise ToolError("no tool")

    def leave(self):
        sys.exit("bye")

    def interrupt(self):
        raise KeyboardInterrupt

    def exit(self):
        os._exit(3)

    def crash(self):
        ctypes.string_at(0)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def loop(self):
        while True:
            pass

    def sleep(self):
        time.sleep(1000)

    def stop(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(1000)

    def catch(self):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1000)

    def fork(self):
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(4)

    def daemons(self):
        for _ in range(3):
            process = os.fork()
            if process == 0:
                os.setsid()
                for _ in range(2):
                    if os.fork() == 0:
                        os.setsid()
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                        time.sleep(1000)
                os._exit(0)
            os.waitpid(process, 0)
        return Observation("well", reward=0.5)

    def fork_on(self):
        """The child goes on as its parent does, if more slowly."""
        if os.fork() == 0:
            time.sleep(0.1)
            return Observation("child", reward=1.0)
        os.wait()
        return Observation("well", reward=0.5)

    def fork_and_leave(self):
        if (process := os.fork()) == 0:
            sys.exit(7)
        return Observation("well", reward=0.5 if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7 else 0)

    def print(self):
        for _ in range(1024):
            sys.stdout.write("x" * (1 << 20))
            sys.stderr.write("y" * (1 << 10))
        return Observation("well", reward=0.5)

    def close_all(self):
        os.closerange(0, 1000)
        time.sleep(1000)

    def spend(self):
        held = []
        while True:
            held.append(bytearray(1 << 28))

    def nothing(self):
        return None

    def nan(self):
        return Observation("", reward=float("nan"))

    def large(self):
        return Observation("", reward=1e39)

    def long_parts(self):
        return Observation("", parts={"x": "y" * 1_000_000})

    def bad_list(self):
        class Bad:
            def tolist(self):
                raise Boom

        return Observation("", parts={"x": [Bad()]})

    def text_acc(self):
        return Observation("", parts={"acc": "good"})

    def large_part(self):
        return Observation("", parts={"x": 10**400})

    def text_reward(self):
        return Observation("", reward="1.0")

    def content(self):
        return Observation(b"bytes")

    def message(self):
        return Observation([{"role": "user", "content": "x", "name": "y"}])

    def done(self):
        return Observation("", done="no")

    def parts(self):
        return Observation("", parts={"acc": float("inf")})

    def object_parts(self):
        return Observation("", parts={"x": object()})

    def deep(self):
        value = {}
        for _ in range(100_000):
            value = {"x": value}
        return Observation("", parts=value)

    def long(self):
        return Observation("x" * 100_000_000)

    def many(self):
        return Observation([{"role": "user", "content": ""}] * 300_000)

    def long_messages(self):
        return Observation([{"role": "user", "content": "x" * 100_000}] * 100)

    def forge(self, **fields):
        """A frame in the place of the next one."""
        frame = frames.encode({"id": 1, **fields})
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(descriptor)).sendall(frame)

    def forge_late(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(1.2)
        self.forge(late="x" * 4_000_000)
        time.sleep(1000)

    def forge_error(self):
        self.forge(error="x" * 4_000_000)
        return "x"

    def forge_deep(self):
        value = 1
        for _ in range(150):
            value = [value]
        self.forge(content=value)
        return "x"

    def surrogates(self):
        return Observation("a\ud800b", reward=0.5)

    def write(self):
        """Write to the connection what is no frame."""
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\x7f\xff\xff\xff garbage")
        return "x"

    def thread(self):
        threading.Thread(target=self.boom).start()
        return Observation("well", reward=0.5)


class Served(Hostile):
    """Tells its process, and how many episodes have begun there."""

    begun = 0

    def reset(self, row, seed):
        Served.begun += 1
        if Served.begun > 1 and row["ground_truth"] == "raise":
            raise ValueError("something is left")
        if Served.begun > 1 and row["ground_truth"] == "exit":
            os._exit(3)
        return f"{os.getpid()} {Served.begun} {random.random()}"

    def close(self):
        if hasattr(self, "bad"):
            raise ValueError("shut")

    def badly(self):
        self.bad = True
        return "closes badly"

    def alarm(self):
        signal.alarm(1000)
        return "sets a timer"

    def virtual_alarm(self):
        signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
        return "sets a timer"

    def profiling_alarm(self):
        signal.setitimer(signal.ITIMER_PROF, 1000)
        return "sets a timer"

    def running(self):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return "leaves a thread"

    async def task(self):
        self.left = asyncio.ensure_future(asyncio.sleep(1000))
        return "leaves a task"


class Waiting(Environment):
    async def step(self, message):
        return await self.wait()

    async def wait(self):
        await asyncio.sleep(1000)


class Forgetful(Environment):
    """Its `close` leaves a file, and hangs if it is told to."""

    def reset(self, row, seed):
        self.file = row["ground_truth"]
        return "begin"

    def step(self, message):
        time.sleep(float(message.text))
        return "slept"

    def close(self):
        with open(self.file, "w") as file:
            file.write("closed")
        if self.file.endswith("fail"):
            raise ValueError("shut")
        if self.file.endswith("hang"):
            time.sleep(1000)
