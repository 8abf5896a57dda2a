"""Checks of the reward before engines start: each data source has one, and it can be called."""

import json
from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa

from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import functions
from pipeline.reward.pool import close
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox.rule import DATA_SOURCES
from pipeline.reward.stage import INPUTS, Reward

RESPONSE = "The answer is 42.\n```python\nprint(42)\n```"
"""The response that is scored. It need not be right."""
ROWS = 4  # rows of each data source
# Validation rows are not shaped, so they need no tokens. The reward model's number comes from a stage before.
MADE_UP = {"response": RESPONSE, "split": "val", "rm_score": 0.0, "rm_error": None}
TRIED = pa.schema([(name, pa.string()) for name in (*INPUTS, "split", "rm_error")] + [("rm_score", pa.float32())])


def check_sources(sources: Iterable[str | None], config: RewardConfig) -> None:
    """Check that each of the prompts' `data_source` values has a rule, if rules are called.

    Raises:
        ValueError: a data source has no rule.
    """
    if any(function.path is None for function in functions(config)):
        # The prompt source refuses rows without a data source.
        for source in sorted({source for source in sources if source is not None} - set(DATA_SOURCES)):
            rule_of(source)


def dry_call(prompts: Iterable[pa.Table], config: RewardConfig, parts: Collection[str] = ()) -> dict[str, float | None]:
    """Score a made-up response to the first prompts of each data source, as the run would score responses.

    Args:
        prompts: tables with the columns data_source, ground_truth and extra_info.
        config: the section `reward`.
        parts: the parts of the reward that the advantage estimator reads (`algorithm.gdpo_reward_keys`).

    Returns:
        The score for the first prompt of each data source; None if its reward failed.

    Raises:
        ValueError: a function of the user cannot be loaded, or the reward fails for all prompts of a data source or
            gives none of them one of `parts`. The sentence names the data source and the first reason.
    """
    by_source: dict[str, list[dict[str, Any]]] = {}
    for table in prompts:
        for row in table.select(["data_source", "ground_truth", "extra_info"]).to_pylist():
            rows = by_source.setdefault(row["data_source"], [])
            if len(rows) < ROWS:
                rows.append(row | MADE_UP)
    if not by_source:
        return {}
    tried = pa.Table.from_pylist([row for rows in by_source.values() for row in rows], schema=TRIED)
    try:
        made = Reward(config, max_response_length=1)(tried)
    finally:
        close()
    answers = made.select(["data_source", "score", "reward_parts", "reward_error"]).to_pylist()
    scores: dict[str, float | None] = {}
    for source in by_source:
        scored = [row for row in answers if row["data_source"] == source]
        if all(row["reward_error"] for row in scored):
            raise ValueError(
                f"the reward fails for each of the first {len(scored)} prompts of data_source {source!r}, tried with a "
                f"made-up response: {scored[0]['reward_error']}; nothing could be learnt from such rows. Check the "
                "ground truth of the data, and the reward function (reward.custom_reward_function, reward.functions)"
            )
        known = dict.fromkeys(["score", *(name for row in scored for name in json.loads(row["reward_parts"]))])
        if missing := [part for part in parts if part not in known]:
            raise ValueError(
                f"algorithm.gdpo_reward_keys: the reward of data_source {source!r} has no part {missing[0]!r}, tried "
                f"with a made-up response; it has {', '.join(known)}"
            )
        scores[source] = None if scored[0]["reward_error"] else scored[0]["score"]
    return scores
