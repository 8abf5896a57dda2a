"""Read the scores of earlier prompts from the recorded trajectories, for samplers and generators that learn from them.

The rows of an iteration are recorded before the trainer receives them. The prompts of iteration k depend on the
outcomes up to iteration k - `Schedule.feedback_lag`, which are always on disk by then. So the prompts do not depend on
the speed of any process, and a resumed run reads the same outcomes as the interrupted one.
"""

import json
from typing import Any, NamedTuple

from pipeline.track.trajectories import read_trajectories

COLUMNS = (
    *("uid", "prompt_index", "data_source", "prompt", "ground_truth", "extra_info"),
    *("score", "reward_parts", "reward_error"),
)


class Outcome(NamedTuple):
    """One prompt and the scores of its responses. Responses with an error of the reward are left out."""

    prompt_index: int
    """Number of the row over all training files, from 0; -1 for a generated prompt."""
    data_source: str
    prompt: list[dict[str, Any]]
    ground_truth: Any
    extra_info: Any
    scores: list[float]
    """Score of each response."""
    solved: float
    """Fraction of right responses, from 0 to 1. If the reward gives a part `acc` for at least one response, the mean of
    `acc` (0 for responses without it); else the fraction of scores that are at least 1."""


def outcomes(run_dir: str, iteration: int) -> list[Outcome]:
    """Read the outcomes of the prompts of iteration `iteration`, in the order of its chunks.

    Raises:
        FileNotFoundError: the trajectories of the iteration do not exist.
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
