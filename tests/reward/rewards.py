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
) -> pa.Table:
    """Rows as the rollout stage hands them on, with `extra_info.index` numbering them."""
    count = len(responses)
    return pa.table(
        {
            "split": pa.array([split] * count if isinstance(split, str) else split, pa.string()),
            "data_source": pa.array([source] * count if isinstance(source, str) else source, pa.string()),
            "response": pa.array(responses, pa.string()),
            "response_ids": pa.array(ids or [[1, 2, 3]] * count, pa.list_(pa.int32())),
            "ground_truth": pa.array(truths or [json.dumps(TRUTH)] * count, pa.string()),
            "extra_info": pa.array([json.dumps({"index": i}) for i in range(count)], pa.string()),
        }
    )


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
