"""The reward stage: one score per row, from the rule of its `data_source` or from the user's own function.

A reward that fails is not a 0. The row keeps its place in the stream (blocks must stay equal), its score column holds 0
and `reward_error` says why; the advantage stage masks such rows, and the run stops when `reward.max_error_rate` of an
iteration's rows fail. Scores that are not finite float32 numbers count as failures too.

The user's function has verl's signature and may be `async def`; the rows of a table are then awaited together, each
with its own deadline, on one event loop that lives as long as the stage, so that clients and semaphores may be kept.
"""

import asyncio
import importlib.util
import inspect
import json
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import rows
from pipeline.reward.config import CustomRewardConfig, RewardConfig
from pipeline.reward.rules import RULES, rule_of

FLOAT32_MAX = 3.4028234663852886e38
MAX_ERROR_LENGTH = 500  # characters of a `reward_error`

_INPUTS = ("data_source", "response", "ground_truth", "extra_info")
_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


class Reward:
    """Appends the `REWARD` columns of `pipeline/rows.py` to a table of responses.

    Raises:
        ValueError: (when made) the custom reward function cannot be loaded or cannot take the arguments.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._custom = load_function(config.custom_reward_function) if config.custom_reward_function.path else None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type["Reward"], tuple[RewardConfig]]:
        # The user's function lives in a module that only this process knows: another process loads it again.
        return Reward, (self.config,)

    def __call__(self, table: pa.Table) -> pa.Table:
        start = time.perf_counter()
        results = [self._call(*row) for row in zip(*(table[name].to_pylist() for name in _INPUTS), strict=True)]
        pending = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if pending:
            for i, result in zip(pending, self._wait([results[i] for i in pending]), strict=True):
                results[i] = result
        scored = [_checked(result) for result in results]
        seconds = time.perf_counter() - start
        return rows.append(
            table,
            rows.REWARD,
            {
                "score": [score for score, _, _ in scored],
                "reward_parts": [parts for _, parts, _ in scored],
                "reward_error": [error for _, _, error in scored],
                "reward_s": [seconds] * len(table),
            },
        )

    def _call(self, data_source: str, response: str, ground_truth: str | None, extra_info: str | None) -> Any:
        """What the reward function returns for one row: a result, an awaitable of one, or the exception it raised."""
        # A reward function is foreign code and may raise anything; its row carries the error, which is counted.
        try:
            truth = None if ground_truth is None else json.loads(ground_truth)
            if self._custom is None:
                return rule_of(data_source)(response, truth)
            return self._custom(
                data_source=data_source,
                solution_str=response,
                ground_truth=truth,
                extra_info=(json.loads(extra_info) if extra_info else None) or {},
                **self.config.custom_reward_function.reward_kwargs,
            )
        except Exception as error:  # noqa: BLE001
            return error

    def _wait(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """Results or exceptions of all, awaited together on the stage's own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()
        limit = self.config.custom_reward_function.timeout_s
        future = asyncio.run_coroutine_threadsafe(_gather(awaitables, limit), self._loop)
        # Each row has its own deadline; this one also ends a function that blocks the loop, row after row.
        deadline = limit * len(awaitables) + 1
        try:
            return future.result(timeout=deadline)
        except TimeoutError as error:
            raise TimeoutError(
                f"reward: the async function of {self.config.custom_reward_function.path} blocked its event loop and "
                f"did not score {len(awaitables)} rows within {deadline:g} s; use asynchronous calls in it, or a "
                "plain function"
            ) from error


async def _gather(awaitables: list[Awaitable[Any]], limit: float) -> list[Any]:
    async def one(awaitable: Awaitable[Any]) -> Any:
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await awaitable
        except TimeoutError as error:
            return TimeoutError(f"no score after {limit:g} s") if clock.expired() else error

    return await asyncio.gather(*(one(awaitable) for awaitable in awaitables), return_exceptions=True)


def _checked(result: Any) -> tuple[float, str, str | None]:
    """Score, parts as JSON, and error of what a reward function returned or raised."""
    if isinstance(result, BaseException):
        return 0.0, "{}", _message(result)
    # What foreign code returned may fail to convert in any way; that too is an error of its row alone.
    try:
        score, parts = _split(result)
        return score, json.dumps(parts, allow_nan=False, default=_plain), None
    except Exception as error:  # noqa: BLE001
        return 0.0, "{}", _message(error)


def _message(error: BaseException) -> str:
    # Arrow strings are UTF-8: a lone surrogate in the message would fail the whole table.
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()[:MAX_ERROR_LENGTH]


def _split(result: Any) -> tuple[float, dict[str, Any]]:
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


def _plain(value: Any) -> Any:
    """NumPy and torch values as plain Python, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"a part of the reward is a {type(value).__name__}, which JSON cannot hold")


def load_function(config: CustomRewardConfig) -> Callable[..., Any]:
    """The user's reward function.

    Raises:
        ValueError: the file is missing or fails to load, has no such function, or the function does not take verl's
            keyword arguments and `reward_kwargs`. The sentence names the key to set.
    """
    key = "reward.custom_reward_function"
    path = Path(config.path or "").expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{key}.path is {config.path!r}, which is no Python file (.py); name one that exists")
    taken = sorted(set(config.reward_kwargs) & set(_KEYWORDS))
    if taken:
        raise ValueError(f"{key}.reward_kwargs may not hold {', '.join(taken)}: each row brings its own")
    name = f"custom_reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}.path is {config.path!r}, which Python cannot import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{key}.path: importing {path} failed with {type(error).__name__}: {error}") from error
    function = getattr(module, config.name, None)
    if not callable(function):
        found = sorted(n for n, value in vars(module).items() if inspect.isfunction(value)) or ["none"]
        raise ValueError(f"{key}.name is {config.name!r}, but {path} has no such function (it has: {', '.join(found)})")
    try:
        inspect.signature(function).bind(**dict.fromkeys(_KEYWORDS), **config.reward_kwargs)
    except TypeError as error:
        raise ValueError(
            f"{key}: {config.name} in {path} cannot be called as "
            f"{config.name}({', '.join([*_KEYWORDS, *config.reward_kwargs])}): {error}; change its parameters or "
            f"{key}.reward_kwargs"
        ) from error
    return function


def check_sources(sources: Iterable[str], config: RewardConfig) -> None:
    """Makes sure, before engines start, that every row of the data can be scored.

    Args:
        sources: the `data_source` values of the prompt files, repeats allowed.

    Raises:
        ValueError: a data source has no rule and there is no custom function, or the custom function does not load.
    """
    if config.custom_reward_function.path:
        load_function(config.custom_reward_function)
        return
    for source in sorted(set(sources) - set(RULES), key=str):
        rule_of(source)
