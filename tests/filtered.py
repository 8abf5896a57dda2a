"""What the settings of dynamic sampling make of a few groups: for tests of the keys."""

import json
from typing import Any

import pyarrow as pa

from pipeline.advantage.filter import judge
from pipeline.config import Config
from pipeline.groups import DynamicSampling, Groups

CHUNKS, CHUNK, BATCH = 12, 2, 3


def chunk(number: int) -> pa.Table:
    """Two groups of two rows: scores differ in every second chunk, `acc` in one group of every third."""
    rows: list[dict[str, Any]] = []
    for group in range(CHUNK):
        for sample in range(2):
            score = float(sample) if number % 2 else 1.0
            acc = sample if number % 3 == 0 and group == 1 else 1
            rows.append({"uid": f"{number}-{group}", "score": score, "reward_parts": json.dumps({"acc": acc})})
    table = pa.Table.from_pylist([row | {"data_source": "countdown"} for row in rows])
    return table.append_column("reward_error", pa.nulls(len(table), pa.string()))


def filtered(config: Config) -> list[Any]:
    """For each chunk: which iteration trains its first kept group, how many go on, and whether the run ends there."""
    sampling = DynamicSampling.of(config, 100)
    if sampling is None:
        return []
    groups = Groups(sampling, CHUNK, BATCH, 0)
    verdicts = []
    for number in range(CHUNKS):
        _, found = judge(chunk(number), config.algorithm.filter_groups.metric)
        verdicts.append(groups.settle(number, found))
    return [(verdict.iteration, verdict.first, verdict.taken, verdict.exhausted) for verdict in verdicts]
