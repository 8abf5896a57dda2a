"""What can be known about rewards before engines start: that each data source has one, and that it can be called."""

import json
from collections.abc import Collection, Iterable

import pyarrow as pa

from pipeline.reward.config import RewardConfig
from pipeline.reward.functions import functions
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox.rule import DATA_SOURCES
from pipeline.reward.stage import INPUTS, Reward
from pipeline.reward.worker import close, using

RESPONSE = "The answer is 42.\n```python\nprint(42)\n```"
"""What is scored; it must not be right, only fit to be scored."""
ROWS = 4
"""Rows of each data source."""


def check_sources(sources: Iterable[str | None], config: RewardConfig) -> None:
    """Makes sure that every row of the data can be scored: its data source has a rule, and functions load.

    Args:
        sources: the `data_source` values of the prompt files, repeats allowed.

    Raises:
        ValueError: a data source has no rule and a rule is asked for, or a function of the user's own does not load.
    """
    called = functions(config)
    if any(function.path is None for function in called):
        # A row without a data source is for the prompt source to refuse.
        for source in sorted({source for source in sources if source is not None} - set(DATA_SOURCES)):
            rule_of(source)
    if any(function.path is not None for function in called):
        with using(config) as pool:
            pool.start()


def dry_call(prompts: Iterable[pa.Table], config: RewardConfig, parts: Collection[str] = ()) -> None:
    """Scores a made-up response to the first prompts of each data source, where the run would score responses.

    Args:
        prompts: tables of some prompts, with the columns data_source, ground_truth and extra_info.
        config: the section `reward`.
        parts: of the reward, which the advantage estimator reads (`algorithm.gdpo_reward_keys`).

    Raises:
        ValueError: the reward fails for all prompts of a data source, or gives none of them one of `parts`; the
            sentence names it and the first reason.
    """
    tables = list(prompts)
    if not tables:
        return
    rows = pa.concat_tables(tables).select([name for name in INPUTS if name != "response"])
    places: dict[str, list[int]] = {}
    for place, source in enumerate(rows["data_source"].to_pylist()):
        if len(chosen := places.setdefault(source, [])) < ROWS:
            chosen.append(place)
    taken = sorted(place for chosen in places.values() for place in chosen)
    rows = rows.take(pa.array(taken))
    # As validation rows, which no penalty needs the tokens of.
    for name, value in (("response", RESPONSE), ("split", "val")):
        rows = rows.append_column(name, pa.array([value] * len(rows), pa.string()))
    if config.model.path is not None:
        # The model's own number needs its stage; what is tried here is everything else.
        for name, column in (
            ("rm_score", pa.array([0.0] * len(rows), pa.float32())),
            ("rm_error", pa.nulls(len(rows), pa.string())),
        ):
            rows = rows.append_column(name, column)
    try:
        made = Reward(config, max_response_length=1)(rows).select(["data_source", "reward_parts", "reward_error"])
    finally:
        close()
    for source in places:
        own = [row for row in made.to_pylist() if row["data_source"] == source]
        if all(row["reward_error"] for row in own):
            raise ValueError(
                f"the reward fails for each of the first {len(own)} prompts of data_source {source!r}, tried with a "
                f"made-up response: {own[0]['reward_error']}; nothing could be learnt from such rows. Check the ground "
                "truth of the data, and the reward function (reward.custom_reward_function, reward.functions)"
            )
        known = dict.fromkeys(["score", *(name for row in own for name in json.loads(row["reward_parts"]))])
        if missing := [part for part in parts if part not in known]:
            raise ValueError(
                f"algorithm.gdpo_reward_keys: the reward of data_source {source!r} has no part {missing[0]!r}, tried "
                f"with a made-up response; it has {', '.join(known)}"
            )
