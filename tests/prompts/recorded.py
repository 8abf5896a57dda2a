"""What the stream records of training rows, without the stream."""

import json

import pyarrow as pa

from pipeline.track.trajectories import Record


def record(run_dir, rows, scores, parts=None, errors=None):
    """Record `len(scores[i])` responses to the i-th of `rows`, which have the columns of `rows.PROMPT`."""
    made = []
    for row, of_row in zip(rows, scores, strict=True):
        for sample, score in enumerate(of_row):
            error = (errors or {}).get((row["uid"], sample))
            made.append(row | {"score": score, "reward_parts": json.dumps(parts or {}), "reward_error": error})
    table = pa.Table.from_pylist(made).set_column(
        len(made[0]) - 1, "reward_error", pa.array([row["reward_error"] for row in made], pa.string())
    )
    Record(run_dir)(table)
