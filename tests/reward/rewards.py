"""Tables and configs for tests of the reward stage."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config.reward import CustomRewardConfig, RewardConfig

TRUTH = {"target": 54, "numbers": [3, 7, 25]}
GOOD, WRONG, NONE = "<answer>(25-7)*3</answer>", "<answer>25</answer>", "no idea"


def table(
    responses: list[str],
    source: str | list[str] = "countdown",
    truths: list[str] | None = None,
    split: str | list[str] = "train",
    ids: list[list[int]] | None = None,
    masks: list[list[int]] | None = None,
) -> pa.Table:
    """Rows as the rollout stage hands them on, with `extra_info.index` numbering them."""
    count = len(responses)
    ids = ids or [[1, 2, 3]] * count
    masks = masks or [[1] * len(tokens) for tokens in ids]
    return pa.table(
        {
            "uid": pa.array([str(number) for number in range(count)], pa.string()),
            "split": pa.array([split] * count if isinstance(split, str) else split, pa.string()),
            "data_source": pa.array([source] * count if isinstance(source, str) else source, pa.string()),
            "response": pa.array(responses, pa.string()),
            "response_ids": pa.array(ids, pa.list_(pa.int32())),
            "response_mask": pa.array(masks, pa.list_(pa.int8())),
            "ground_truth": pa.array(truths or [json.dumps(TRUTH)] * count, pa.string()),
            "extra_info": pa.array([json.dumps({"index": i}) for i in range(count)], pa.string()),
        }
    )


def episodes(
    given: pa.Table,
    env_scores: list[float] | None = None,
    env_errors: list[str | None] | None = None,
    env_parts: list[str] | None = None,
    messages: list[list[dict[str, Any]]] | None = None,
) -> pa.Table:
    """`given` with the columns of episodes that the reward stage reads; row i has i + 1 turns."""
    count = len(given)
    conversation = json.dumps([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
    columns = {
        "messages": pa.array(map(json.dumps, messages) if messages else [conversation] * count, pa.string()),
        "env_score": pa.array(env_scores or [0.0] * count, pa.float32()),
        "env_parts": pa.array(env_parts or ["{}"] * count, pa.string()),
        "env_error": pa.array(env_errors or [None] * count, pa.string()),
        "turns": pa.array(range(1, count + 1), pa.int32()),
    }
    for name, column in columns.items():
        given = given.append_column(name, column)
    return given


def written(folder: Path, source: str, name: str = "mine.py") -> str:
    """Path of a file with `source`."""
    (folder / name).write_text(source)
    return str(folder / name)


def custom(folder: Path, source: str, timeout_s: float = 60.0, **settings: Any) -> RewardConfig:
    """A reward function with this source."""
    function = CustomRewardConfig(path=written(folder, source), **settings)
    return RewardConfig(custom_reward_function=function, timeout_s=timeout_s)


def scores(result: pa.Table) -> list[float]:
    return [round(score, 6) for score in result["score"].to_pylist()]


def parts(result: pa.Table) -> list[dict[str, Any]]:
    return [json.loads(text) for text in result["reward_parts"].to_pylist()]


def errors(result: pa.Table) -> list[str | None]:
    return result["reward_error"].to_pylist()
