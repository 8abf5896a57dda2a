"""The filter stage of dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups whose rewards agree leave.

Such a group has advantages of 0 and teaches nothing. One actor takes the scored chunks in the order of the stream and
reports each to the policy store, which admits replacements for what is dropped and numbers the groups that stay
(`pipeline/groups.py`). Their rows get the number of the iteration that trains them and of the chunk they are dealt in;
the repartition behind this stage cuts the chunks anew.

A reward that failed is no reward, so a group is judged by its other rows. With fewer than two of these it says nothing
and is dropped, counted as `failed` and not as `equal`. Reward errors of all generated rows count towards
`reward.max_error_rate`: those of dropped groups never reach the trainer, which counts its own.
"""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ask import ask
from pipeline.config import Config
from pipeline.errors import FinalError
from pipeline.groups import Found, Tally, Verdict

SCORE = "score"


class Filter:
    """The one actor of the filter stage.

    Args:
        config: the run's configuration.
        store: handle of the policy store, a `DynamicStore`.
        generation: of the stream.
    """

    def __init__(self, config: Config, store: Any, generation: int):
        self._config, self._store, self._generation = config, store, generation

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of a chunk that will be trained, with `iteration` and `chunk` as the trainer gets them.

        Raises:
            FinalError: an iteration cannot be filled, or the reward fails too often.
            ValueError: the rows have no such metric.
        """
        if not len(table):
            return table
        settings, batch = self._config.algorithm.filter_groups, self._config.data.train_batch_size
        group, found = judge(table, settings.metric)
        verdict = ask(self._store, "filtered", self._generation, table["chunk"][0].as_py(), found)
        if complaint := self._complaint(table, verdict):
            raise FinalError(complaint)
        number = np.full(found.groups, -1)
        number[found.kept[: verdict.taken]] = verdict.first + np.arange(verdict.taken)
        number = number[group]  # [R]
        kept = number >= 0
        number, table = number[kept], table.filter(pa.array(kept))
        first_iteration = verdict.iteration - verdict.first // batch
        table = _replaced(table, "iteration", first_iteration + number // batch)
        return _replaced(table, "chunk", number // self._config.rollout.chunk_prompts)

    def _complaint(self, table: pa.Table, verdict: Verdict) -> str | None:
        """Why the run must not go on, if so."""
        tally, iteration = verdict.tally, verdict.iteration
        if not verdict.full and not verdict.exhausted:
            return None
        limit = self._config.reward.max_error_rate
        if tally.errors > limit * tally.rows:
            errors = table["reward_error"].drop_null()
            first = f"; one of them: {errors[0].as_py()}" if len(errors) else ""
            return (
                f"the reward failed for {tally.errors / tally.rows:.0%} of the rows generated for iteration "
                f"{iteration}, more than reward.max_error_rate={limit:.0%}{first}"
            )
        return exhausted(self._config, iteration, tally) if verdict.exhausted else None


def exhausted(config: Config, iteration: int, tally: Tally) -> str:
    """The sentence on an iteration that what was generated for it does not fill."""
    settings = config.algorithm.filter_groups
    dropped = tally.equal + tally.failed
    failed = f" and {tally.failed} had fewer than two responses with a reward" if tally.failed else ""
    way_out = (
        "every group agrees, so there is nothing to learn from: look at the reward and at the responses in "
        "trajectories/, take other prompts, or raise rollout.n or rollout.temperature"
        if dropped == tally.groups
        else "raise algorithm.filter_groups.max_num_gen_batches or rollout.n, or take prompts that the policy solves "
        "now and then"
    )
    return (
        f"iteration {iteration} is not full after {tally.groups} groups, "
        f"algorithm.filter_groups.max_num_gen_batches={settings.max_num_gen_batches} x "
        f"data.train_batch_size={config.data.train_batch_size}: {dropped / tally.groups:.0%} of them were dropped, "
        f"{tally.equal} because their {settings.metric} agrees{failed}; {way_out}"
    )


def judge(table: pa.Table, metric: str) -> tuple[np.ndarray, Found]:
    """The number [R] of each row's group in the table, and which groups stay.

    Args:
        table: scored training rows, whole groups (`uid`).
        metric: `score`, or a part of the reward.

    Raises:
        ValueError: a row without an error has no such number.
    """
    group = table["uid"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    groups = int(group.max()) + 1
    good = pc.is_null(table["reward_error"]).to_numpy()
    values = numbers(table, metric, good)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group[good], values)
    np.maximum.at(high, group[good], values)
    failed = np.bincount(group[good], minlength=groups) < 2
    equal = ~failed & (low == high)
    return group, Found(
        groups=groups,
        kept=np.flatnonzero(~failed & ~equal).tolist(),
        equal=int(equal.sum()),
        failed=int(failed.sum()),
        rows=len(table),
        errors=int((~good).sum()),
        score=float(table["score"].to_numpy()[good].astype(np.float64).sum()),
    )


def numbers(table: pa.Table, metric: str, good: np.ndarray) -> np.ndarray:
    """What is compared, of the rows `good` [R].

    Raises:
        ValueError: a row has no such number.
    """
    if metric == SCORE:
        return table[SCORE].to_numpy()[good].astype(np.float64)
    chosen = table.filter(pa.array(good))
    found = [json.loads(text or "{}") for text in chosen["reward_parts"].to_pylist()]
    for row, parts in enumerate(found):
        if not isinstance(parts.get(metric), (int, float)):
            known = sorted(name for name, value in parts.items() if isinstance(value, (int, float)))
            raise ValueError(
                f"algorithm.filter_groups.metric={metric}: the reward of a row of uid {chosen['uid'][row].as_py()} "
                f"({chosen['data_source'][row].as_py()}) has no number of that name; there are: "
                f"{', '.join(['score', *known])}"
            )
    return np.array([float(parts[metric]) for parts in found])


def _replaced(table: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, pa.int64()))
