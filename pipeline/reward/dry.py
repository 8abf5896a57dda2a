"""Checks of the reward before engines start: each data source has one, and it can be called."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa

from pipeline import rows
from pipeline.config.agent import AgentConfig
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
TEXTS = (*INPUTS, "agent_name", "split", "rm_error")
TRIED = pa.schema([*((name, pa.string()) for name in TEXTS), ("rm_score", pa.float32())])
READ = ("data_source", "prompt", "ground_truth", "extra_info", "agent_name")
NO_EPISODES = AgentConfig()
EPISODE = pa.schema([rows.SCHEMA.field(name) for name in ("messages", "turns", "env_score", "env_parts", "env_error")])


def check_sources(
    sources: Mapping[str | None, Iterable[str]], config: RewardConfig, agent: AgentConfig = NO_EPISODES
) -> None:
    """Check that each of the prompts' `data_source` values has a rule, if rules are called.

    Args:
        sources: the values, by the `agent_name` of their rows.
        config, agent: the sections `reward` and `agent`.

    Raises:
        ValueError: a data source has no rule.
    """
    agents = agent.agents()
    called = {source for name, found in sources.items() if agents[name].scored_by != "environment" for source in found}
    if any(function.path is None for function in functions(config)):
        for source in sorted(called - set(DATA_SOURCES)):
            rule_of(source)


def dry_call(
    prompts: Iterable[pa.Table], config: RewardConfig, parts: Collection[str] = (), agent: AgentConfig = NO_EPISODES
) -> dict[str, float | None]:
    """Score a made-up response to the first prompts of each data source, as the run would score responses.

    Args:
        prompts: tables with the columns `READ`; those without `agent_name` are of the section `agent`.
        config: the section `reward`.
        parts: the parts of the reward that the advantage estimator reads (`algorithm.gdpo_reward_keys`).
        agent: the section `agent`. The response is then an episode of one turn, whose environment rewards nothing.

    Returns:
        The score for the first prompt of each data source; None if its reward failed. Prompts of agents whose
        environment gives the score are left out.

    Raises:
        ValueError: a function of the user cannot be loaded, or the reward fails for all prompts of a data source or
            gives none of them one of `parts`. The sentence names the data source and the first reason.
    """
    by_source: dict[str, list[dict[str, Any]]] = {}
    agents = agent.agents()
    for table in prompts:
        for row in table.select([name for name in READ if name in table.column_names]).to_pylist():
            if agents[row.get("agent_name")].scored_by == "environment":
                continue
            tried = by_source.setdefault(row["data_source"], [])
            if len(tried) < ROWS:
                tried.append(row | MADE_UP | _episode(row["prompt"]))
    if not by_source:
        return {}
    schema = pa.schema([*TRIED, *EPISODE]) if agent.used else TRIED
    table = pa.Table.from_pylist([row for tried in by_source.values() for row in tried], schema=schema)
    try:
        made = Reward(config, 1, agent.scored_by_name())(table)
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
        missing = [part for part in parts if part not in known]
        # A part may also come from the environment.
        if missing and {agents[row.get("agent_name")].scored_by for row in by_source[source]} == {"function"}:
            raise ValueError(
                f"algorithm.gdpo_reward_keys: the reward of data_source {source!r} has no part {missing[0]!r}, tried "
                f"with a made-up response; it has {', '.join(known)}"
            )
        scores[source] = None if scored[0]["reward_error"] else scored[0]["score"]
    return scores


def _episode(prompt: str) -> dict[str, Any]:
    """The columns `EPISODE` of a row whose only answer is `RESPONSE`."""
    messages = [*json.loads(prompt), {"role": "assistant", "content": RESPONSE}]
    return {"messages": json.dumps(messages), "turns": 1, "env_score": 0.0, "env_parts": "{}", "env_error": None}
