"""The program of a reward worker: it loads the reward functions and calls them until the pool closes the connection.

1. The pool sends the settings and then calls, pickled; results are JSON. Output that a function prints is lost.
2. Plain functions run one call after the other in the main thread, without an event loop, so they may start an event
   loop or use signals. `async def` functions run at the same time on one event loop; a worker that has got such a call
   gets no more calls of plain functions.
3. The kernel kills the process when the thread that started it ends, and when a rule uses more CPU time than its budget
   (`rules/budget.py`).
4. A function may fork. The fork has no connection to the pool, and ends when it returns from the function, because only
   the worker sends the row's result.
"""

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import (
    BATCH_KEYWORDS,
    EPISODE_KEYWORDS,
    KEYWORDS,
    TABLE,
    episode_keywords,
    functions,
    keywords_of,
    load,
)
from pipeline.reward.result import Answer, answer_from
from pipeline.reward.rules import rule_of
from pipeline.reward.rules.budget import budget_of
from pipeline.reward.sandbox import rule as sandbox

NO_SCORE = "no score after {:g} s"  # the message for a call that took too long; the number is its limit


class Request(NamedTuple):
    """One call of a reward function, in the form in which the pool sends it (see `worker.RewardCall`)."""

    number: int
    function: str
    rows: list[list[Any]]
    limit_s: float


def main(descriptor: int, parent: int) -> None:
    """Load the reward functions, and make calls until the pool closes the connection.

    Args:
        descriptor: file descriptor of this process's end of the connection.
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        from pipeline.reward.sandbox.inside import limits

        limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A crash would leave a dump of this process in the current folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    line = Line(descriptor)
    settings = line.receive()
    try:
        caller = Caller(settings)
    except ValueError as error:
        line.end_of_fork(error.__cause__)
        return line.send({"refused": str(error)})
    line.end_of_fork(None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    line.send({"asynchronous": caller.asynchronous})
    with suppress(EOFError):
        while True:
            requests = line.receive()
            if requests[0].function in caller.asynchronous:
                return asyncio.run(_serve_async(caller, line, requests))
            # A row's result is sent before the next row begins, so the pool knows during which row a worker died.
            for request in requests:
                line.answer(caller, request, caller.run(request))


class Line:
    """The worker's end of the connection to the pool. Processes that a function starts do not inherit it."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._connection = Connection(descriptor)
        self._process = os.getpid()
        # Otherwise a fork would print its parent's buffered output again.
        os.register_at_fork(before=_flush, after_in_child=self._connection.close)

    def receive(self) -> Any:
        """Receive the pool's next message. Raises `EOFError` if the pool has closed the connection."""
        return self._connection.recv()

    def send(self, content: Any) -> None:
        """Send the pool a JSON value."""
        self._connection.send_bytes(json.dumps(content).encode())

    def answer(self, caller: "Caller", request: Request, result: Any) -> None:
        """Send the results of a call to the pool. `result` is the function's return value, or its exception."""
        self.end_of_fork(result)
        self.send({"id": request.number, "answers": caller.answers(request, result)})

    def end_of_fork(self, result: Any) -> None:
        """If this process is a fork of the worker, end it with the exit code of a script that returned or raised
        `result`."""
        if os.getpid() != self._process:
            _flush()
            code = result.code if isinstance(result, SystemExit) else int(isinstance(result, BaseException))
            # The interpreter's own end would run the worker's `atexit` functions.
            os._exit(code & 255 if isinstance(code, int) else int(code is not None))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A function may have replaced the stream by anything.
        with suppress(Exception):
            stream.flush()


async def _serve_async(caller: "Caller", line: Line, requests: list[Request]) -> None:
    """Make calls of `async def` functions at the same time: first `requests`, then all that the pool sends."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[list[Request]]()
    # A fork that returns to the event loop would serve the other rows, and take the wake-ups of the worker's loop.
    os.register_at_fork(after_in_child=lambda: loop.call_soon(line.end_of_fork, None))

    async def answer(request: Request) -> None:
        clock = asyncio.timeout(request.limit_s)
        result: Any
        try:
            async with clock:
                result = await caller.begin(request)
        except BaseException as error:  # noqa: BLE001
            result = TimeoutError(NO_SCORE.format(request.limit_s)) if clock.expired() else error
        line.answer(caller, request, result)

    def receive() -> None:
        # A thread, so that the pool can hand calls over while a function blocks the loop.
        with suppress(EOFError):
            while True:
                loop.call_soon_threadsafe(received.put_nowait, line.receive())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    async with asyncio.TaskGroup() as tasks:
        while True:
            for request in requests:
                tasks.create_task(answer(request))
            requests = await received.get()


class Caller:
    """Loads the reward functions and calls them.

    Raises:
        ValueError: (constructor) a function of the user cannot be loaded.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._functions = {function.name: function for function in functions(config)}
        self._loaded = {name: load(function) for name, function in self._functions.items() if function.path is not None}
        self.asynchronous = [name for name, loaded in self._loaded.items() if _is_async(loaded)]
        """Names of the `async def` functions."""
        self._prepared: set[str] = set()  # data sources for which the rule has been called before

    def run(self, request: Request) -> Any:
        """Make a call of a plain function. Returns the function's result, or the exception that it raised."""
        # A function may raise anything, `SystemExit` included; its row carries the error, which is counted.
        try:
            result = self.begin(request)
            return asyncio.run(_value(result)) if inspect.isawaitable(result) else result
        except BaseException as error:  # noqa: BLE001
            return error

    def begin(self, request: Request) -> Any:
        """Call the function of `request`. Returns the function's result, an awaitable for an `async def` function."""
        function, rows = self._functions[request.function], request.rows
        if function.path is None:
            return self._score_by_rule(*rows[0][:3])
        loaded = self._loaded[function.name]
        columns = [list(column) for column in zip(*rows, strict=True)]
        if function.batch and keywords_of(loaded, batch=True) == (TABLE,):
            pa = importlib.import_module("pyarrow")
            names = [*KEYWORDS, *EPISODE_KEYWORDS][: len(columns)]
            kinds = [pa.int32() if name == "turns" else pa.string() for name in names]
            table = pa.table([pa.array(*column) for column in zip(columns, kinds, strict=True)], names=names)
            return loaded(table=table, **function.kwargs)
        columns[2] = [_loads(truth) for truth in columns[2]]
        columns[3] = [_loads(extra) or {} for extra in columns[3]]
        filled = dict(zip(BATCH_KEYWORDS if function.batch else KEYWORDS, columns, strict=False))
        # For rows that are not episodes, `columns` ends here.
        episodes = dict(zip(EPISODE_KEYWORDS, columns[len(KEYWORDS) :], strict=False))
        for name in episode_keywords(loaded, function):
            if name in episodes:
                filled[name] = [_loads(text) for text in episodes[name]] if name == "messages" else episodes[name]
        if not function.batch:
            filled = {name: column[0] for name, column in filled.items()}
        return loaded(**filled, **function.kwargs)

    def _score_by_rule(self, source: str, text: str, ground_truth: str | None) -> Any:
        truth = _loads(ground_truth)
        if source in sandbox.DATA_SOURCES:
            return sandbox.compute_score(text, truth, self._config.sandbox)
        rule, kwargs = rule_of(source), self._config.rule_kwargs.get(source, {})
        budget = budget_of(rule)
        if budget is None:
            return rule(text, truth, **kwargs)
        if source not in self._prepared and budget.prepare is not None:
            budget.prepare()
        self._prepared.add(source)
        with _killed_after(budget.cpu_s):
            return rule(text, truth, **kwargs)

    def answers(self, request: Request, result: Any) -> list[Answer]:
        """Convert the function's return value or exception to one result per row of the call."""
        count = len(request.rows)
        if isinstance(result, BaseException):
            return [answer_from(result, self._place(request, result))] * count
        if not self._functions[request.function].batch:
            return [answer_from(result)]
        try:
            plain = next((name for name in ("to_pylist", "tolist") if hasattr(result, name)), None)
            results = list(getattr(result, plain)() if plain else result)
            if len(results) != count:
                raise ValueError(f"the batch function returned {len(results)} results for {count} rows")
        except Exception as error:  # noqa: BLE001
            return [answer_from(error)] * count
        return [answer_from(inner) for inner in results]

    def _place(self, request: Request, error: BaseException) -> str:
        """Return file name and line number of the user's function that raised `error`, as text in brackets; empty for
        rules."""
        loaded = self._loaded.get(request.function)
        code = getattr(inspect.unwrap(loaded), "__code__", None) if loaded else None
        if code is None:
            return ""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == code.co_filename]
        return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


@contextmanager
def _killed_after(cpu_s: float) -> Iterator[None]:
    """While the block runs, let the kernel kill this process (SIGPROF) after `cpu_s` seconds of CPU time, even inside
    a C library."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


async def _value(awaitable: Any) -> Any:
    return await awaitable


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)
