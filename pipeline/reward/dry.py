"""Check the reward before engines start: each data source has a reward, and a call of it works."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline import rows
from pipeline.config.agent import AgentConfig
from pipeline.config.reward import RewardConfig
from pipeline.conversations import answered
from pipeline.errors import nearest
from pipeline.reward.functions import functions
from pipeline.reward.pool import close
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox.rule import DATA_SOURCES
from pipeline.reward.stage import INPUTS, Reward

RESPONSE = "The answer is 42.\n```python\nprint(42)\n```"
"""Made-up response that is scored in the check. It need not be right."""
ROWS = 4  # rows of each data source
# Scores of validation rows are not shaped, so no tokens are needed. The columns `rm_*` stand for the reward model.
MADE_UP = {"response": RESPONSE, "split": "val", "rm_score": 0.0, "rm_error": None}
TEXTS = (*INPUTS, "agent_name", "split", "rm_error")
TRIED = pa.schema([*((name, pa.string()) for name in TEXTS), ("rm_score", pa.float32())])
READ = ("data_source", "prompt", "ground_truth", "extra_info", "agent_name")
NO_EPISODES = AgentConfig()
EPISODE = pa.schema([rows.SCHEMA.field(name) for name in ("messages", "turns", "env_score", "env_parts", "env_error")])


class Tried(NamedTuple):
    """Result of scoring a made-up response to prompts of one data source."""

    score: float | None
    """Score for the first prompt; None if the reward failed there."""
    acc: bool | None
    """True if the reward has the part `acc`; None if it does not, but the user's function may give `acc` for other
    responses."""


def check_names(config: RewardConfig, training: Collection[str], others: Collection[str] = ()) -> None:
    """Check that each data source that a setting of `reward` names occurs in the prompts.

    Args:
        config: the section `reward`.
        training: the values of `data_source` in training rows.
        others: the values of `data_source` in validation rows. They count for `reward.rule_kwargs` only, since other
            settings act on training rows.

    Raises:
        ValueError: a setting names a data source that does not occur, so it would do nothing.
    """
    places: tuple[tuple[str, Mapping[str, Any], Collection[str]], ...] = (
        ("reward.source_scale", config.source_scale, training),
        ("reward.normalize", config.normalize, training),
        ("reward.rule_kwargs", config.rule_kwargs, {*training, *others}),
    )
    for key, named, there in places:
        for name in named:
            if name not in there:
                rows = "validation rows alone" if name in others else "no row"
                known = ", ".join(map(repr, sorted(there)))
                cut = min((other for other in there if other.startswith(f"{name}.")), default=None)
                form = f'; a name with dots is written in quotes: {key}."{cut}"' if cut else ""
                raise ValueError(
                    f"{key} sets {name!r}, the data_source of {rows}, so it would do nothing; it may name the "
                    f"sources of the {'rows' if there is not training else 'training rows'}: {known}"
                    f"{nearest(name, there)}{form}"
                )


def check_sources(
    sources: Mapping[str | None, Iterable[str]], config: RewardConfig, agent: AgentConfig = NO_EPISODES
) -> None:
    """Check that a built-in rule exists for each `data_source` of the prompts, if rules score them.

    Args:
        sources: the values of `data_source`, by the `agent_name` of their rows.
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
    prompts: Iterable[pa.Table],
    config: RewardConfig,
    parts: Mapping[str, Collection[str]] = {},
    agent: AgentConfig = NO_EPISODES,
) -> dict[str, Tried]:
    """Score a made-up response to the first prompts of each data source, in the same way as the run scores responses.

    Args:
        prompts: tables with the columns `READ`; rows without `agent_name` belong to the section `agent`.
        config: the section `reward`.
        parts: setting to the names of the parts that the reward must have for this setting.
        agent: the section `agent`. If it is used, the response is an episode of one turn with a reward of 0.

    Returns:
        The result by data source. Prompts with a score that comes from an environment are left out.

    Raises:
        ValueError: a function of the user cannot be loaded; or, for a data source, the reward fails for all prompts or
            one of `parts` is missing for all of them. The text names the data source and the first reason.
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
    found: dict[str, Tried] = {}
    for source in by_source:
        scored = [row for row in answers if row["data_source"] == source]
        if all(row["reward_error"] for row in scored):
            raise ValueError(
                f"the reward fails for each of the first {len(scored)} prompts of data_source {source!r}, tried with a "
                f"made-up response: {scored[0]['reward_error']}; such rows teach nothing. Check the ground truth of "
                "the data, and the reward function (reward.custom_reward_function, reward.functions)"
            )
        known = {"score": 0.0}
        for row in scored:
            known |= {name: value for name, value in json.loads(row["reward_parts"]).items() if value is not None}
        numbers = [name for name, value in known.items() if isinstance(value, int | float)]
        missing = [(key, name) for key, names in parts.items() for name in names if name not in numbers]
        # A part may also come from the environment.
        if missing and {agents[row.get("agent_name")].scored_by for row in by_source[source]} == {"function"}:
            key, name = missing[0]
            raise ValueError(
                f"{key}: the reward of data_source {source!r} has no number {name!r}, tried with a made-up response; "
                f"it has {', '.join(numbers)}{nearest(name, numbers)}"
            )
        acc = "acc" in numbers or (None if any(function.path for function in functions(config)) else False)
        found[source] = Tried(None if scored[0]["reward_error"] else scored[0]["score"], acc)
    return found


def _episode(prompt: str) -> dict[str, Any]:
    """Return the columns `EPISODE` of a row with the only turn `RESPONSE`. `prompt` is JSON."""
    messages = answered(json.loads(prompt), RESPONSE)
    return {"messages": json.dumps(messages), "turns": 1, "env_score": 0.0, "env_parts": "{}", "env_error": None}
