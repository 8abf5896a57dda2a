"""Recorded rows of episodes and of single responses, made by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.agent.inside.forms import joined
from pipeline.rows import SCHEMA
from pipeline.track.trajectories import Record
from tests.recordings import recorded_row

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
OPENED = [{"role": "user", "content": "A number from 1 to 63."}]
CALL = {"name": "calc", "arguments": {"expression": "32 / 2"}}
PLAYED = [
    {"role": "assistant", "content": "Let me see.", "reasoning": "Halve it.", "calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "name": "calc", "content": "16"},
    {"role": "assistant", "content": "16"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "40"},
    {"role": "user", "content": "right"},
]
"""What follows the prompt; the last reply ends the episode and is in no token."""
SPANS = [
    *({"kind": 1, "tokens": 4, "reward": None}, {"kind": 0, "tokens": 2, "reward": None}),
    *({"kind": 1, "tokens": 1, "reward": 0.25}, {"kind": 0, "tokens": 3, "reward": None}),
    {"kind": 1, "tokens": 2, "reward": 0.5},
]
MASK = [1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
NUMBERS = {"calls": {"calc": 1}, "malformed": 0, "episode_s": 2.0, "engine_s": 1.4, "env_s": 0.6}


def single(group: int = 0, sample: int = 0, iteration: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of one response."""
    row = recorded_row(group, sample, group // 2, iteration)
    return row | {"version_runs": [{"version": iteration - 1, "tokens": len(row["response_ids"])}]} | changes


def episode(group: int = 0, sample: int = 0, iteration: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of three answers, of which the first calls a tool; the last one is of a newer version."""
    row = single(group, sample, iteration)
    row |= {
        "prompt": json.dumps(PROMPT),
        "response_ids": list(range(70, 82)),
        "response_mask": MASK,
        "rollout_log_probs": [-0.5 if own else 0.0 for own in MASK],
        "version_runs": [{"version": iteration - 1, "tokens": 10}, {"version": iteration, "tokens": 2}],
        "response": "40",
        "advantages": [0.0] * 12,
        "returns": [0.0] * 12,
        "spans": SPANS,
        "messages": json.dumps([*PROMPT, *OPENED, *PLAYED]),
        "env_score": 0.75,
        "env_parts": '{"acc": 1}',
        "env_error": None,
        "turns": 3,
        "ended": "done",
        "episode": json.dumps(NUMBERS),
        "score": 0.75,
        "reward_parts": '{"acc": 1}',
    }
    return row | changes


def programmed(**changes: Any) -> dict[str, Any]:
    """A row of a program: two conversations, of which the second begins with an answer that is none of the policy's."""
    first, second = [*PLAYED[:3]], [OPENED[0], PLAYED[4], *PROMPT[1:], *PLAYED[4:]]
    spans = [SPANS[0], SPANS[1], SPANS[2] | {"tokens": 3}, SPANS[4] | {"tokens": 3}]
    contexts = [{"prompt": None, "tokens": 9}, {"prompt": [9] * 8, "tokens": 3}]
    talks = joined([[*OPENED, *first], second])
    return episode(contexts=contexts, spans=spans, messages=json.dumps(talks), turns=3) | changes


def write(folder: Path, *rows: dict[str, Any]) -> None:
    """Record rows of one chunk as a run does."""
    schema = pa.schema([SCHEMA.field(name) for name in rows[0]])
    Record(str(folder))(pa.Table.from_pylist(list(rows), schema=schema))
