"""The program of a lane: a process of its own in which rules and reward functions run, so that it can be killed.

    python -c ... <socket> <parent>    started by `worker.py`, in a session of its own

1. Plain functions run one call after another in the main thread, with no event loop around them, so they may start one
   or use signals. `async def` functions run all at once on one event loop; a lane that was given such a call takes no
   plain ones any more.
2. Frames on one socket are all that goes in and out: a length, then JSON. Results are never pickled. What a function
   prints goes nowhere.
3. A function may do anything to this process: end it, fork it, close its descriptors. The parent believes nothing that
   is not a well-formed frame, and has the deadlines.
"""

import ctypes
import importlib
import inspect
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from typing import Any

from pipeline.reward.functions import BATCH_KEYWORDS, KEYWORDS, TABLE, Function, keywords_of, load
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox import rule as sandbox
from pipeline.reward.sandbox.config import SandboxConfig

LENGTH = struct.Struct(">I")
"""What a frame begins with: the bytes that follow."""

FLOAT32_MAX = 3.4028234663852886e38
MAX_ERROR = 500
"""Characters of a row's error."""
MAX_PARTS = 100_000
"""Characters of a row's parts as JSON."""
MAX_DEPTH = 20
"""Lists and mappings inside each other in a row's parts."""

Row = list[str | None]
"""data_source, response, ground_truth as JSON or null, extra_info as JSON or null."""
Answer = tuple[float, str, str | None]
"""Score, parts as a JSON mapping, and why there is no score, else None."""


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the parent closes the socket.

    Args:
        descriptor: the inherited socket.
        parent: process id of the parent.
    """
    _die_with(parent)
    # A crash would leave a dump of this process in the current folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = Channel(socket.socket(fileno=descriptor))
    settings = channel.receive()
    assert settings is not None
    functions = {entry["name"]: Function(**entry) for entry in settings["functions"]}
    try:
        runner = Runner(functions, settings["rule_kwargs"], SandboxConfig(**settings["sandbox"]))
    except ValueError as error:
        channel.send({"refused": str(error)})
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    channel.send({"asynchronous": runner.asynchronous})
    while (call := channel.receive()) is not None:
        if call["function"] in runner.asynchronous:
            # A third of the time it takes to start would go into the import of asyncio.
            from pipeline.reward.lane_async import serve

            return serve(runner, channel, call)
        # The answer of a row is out before the next one begins, so it is known which row this process died of.
        for part in runner.parts(call):
            channel.send(runner.answer(part, runner.run(part)))


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, whatever runs here by then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


class Channel:
    """Frames over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def receive(self) -> Any:
        """The next frame, None at the end."""
        head = self._exactly(LENGTH.size)
        return None if head is None else json.loads(self._exactly(LENGTH.unpack(head)[0]) or b"null")

    def send(self, content: Any) -> None:
        self.connection.sendall(frame(content))

    def _exactly(self, count: int) -> bytes | None:
        parts = []
        while count:
            part = self.connection.recv(min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def frame(content: Any) -> bytes:
    """`content` as one frame."""
    text = json.dumps(content).encode("ascii")
    return LENGTH.pack(len(text)) + text


class Runner:
    """The loaded functions.

    Raises:
        ValueError: (when made) a function of the user's own cannot be loaded, or no rule takes its options.
    """

    def __init__(
        self, functions: dict[str, Function], rule_kwargs: dict[str, dict[str, Any]], limits: SandboxConfig
    ) -> None:
        self._functions, self._rule_kwargs, self._sandbox = functions, rule_kwargs, limits
        self._loaded = {name: load(function) for name, function in functions.items() if function.path is not None}
        self.asynchronous = [name for name, loaded in self._loaded.items() if _is_async(loaded)]
        """Names of the `async def` functions."""
        self._process = os.getpid()

    def parts(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """What is called one after the other: the rows of a frame, or all of them where the function takes batches."""
        if self._functions[call["function"]].batch:
            return [call]
        return [{**call, "rows": [row]} for row in call["rows"]]

    def run(self, call: dict[str, Any]) -> Any:
        """What a plain function returns for a call, or the exception it raised."""
        # Foreign code may raise anything, `SystemExit` included; its row carries the error, which is counted.
        try:
            result = self.begin(call)
            if inspect.isawaitable(result):
                from pipeline.reward.lane_async import wait_for

                # Not declared `async def`, yet it returns something to be awaited.
                result = wait_for(result)
        except BaseException as error:  # noqa: BLE001
            result = error
        self.end_copies()
        return result

    def answer(self, call: dict[str, Any], result: Any) -> dict[str, Any]:
        """The frame with what became of each row of a call."""
        place = self._place(call, result)
        if not self._functions[call["function"]].batch or isinstance(result, BaseException):
            return {"id": call["id"], "answers": [checked(result, place)] * len(call["rows"])}
        try:
            plain = next((name for name in ("to_pylist", "tolist") if hasattr(result, name)), None)
            results = list(getattr(result, plain)() if plain else result)
            if len(results) != len(call["rows"]):
                raise ValueError(f"the batch function returned {len(results)} results for {len(call['rows'])} rows")
        except Exception as error:  # noqa: BLE001
            return {"id": call["id"], "answers": [checked(error)] * len(call["rows"])}
        return {"id": call["id"], "answers": [checked(one) for one in results]}

    def begin(self, call: dict[str, Any]) -> Any:
        """Call the function; whatever it returns, or raises."""
        function = self._functions[call["function"]]
        columns = list(zip(*call["rows"], strict=True))
        if function.path is None:
            ((source, text, truth, _),) = call["rows"]
            if source in sandbox.DATA_SOURCES:
                return sandbox.compute_score(text, _loads(truth), self._sandbox)
            return rule_of(source)(text, _loads(truth), **self._rule_kwargs.get(source, {}))
        loaded = self._loaded[function.name]
        if not function.batch:
            ((source, text, truth, extra),) = call["rows"]
            values = (source, text, _loads(truth), _loads(extra) or {})
            return loaded(**dict(zip(KEYWORDS, values, strict=True)), **function.kwargs)
        if keywords_of(loaded, batch=True) == (TABLE,):
            pa = importlib.import_module("pyarrow")
            table = pa.table([pa.array(column, pa.string()) for column in columns], names=KEYWORDS)
            return loaded(table=table, **function.kwargs)
        sources, texts, truths, extras = columns
        lists = (list(sources), list(texts), [_loads(truth) for truth in truths], [_loads(e) or {} for e in extras])
        return loaded(**dict(zip(BATCH_KEYWORDS, lists, strict=True)), **function.kwargs)

    def end_copies(self) -> None:
        """A copy of this process that the function forked and let return would answer a second time."""
        if os.getpid() != self._process:
            os._exit(0)

    def _place(self, call: dict[str, Any], result: Any) -> str:
        """Where in the user's file an exception arose, in words; nothing for other results and for rules."""
        loaded = self._loaded.get(call["function"])
        file = getattr(inspect.unwrap(loaded), "__code__", None) if loaded else None
        if file is None or not isinstance(result, BaseException):
            return ""
        own = [f for f in traceback.extract_tb(result.__traceback__) if f.filename == file.co_filename]
        return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def no_score_after(limit: float) -> str:
    """The words for a call that took too long."""
    return f"no score after {limit:g} s"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def checked(result: Any, place: str = "") -> Answer:
    """Score, parts as JSON, and error of what a reward function returned or raised."""
    if isinstance(result, BaseException):
        return 0.0, "{}", _message(result, place)
    # What foreign code returned may fail to convert in any way; that too is an error of its row alone.
    try:
        score, parts = _split(result)
        text = json.dumps({_text(str(name)): _part(value) for name, value in parts.items()})
        if len(text) > MAX_PARTS:
            raise ValueError(f"the parts of the reward are {len(text):,} characters as JSON; at most {MAX_PARTS:,} fit")
        return score, text, None
    except Exception as error:  # noqa: BLE001
        return 0.0, "{}", _message(error)


def _message(error: BaseException, place: str = "") -> str:
    try:
        text = _text(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001
        text = f"{type(error).__name__}, which cannot be put into words"
    return text[: MAX_ERROR - len(place)] + place


def _text(text: str) -> str:
    # Arrow strings are UTF-8: a lone surrogate would fail the whole table.
    return text.encode(errors="replace").decode()


def _split(result: Any) -> tuple[float, dict[Any, Any]]:
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in parts:
        raise ValueError(
            f"the reward function returned a dict without the key 'score' (keys: {sorted(map(str, parts))})"
        )
    score = parts.pop("score")
    score = score.tolist() if hasattr(score, "tolist") else score
    if not isinstance(score, Real):
        raise ValueError(f"the score must be a number, not a {type(score).__name__}")
    value = float(score)
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise ValueError(f"the score is {value}, not a finite float32")
    return value, parts


def _part(value: Any, depth: int = 0) -> Any:
    """A part of a reward as plain JSON values that every reader can hold; NumPy and torch values are converted."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a part of the reward holds more than {MAX_DEPTH} lists or mappings inside each other")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"a part of the reward is {number}, which JSON cannot hold")
        return int(value) if isinstance(value, int) else number
    if isinstance(value, dict):
        return {_text(str(name)): _part(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_part(inner, depth + 1) for inner in value]
    if hasattr(value, "tolist"):
        return _part(value.tolist(), depth + 1)
    raise ValueError(f"a part of the reward is a {type(value).__name__}, which JSON cannot hold")
