"""What became of prompts: read back from the trajectories that the run records, for samplers and generators.

The rows of an iteration are recorded before the trainer receives them. The prompts of iteration k are made with what
is known of iterations up to k - `Schedule.feedback_lag`, which by then are on disk in any case. So the speed of this
process changes nothing, and a resumed run reads what the interrupted one read.
"""

import json
from typing import Any, NamedTuple

from pipeline.track.trajectories import read_trajectories

COLUMNS = (
    *("uid", "prompt_index", "data_source", "prompt", "ground_truth", "extra_info"),
    *("score", "reward_parts", "reward_error"),
)


class Outcome(NamedTuple):
    """One prompt and what its responses scored; those whose reward failed are left out."""

    prompt_index: int
    """Number of the row in all training files, from 0; -1 for a generated prompt."""
    data_source: str
    prompt: list[dict[str, Any]]
    ground_truth: Any
    extra_info: Any
    scores: list[float]
    """Of each response."""
    solved: float
    """Share of the responses that were right: the mean of `acc` if the reward gives it for one of them, and those
    without it are not right; else of score >= 1."""


def outcomes(run_dir: str, iteration: int) -> list[Outcome]:
    """What became of the prompts of an iteration, in the order of their chunks.

    Raises:
        FileNotFoundError: its trajectories are not there.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in read_trajectories(run_dir, iteration, columns=COLUMNS).to_pylist():
        if row["reward_error"] is None:
            groups.setdefault(row["uid"], []).append(row)
    return [_outcome(rows) for rows in groups.values()]


def _outcome(rows: list[dict[str, Any]]) -> Outcome:
    first = rows[0]
    accuracies = [json.loads(row["reward_parts"] or "{}").get("acc") for row in rows]
    judged = any(acc is not None for acc in accuracies)
    right = [float(acc or 0) for acc in accuracies] if judged else [float(row["score"] >= 1) for row in rows]
    return Outcome(
        first["prompt_index"],
        first["data_source"],
        json.loads(first["prompt"]),
        json.loads(first["ground_truth"]),
        json.loads(first["extra_info"]),
        [row["score"] for row in rows],
        sum(right) / len(right),
    )
