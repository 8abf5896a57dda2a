"""Metrics of episodes against hand-worked numbers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline.stats import reduce
from pipeline.store.events import ValidationScored
from pipeline.track.episodes import MOST_TOOLS, episode_metrics
from pipeline.track.metrics import iteration_metrics
from pipeline.track.trajectories import read_trajectories
from pipeline.track.validation import Validation
from tests.track.test_metrics import ROWS, table


def episode(answers: list[int], replies: list[int], ended: str = "done", **row: Any) -> dict:
    """A row of answers and replies of so many tokens, in turn; further numbers of the column `episode` in `row`."""
    spans: list[dict] = []
    for number, tokens in enumerate(answers):
        spans.append({"kind": 1, "tokens": tokens})
        if number < len(replies):
            spans.append({"kind": 0, "tokens": replies[number]})
    mask = [span["kind"] for span in spans for _ in range(span["tokens"])]
    numbers = {"calls": {}, "malformed": 0, "unknown": 0, "tool_errors": 0, "cut_observations": 0}
    numbers |= {"episode_s": 1.0, "env_s": 0.25, "engine_s": 0.75}
    numbers |= {name: row.pop(name) for name in list(row) if name in numbers}
    made = {
        "uid": "a",
        "n": len(mask),
        "response": "x",
        "response_mask": mask,
        "spans": spans,
        "turns": len(answers),
        "ended": ended,
    }
    return made | {"episode": json.dumps(numbers)} | row


EPISODES = (
    episode([2, 3], [4], calls={"calc": 2, "look": 0}, tool_errors=1, cut_observations=1),
    episode([1, 1, 2], [1, 5], ended="turns", calls={"calc": 1, "look": 1}, unknown=1, malformed=2, env_s=0.75),
    episode([4], [], ended="stop", calls={"calc": 0, "look": 0}, episode_s=4.0, env_s=1.0),
    episode([3], [2], ended="error", env_error="x", reward_error="environment: x", drop_reason="reward_error"),
)


def test_metrics_of_episodes_by_hand() -> None:
    got = reduce([iteration_metrics(table(*EPISODES))])
    expected = {
        "response_length/mean": (5 + 4 + 4 + 3) / 4,
        "response_length/max": 5,
        "agent/turns/mean": 7 / 4,
        "agent/turns/max": 3,
        "agent/turns/min": 1,
        "agent/stop_reason/done": 1 / 4,
        "agent/stop_reason/stop": 1 / 4,
        "agent/stop_reason/turns": 1 / 4,
        "agent/stop_reason/length": 0,
        "agent/stop_reason/timeout": 0,
        "agent/stop_reason/malformed": 0,
        "agent/stop_reason/error": 1 / 4,
        "agent/env_error_rate": 1 / 4,
        "agent/trained_share": 16 / 28,
        "agent/answer_tokens/mean": 16 / 7,
        "agent/answer_tokens/max": 4,
        "agent/observation_tokens/mean": (4 + 6 + 0 + 2) / 4,
        "agent/observation_tokens/max": 6,
        "agent/cut_observations": 1 / 4,
        "agent/episode_s/mean": 7 / 4,
        "agent/episode_s/max": 4.0,
        "agent/env_s/mean": 2.25 / 4,
        "agent/env_s/max": 1.0,
        "agent/env_wait_share": 2.25 / 7,
        "agent/calls/mean": 4 / 3,
        "agent/no_call_rate": 1 / 3,
        "agent/malformed_rate": 2 / 7,
        "agent/unknown_rate": 1 / 7,
        "agent/tool_error_rate": 1 / 4,
        "agent/tool/calc": 3 / 3,
        "agent/tool/look": 1 / 3,
    }
    assert {name: value for name, value in got.items() if name.startswith("agent/") or name in expected} == (
        pytest.approx(expected)
    )
    # Ranks and chunks merge exactly.
    for cut in (1, 3):
        parts = [iteration_metrics(table(*rows)) for rows in (EPISODES[:cut], EPISODES[cut:])]
        assert {name: value for name, value in reduce(parts).items() if name in expected} == pytest.approx(expected)


def test_a_tool_that_nobody_calls_is_seen() -> None:
    got = reduce([episode_metrics(table(episode([1], [], calls={"calc": 0})), "val-agent")])
    assert got["val-agent/no_call_rate"] == 1 and got["val-agent/tool/calc"] == got["val-agent/calls/mean"] == 0
    assert "val-agent/malformed_rate" not in got and "val-agent/tool_error_rate" not in got


def test_calls_are_per_episode_that_has_the_tool() -> None:
    agents = [episode([1], [], calls={"calc": 2, "look": 0}), episode([1], [], calls={"calc": 0}), episode([1], [])]
    whole = reduce([episode_metrics(table(*agents))])
    assert (whole["agent/tool/calc"], whole["agent/tool/look"]) == (1, 0)
    assert (whole["agent/calls/mean"], whole["agent/no_call_rate"]) == (1, 0.5)
    assert reduce(episode_metrics(table(row)) for row in agents) == pytest.approx(whole)


def test_without_tools_or_episodes_there_is_nothing_of_them() -> None:
    got = episode_metrics(table(episode([1, 2], [3])))
    assert not [name for name in got if re.search("call|tool|malformed_rate", name)] and got
    assert episode_metrics(table(*ROWS)) == {}
    assert episode_metrics(table(*ROWS).drop_columns(["episode"])) == {}


def test_names_of_tools_are_bounded() -> None:
    calls = {f"t{number:03}": 1 for number in range(40)} | {"a/b": 1, "查": 1}
    got = reduce([episode_metrics(table(episode([1], [], calls=calls)))])
    made = [name for name in got if name.startswith("agent/tool/")]
    assert made == ["agent/tool/a/b", *(f"agent/tool/t{number:03}" for number in range(MOST_TOOLS - 1))]
    assert got["agent/tools_left_out"] == 10


def test_the_age_of_tokens_is_that_of_the_policys() -> None:
    runs = [{"version": 1, "tokens": 6}, {"version": 2, "tokens": 3}]
    rows: pa.Table = table(episode([2, 3], [4], version_runs=runs))
    # Two tokens of version 1 and three of 2; the four of the reply have the age of nobody.
    assert reduce([iteration_metrics(rows)])["training/token_staleness"] == pytest.approx(2 / 5)


def test_validation_sends_them_to_the_driver(tmp_path: Path) -> None:
    sent: list[ValidationScored] = []
    store: Any = SimpleNamespace(call=lambda method, scored: sent.append(scored))
    rows = table(
        *({**row, "split": split} for row, split in zip(EPISODES, ("train", "val", "val", "train"), strict=True))
    )
    left = Validation(str(tmp_path), store)(rows)
    assert left["turns"].to_pylist() == [2, 1] and left.column_names == rows.column_names
    assert reduce([sent[0].episodes])["val-agent/turns/mean"] == 2
    assert reduce([sent[0].episodes])["val-agent/no_call_rate"] == 0.5
    # The record has the whole conversation.
    assert read_trajectories(str(tmp_path), 3, "val")["spans"].to_pylist() == rows["spans"].to_pylist()[1:3]
