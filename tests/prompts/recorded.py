"""What the stream records of training rows, without the stream."""

import json

import pyarrow as pa

from pipeline.track.trajectories import Record


def record(run_dir, rows, scores, parts=None, errors=None, parts_of=None):
    """Record `len(scores[i])` responses to the i-th of `rows`, which have the columns of `rows.PROMPT`.

    Parts of the reward are `parts`, or with `parts_of` those of a response (uid, sample), and none for others.
    """
    made = []
    for row, of_row in zip(rows, scores, strict=True):
        for sample, score in enumerate(of_row):
            error = (errors or {}).get((row["uid"], sample))
            own = parts or {} if parts_of is None else parts_of.get((row["uid"], sample), {})
            made.append(row | {"score": score, "reward_parts": json.dumps(own), "reward_error": error})
    table = pa.Table.from_pylist(made).set_column(
        len(made[0]) - 1, "reward_error", pa.array([row["reward_error"] for row in made], pa.string())
    )
    Record(run_dir)(table)
