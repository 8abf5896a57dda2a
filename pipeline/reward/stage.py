"""The reward stage: one score per row, from the rule of its `data_source`, functions of the user, or a reward model,
whose numbers the stage before has put beside the rows.

A reward that fails is an error and not a 0. The row keeps its place in the stream (blocks must stay equal), its score
column holds 0 and `reward_error` says why. The advantage stage masks such rows, and the run stops when
`reward.max_error_rate` of an iteration's rows fail.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import rows
from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import ONLY, Function, functions, limit_of
from pipeline.reward.pool import Pool, pool_for
from pipeline.reward.result import FLOAT32_MAX, Answer
from pipeline.reward.shaping import Shaping
from pipeline.reward.worker import Call

INPUTS = ("data_source", "response", "ground_truth", "extra_info")

CARRIED = ("acc", "pred")
"""Parts that validation reads; with several rewards they come from the first reward that has them."""


class Reward:
    """Appends the `REWARD` columns of `pipeline/rows.py` to a table of responses, and with `reward.functions` one
    column `score_NAME` (float32, null where that one failed) for each. `max_response_length`: as of `Shaping`.

    Raises:
        ValueError: (when made) the settings do not fit; (when called) the functions cannot be loaded.
    """

    def __init__(self, config: RewardConfig, max_response_length: int | None = None) -> None:
        self.config = config
        self._functions = functions(config)
        self._shaping = Shaping(config, max_response_length)

    def __call__(self, table: pa.Table) -> pa.Table:
        start = time.perf_counter()
        by_function: dict[str, list[Answer]] = {}
        if self._functions:
            by_function = self._answers(pool_for(self.config), table)
        columns: dict[str, Any] = {}
        if self.config.functions:
            for function in self._functions:
                scores = [None if error else score for score, _, error in by_function[function.name]]
                columns[f"score_{function.name}"] = pa.array(scores, pa.float32())
            answered = [_weighted(self._functions, row) for row in zip(*by_function.values(), strict=True)]
        else:
            answered = by_function.get(ONLY, [(0.0, "{}", None)] * len(table))
        if self.config.model.path is not None:
            answered = self._with_model(table, answered)
        if self._shaping.used:
            answered = self._shaped(table, answered)
        seconds = time.perf_counter() - start
        table = rows.append(
            table,
            rows.REWARD,
            {
                "score": [score for score, _, _ in answered],
                "reward_parts": [parts for _, parts, _ in answered],
                "reward_error": [error for _, _, error in answered],
                "reward_s": [seconds] * len(table),
            },
        )
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table

    def _answers(self, pool: Pool, table: pa.Table) -> dict[str, list[Answer]]:
        """The answers of each function for each row, by the function's name."""
        inputs = [list(row) for row in zip(*(table[name].to_pylist() for name in INPUTS), strict=True)]
        calls = []
        for function in self._functions:
            parts = [[row] for row in inputs]
            if function.batch:
                parts = [inputs] if inputs else []
            calls += [Call(function, part, limit_of(function, part[0][0], self.config)) for part in parts]
        by_function: dict[str, list[Answer]] = {function.name: [] for function in self._functions}
        for call, answers in zip(calls, pool.run(calls), strict=True):
            by_function[call.function.name] += answers
        return by_function

    def _with_model(self, table: pa.Table, answered: list[Answer]) -> list[Answer]:
        """The answers with the reward model's numbers added."""
        numbers, model_errors = table["rm_score"].to_pylist(), table["rm_error"].to_pylist()
        summed: list[Answer] = []
        for answer, number, model_error in zip(answered, numbers, model_errors, strict=True):
            score, parts, error = answer
            if error is not None:
                summed.append(answer)
            elif model_error is not None:
                summed.append((0.0, "{}", f"reward model: {model_error}"))
            else:
                with_number = json.loads(parts) | {"rm_score": number}
                summed.append(_bounded(score + self.config.model.weight * number, json.dumps(with_number)))
        return summed

    def _shaped(self, table: pa.Table, answered: list[Answer]) -> list[Answer]:
        split = table["split"].to_pylist()
        chosen = [i for i, (_, _, error) in enumerate(answered) if error is None and split[i] != "val"]
        if not chosen:
            return answered
        sources, ids = (table[name].take(chosen).combine_chunks() for name in ("data_source", "response_ids"))
        tokens = [ids[i].values.to_numpy(zero_copy_only=False) for i in range(len(ids))]
        shaped, made_of = self._shaping(np.array([answered[i][0] for i in chosen]), sources.to_pylist(), tokens)
        answered = list(answered)
        for place, i in enumerate(chosen):
            parts = json.loads(answered[i][1]) | {name: float(values[place]) for name, values in made_of.items()}
            answered[i] = _bounded(float(shaped[place]), json.dumps(parts))
        return answered


class SingleReward:
    """`Reward` as one actor for `chunks` tables at a time, so that `reward.rate_limit` counts all calls of the run."""

    def __init__(self, config: RewardConfig, max_response_length: int, chunks: int) -> None:
        self._reward = Reward(config, max_response_length)
        self._threads = ThreadPoolExecutor(chunks, "reward-chunk")

    async def __call__(self, table: pa.Table) -> pa.Table:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._reward, table)


def _weighted(called: Sequence[Function], row: Sequence[Answer]) -> Answer:
    """One answer from those of several functions; the row fails where one of them does."""
    total, parts = 0.0, {}
    for function, (score, inner, error) in zip(called, row, strict=True):
        if error is not None:
            return 0.0, "{}", f"{function.name}: {error}"
        total += function.weight * score
        parts[function.name] = score
        for key, value in json.loads(inner).items():
            parts[f"{function.name}/{key}"] = value
            if key in CARRIED:
                parts.setdefault(key, value)
    return _bounded(total, json.dumps(parts))


def _bounded(score: float, parts: str) -> Answer:
    """The answer with this score, or an error if weights and penalties have moved it out of the column's range."""
    if not abs(score) <= FLOAT32_MAX:
        return 0.0, "{}", f"ValueError: weights, scale and penalties make a score of {score}, not a finite float32"
    return score, parts, None
