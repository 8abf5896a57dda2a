"""Metrics of multi-turn episodes: their length, the reasons for their end, tool calls and waiting times."""

import json
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import flat, spans_of
from pipeline.stats import Stat, Stats, mean, summary

ENDED = ("done", "stop", "turns", "length", "timeout", "malformed", "error")
"""Values of the column `ended`."""
MOST_TOOLS = 32
"""Maximum number of tools that get their own metric: the first ones by name."""
LONGEST_NAME = 200
"""Maximum length of the name of a part or tool that gets its own metric, in characters."""


def episode_metrics(table: pa.Table, group: str = "agent") -> Stats:
    """Compute the metrics of the episodes in `table`; empty if the rows are not episodes.

    Args:
        table: rows with the columns `rows.ROLLOUT` and `rows.AGENT`.
        group: first part of the metrics' names.
    """
    if "episode" not in table.column_names or table["episode"].null_count == len(table):
        return {}
    mask, offsets = flat(table, "response_mask")
    spans = spans_of(table, offsets)
    lengths = np.diff(spans.tokens)
    observed = np.bincount(spans.row, np.where(spans.answer, 0, lengths), len(table))
    ended = Counter(table["ended"].to_pylist())
    stats = {
        **summary(table["turns"].to_numpy(), "turns"),
        **{f"stop_reason/{why}": mean(ended[why], len(table)) for why in ENDED},
        "env_error_rate": mean(pc.sum(pc.is_valid(table["env_error"])).as_py(), len(table)),
        "trained_share": mean((mask > 0).sum(), len(mask)),
        **summary(lengths[spans.answer], "answer_tokens", ("mean", "max")),
        **summary(observed, "observation_tokens", ("mean", "max")),
        **_of_numbers([json.loads(text) for text in table["episode"].to_pylist()]),
    }
    return {f"{group}/{name}": stat for name, stat in stats.items()}


def _of_numbers(episodes: list[dict]) -> Stats:
    """Compute metrics from the column `episode`, the counts and seconds that the rollout stage recorded."""

    def each(name: str) -> np.ndarray:
        return np.array([episode.get(name, 0) for episode in episodes], dtype=np.float64)

    calls, offered = Counter[str](), Counter[str]()
    for episode in episodes:
        # `update`, unlike a sum of counters, keeps tools that were never called.
        calls.update(episode["calls"])
        offered.update(episode["calls"].keys())
    made, malformed, unknown = sum(calls.values()), each("malformed").sum(), each("unknown").sum()
    stats = {
        "cut_observations": mean(each("cut_observations").sum(), len(episodes)),
        **summary(each("episode_s"), "episode_s", ("mean", "max")),
        **summary(each("env_s"), "env_s", ("mean", "max")),
        "env_wait_share": mean(each("env_s").sum(), each("episode_s").sum()),
    }
    if not calls:
        return stats
    # Other ranks may have episodes with other tools, or without tools.
    with_tools = [episode["calls"] for episode in episodes if episode["calls"]]
    without = sum(not any(own.values()) for own in with_tools)
    named, others = divided(calls, MOST_TOOLS)
    tried = made + malformed + unknown
    return stats | {
        "calls/mean": mean(made, len(with_tools)),
        "no_call_rate": mean(without, len(with_tools)),
        "malformed_rate": mean(malformed, tried),
        "unknown_rate": mean(unknown, tried),
        "tool_error_rate": mean(each("tool_errors").sum(), made),
        **{f"tool/{name}": mean(calls[name], offered[name]) for name in named},
        **left_out("tools_left_out", others),
    }


def divided(names: Iterable[str], most: int) -> tuple[list[str], list[str]]:
    """Divide names into the first `most` in alphabetical order, which get their own metrics, and the rest."""
    ordered = sorted(names)
    chosen = [name for name in ordered if len(name) <= LONGEST_NAME][:most]
    return chosen, [name for name in ordered if name not in chosen]


def left_out(metric: str, names: list[str]) -> Stats:
    """Return the number of `names` as the metric `metric`; an empty dict if there are none."""
    return {metric: Stat("max", (float(len(names)),))} if names else {}
