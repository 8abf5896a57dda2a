"""The reward stage of the pipeline: gives each row a score.

The score comes from the built-in rule for the row's `data_source`, functions of the user, a reward model (an earlier
stage adds its scores to the rows), or the environment of an episode (`agent.reward`).

If a reward function fails, the row has an error, not a score of 0. The row stays in the stream (blocks must keep their
size); column `score` holds 0 and `reward_error` the reason. The advantage stage masks such rows, and the run ends if
more than the fraction `reward.max_error_rate` of an iteration's rows have errors.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import rows
from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import EPISODE_KEYWORDS, ONLY, Function, functions, limit_of
from pipeline.reward.pool import pool_for
from pipeline.reward.result import FLOAT32_MAX, Answer, failed
from pipeline.reward.shaping import Shaping
from pipeline.reward.worker import RewardCall

INPUTS = ("data_source", "response", "ground_truth", "extra_info")

ENV_ERROR = "env_error"
"""Column with the error of an episode's environment, else null. Only tables of episodes have it."""

CARRIED = ("acc", "pred")
"""Parts of the reward that validation reads. With several reward functions, the first that returns the part counts."""


class Reward:
    """Appends the columns `REWARD` of `pipeline/rows.py` to a table of responses.

    With `reward.functions` it also appends a column `score_NAME` for each function (float32, null if the function
    failed). If the environment of an episode failed, the row has an error, and no function is called for it.

    Args:
        config: the section `reward`.
        max_response_length: `data.max_response_length`, needed for penalties on length.
        scored_by: source of the score (see `agent.reward`): `function`, `environment` (no function is called) or `sum`;
            one text for all rows, or by `agent_name`.

    Raises:
        ValueError: (constructor) the settings do not fit; (call) the functions cannot be loaded.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_response_length: int | None = None,
        scored_by: str | Mapping[str | None, str] = "function",
    ) -> None:
        self.config, self._scored_by = config, scored_by
        ways = {scored_by} if isinstance(scored_by, str) else set(scored_by.values())
        self._functions = () if ways == {"environment"} else functions(config)
        self._shaping = Shaping(config, max_response_length)

    def __call__(self, table: pa.Table) -> pa.Table:
        start = time.perf_counter()
        ways = self._ways(table)
        called = np.array([way != "environment" for way in ways], bool)
        if ENV_ERROR in table.column_names:
            called &= pc.is_null(table[ENV_ERROR]).to_numpy()
        by_function = self._answers(table, called)
        columns: dict[str, Any] = {}
        if self._functions and self.config.functions:
            for function in self._functions:
                answers = zip(by_function[function.name], called, strict=True)
                scores = [score if made and not error else None for (score, _, error), made in answers]
                columns[f"score_{function.name}"] = pa.array(scores, pa.float32())
            answered = [_weighted(self._functions, row) for row in zip(*by_function.values(), strict=True)]
        else:
            answered = by_function.get(ONLY, [(0.0, "{}", None)] * len(table))
        if ENV_ERROR in table.column_names:
            answered = self._with_environment(table, answered, ways)
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

    def _ways(self, table: pa.Table) -> Sequence[str]:
        """Return the source of each row's score: `function`, `environment` or `sum`."""
        if isinstance(self._scored_by, str):
            return [self._scored_by] * len(table)
        return [self._scored_by[name] for name in table["agent_name"].to_pylist()]

    def _answers(self, table: pa.Table, called: np.ndarray) -> dict[str, list[Answer]]:
        """Return the results of each function, one per row, by the name of the function.

        Args:
            table: R rows.
            called: [R] True for the rows to score; other rows get a score of 0.
        """
        names = [*INPUTS, *EPISODE_KEYWORDS] if ENV_ERROR in table.column_names else INPUTS
        by_function: dict[str, list[Answer]] = {function.name: [] for function in self._functions}
        chosen = table.filter(pa.array(called))
        inputs = [list(row) for row in zip(*(chosen[name].to_pylist() for name in names), strict=True)]
        calls = []
        for function in self._functions:
            parts = [[row] for row in inputs]
            if function.batch:
                parts = [inputs] if inputs else []
            calls += [RewardCall(function, part, limit_of(function, part[0][0], self.config)) for part in parts]
        for call, answers in zip(calls, pool_for(self.config).run(calls) if calls else [], strict=True):
            by_function[call.function.name] += answers
        return {name: _spread(answers, called) for name, answers in by_function.items()}

    def _with_environment(self, table: pa.Table, answered: list[Answer], ways: Sequence[str]) -> list[Answer]:
        """Return the results `answered` with the rewards of environments added (according to `ways`, the source of each
        row's score), and with their errors."""
        columns = (table[name].to_pylist() for name in ("env_score", "env_parts", ENV_ERROR))
        made: list[Answer] = []
        for way, answer, env_score, env_parts, env_error in zip(ways, answered, *columns, strict=True):
            score, parts, error = answer
            if env_error is not None:
                made.append(failed(f"environment: {env_error}"))
            elif error is not None or way == "function":
                made.append(answer)
            elif way == "environment":
                made.append(_bounded(env_score, env_parts or "{}"))
            else:
                # If both have a part of one name, the function's part wins.
                both = json.loads(env_parts or "{}") | json.loads(parts) | {"env_score": env_score}
                made.append(_bounded(score + env_score, json.dumps(both)))
        return made

    def _with_model(self, table: pa.Table, answered: list[Answer]) -> list[Answer]:
        """Return the results `answered` with the weighted scores of the reward model added."""
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
        rows_of = table.select(["uid", "data_source", "response_ids", "response_mask"]).take(chosen)
        ids, offsets = rows.flat(rows_of, "response_ids")
        # The policy is not penalised for tokens of tools and environments.
        own = rows.per_token(rows_of, "response_mask", offsets) > 0
        tokens = [ids[first:end][own[first:end]] for first, end in itertools.pairwise(offsets)]
        shaped, made_of = self._shaping(
            np.array([answered[i][0] for i in chosen]), rows_of["data_source"].to_pylist(), tokens
        )
        answered = list(answered)
        for place, i in enumerate(chosen):
            parts = json.loads(answered[i][1]) | {name: float(values[place]) for name, values in made_of.items()}
            answered[i] = _bounded(float(shaped[place]), json.dumps(parts))
        return answered


class SingleReward:
    """`Reward` as a single actor, so that `reward.rate_limit` counts all calls of the run.

    It works on up to `chunks` tables at the same time.
    """

    def __init__(
        self, config: RewardConfig, max_response_length: int, scored_by: str | Mapping[str | None, str], chunks: int
    ) -> None:
        self._reward = Reward(config, max_response_length, scored_by)
        self._threads = ThreadPoolExecutor(chunks, "reward-chunk")

    async def __call__(self, table: pa.Table) -> pa.Table:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._reward, table)


def _spread(answers: Sequence[Answer], called: np.ndarray) -> list[Answer]:
    """Return one result per row: the next of `answers` for rows that are True in `called` [R], else a score of 0."""
    rest = iter(answers)
    return [next(rest) if made else (0.0, "{}", None) for made in called]


def _weighted(called: Sequence[Function], row: Sequence[Answer]) -> Answer:
    """Return the weighted sum of several functions' results for one row; an error if one of the functions failed."""
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
    """Return the result (score, parts), or an error if the score does not fit into a float32."""
    if not abs(score) <= FLOAT32_MAX:
        return 0.0, "{}", f"ValueError: weights, scale and penalties make a score of {score}, not a finite float32"
    return score, parts, None
