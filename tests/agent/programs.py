"""Programs of the tests, as users write them; the good ones and those that fail in many ways."""

import asyncio
import contextlib
import os
import struct
import subprocess
import sys
import time

from pipeline.agent import EpisodeOver


async def run(row, chat):
    """What `row["ground_truth"]` names."""
    return await globals()[row["ground_truth"]](row, chat)


async def count(row, chat):
    messages = [*row["prompt"]]
    for _ in range(2):
        answer = await chat(messages)
        messages += [answer, {"role": "user", "content": answer.text + "!"}]
    last = await chat(messages, tools=[])
    return {"reward": float(last.text), "calls": len(last.calls), "seed": row["extra_info"]}


async def number(row, chat):
    await chat([])
    return 2


async def many(row, chat):
    answers = await asyncio.gather(*(chat([{"role": "user", "content": str(i)}]) for i in range(3000)))
    assert [answer.text for answer in answers] == [str(i) for i in range(3000)]
    return 1.0


async def hundred(row, chat):
    answers = await asyncio.gather(*(chat([{"role": "user", "content": str(i)}]) for i in range(100)))
    assert [answer.text for answer in answers] == [str(i) for i in range(100)]
    return 1.0


async def let_pass(row, chat):
    await chat([{"role": "user", "content": "over"}])


async def let_group_pass(row, chat):
    try:
        await chat([{"role": "user", "content": "over"}])
    except EpisodeOver as over:
        group = RuntimeError()
        group.exceptions = (over, over)
        raise group from None


async def mistaken(row, chat):
    return await chat("hello")


async def cancel(row, chat):
    try:
        await asyncio.wait_for(chat([{"role": "user", "content": "wait"}]), 0.05)
    except TimeoutError:
        return 1.0


async def leave_some(row, chat):
    asyncio.ensure_future(chat([{"role": "user", "content": "wait"}]))
    await chat([{"role": "user", "content": "1"}])
    return 1.0


async def fork(row, chat):
    """The children ask, go back to the event loop, return and leave."""
    await chat([{"role": "user", "content": "1"}])
    codes = []
    for child in (_asks(chat), asyncio.sleep(0), _returns(), _leaves()):
        process = os.fork()
        if process == 0:
            await child
            sys.exit(9)
        child.close()
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    assert codes == [9, 0, 9, 3]
    program = subprocess.Popen(["sleep", "60"], close_fds=False).pid
    await chat([{"role": "user", "content": "2"}])
    return 1.0 - (str(chat.__self__._connection.fileno()) in os.listdir(f"/proc/{program}/fd"))


async def _asks(chat):
    with contextlib.suppress(OSError):
        await chat([{"role": "user", "content": "of the child"}])


async def _returns():
    return None


async def _leaves():
    sys.exit(3)


async def boom(row, chat):
    await chat([{"role": "user", "content": "1"}])
    raise ValueError("boom")


async def leave(row, chat):
    sys.exit("bye")


async def exit(row, chat):
    await chat([{"role": "user", "content": "1"}])
    os._exit(3)


async def hang(row, chat):
    await chat([{"role": "user", "content": "1"}])
    await asyncio.sleep(1000)


async def block(row, chat):
    time.sleep(1000)


async def text(row, chat):
    return "1.0"


async def nan(row, chat):
    return {"reward": float("nan")}


async def nan_of_an_answer(row, chat):
    return {"reward": 1.0, "rewards": [1.0, float("nan")]}


async def one_reward(row, chat):
    return {"rewards": 1.0}


async def no_reward(row, chat):
    return {"rewards": [None]}


async def rewards(row, chat):
    class Array(list):
        def tolist(self):
            return [*self]

    return {"rewards": Array([1, 0.5]), "acc": 1}


async def parts(row, chat):
    return {"reward": 1.0, "x": object()}


def _write(chat, *frames):
    connection = chat.__self__._connection
    for frame in frames:
        connection.sendall(struct.pack(">I", len(frame)) + frame)


async def garbage(row, chat):
    _write(chat, b"{")
    await asyncio.sleep(1000)


async def no_number(row, chat):
    _write(chat, b'{"id": 1, "chat": {"x": []}}')
    await asyncio.sleep(1000)


async def no_messages(row, chat):
    _write(chat, b'{"id": 1, "chat": 5}', b'{"id": 1, "chat": 7, "cancel": 1}', b'{"id": 1, "chat": 5, "tools": 5}')
    await chat([{"role": "user", "content": "1"}])
    return 1.0


async def unheard(row, chat):
    _write(chat, b'{"id": 1, "chat": 5, "messages": [{"role": "user", "content": "1"}]}')
    # The answer comes meanwhile, and is not read.
    time.sleep(0.3)
    return 1.0


async def same_numbers(row, chat):
    _write(chat, *[b'{"id": 1, "chat": 5, "messages": [{"role": "user", "content": "wait"}]}'] * 60)
    await asyncio.sleep(0.05)
    return 1.0


async def long_frame(row, chat):
    chat.__self__._connection.sendall(b"\xff\xff\xff\xff")
    await asyncio.sleep(1000)


async def lie(row, chat):
    _write(chat, b'{"reward": "much", "done": 5}')
    await asyncio.sleep(1000)


async def lie_about_answers(row, chat):
    _write(chat, b'{"id": 1, "reward": 1, "rewards": ["much"], "parts": {}}')
    await asyncio.sleep(1000)


def plain(row, chat):
    return 1.0


async def no_row():
    return 1.0
