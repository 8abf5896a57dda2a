"""Recordings for tests: what a run leaves in its folder, without the run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config import Config, save_yaml
from pipeline.rows import SCHEMA
from pipeline.track.trajectories import Record

CHUNKS, CHUNK, SAMPLES = 2, 2, 3
BATCH = CHUNKS * CHUNK


def recorded_row(group: int, sample: int, chunk: int, iteration: int, tokenizer: Any = None) -> dict[str, Any]:
    """One training row; everything in it follows from its group and sample."""
    draw = np.random.default_rng([group, sample])
    # Letters alone: their bytes are the same text whatever stands beside them.
    response = "".join(chr(97 + letter) for letter in draw.integers(0, 26, draw.integers(1, 7)))
    ids = tokenizer(response)["input_ids"] if tokenizer else [ord(letter) for letter in response]
    return {
        "split": "train",
        "chunk": chunk,
        "iteration": iteration,
        "uid": f"0-{group}",
        "epoch": 0,
        "offset": group,
        "prompt_index": 100 + group,
        "data_source": "countdown",
        "prompt": json.dumps([{"role": "user", "content": f"question {group}"}]),
        "prompt_ids": [1, 2, group],
        "ground_truth": json.dumps({"target": group, "numbers": [1, 2]}),
        "extra_info": json.dumps({"index": group}),
        "agent_name": None,
        "sample": sample,
        "response_ids": ids,
        "response_mask": [1] * len(ids),
        "rollout_log_probs": draw.normal(-1, 0.2, len(ids)).tolist(),
        "response": response,
        "finish_reason": "stop",
        "policy_version": iteration - 1,
        "engine": "host:1",
        "generate_s": 1.5,
        "load_s": 0.5,
        "kl_coef": 0.25,
        "score": float(sample),
        "reward_parts": "{}",
        "reward_error": None,
        "reward_s": 0.1,
        "baseline": 0.5,
        "advantages": [0.0] * len(ids),
        "returns": [0.0] * len(ids),
        "reward": float(sample),
        "kl": None,
    }


def record(
    folder: Path,
    iterations: Sequence[int],
    config: Config | None = None,
    tokenizer: Any = None,
    without: Sequence[str] = (),
    images: Mapping[int, list[bytes]] | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Write a recording of `iterations` into `folder`; its rows.

    Args:
        folder: of the run that is made up.
        iterations: their numbers.
        config: written beside the rows, if given.
        tokenizer: makes the tokens of a response; None takes the letters' codes.
        without: columns that are not written.
        images: of each group's prompt; None writes no columns of images.
        changes: columns that have another value in every row.
    """
    made = []
    for chunk in range(CHUNKS * len(iterations)):
        iteration = iterations[chunk // CHUNKS]
        rows = [
            recorded_row(group, sample, chunk, iteration, tokenizer) | changes
            for group in range(chunk * CHUNK, (chunk + 1) * CHUNK)
            for sample in range(SAMPLES)
        ]
        for row in rows if images is not None else ():
            shown = images[row["offset"]]
            hashes = [hashlib.blake2b(image, digest_size=16).digest() for image in shown]
            row |= {"images": shown, "image_hash": hashes, "engine_prompt_ids": row["prompt_ids"]}
        schema = pa.schema([SCHEMA.field(name) for name in rows[0] if name not in without])
        Record(str(folder))(pa.Table.from_pylist(rows, schema=schema))
        made += rows
    if config is not None:
        save_yaml(config, folder / "config.yaml")
    return made
