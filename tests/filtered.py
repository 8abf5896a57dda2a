"""What the settings of dynamic sampling make of a few groups: for tests of the keys."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.derived import uses_filter
from pipeline.dynamic_sampling.filter import judge
from pipeline.dynamic_sampling.ledger import FilterRules, Ledger

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
    if not uses_filter(config):
        return []
    rules = replace(FilterRules.of(config, 100), batch=BATCH, chunk_prompts=CHUNK)
    ledger = Ledger(rules, 0)
    decisions = []
    for number in range(CHUNKS):
        _, found = judge(chunk(number), config.algorithm.filter_groups.metric)
        decisions.append(ledger.decide(number, found))
    return [(decision.iteration, decision.first, decision.taken, decision.exhausted) for decision in decisions]
