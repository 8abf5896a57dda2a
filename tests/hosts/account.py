"""Whether everything that belongs to a run is recorded, once."""

from collections import Counter
from pathlib import Path

import pyarrow as pa

from pipeline.track.history import read_history
from pipeline.track.trajectories import read_trajectories

COLUMNS = ("uid", "sample", "epoch", "prompt_index", "policy_version", "engine")


def rows_of(run_dir: Path, iterations: int) -> dict[int, pa.Table]:
    """Recorded rows by iteration, from 1; iterations without any are left out."""
    tables = {}
    for iteration in range(1, iterations + 1):
        try:
            tables[iteration] = read_trajectories(str(run_dir), iteration, columns=COLUMNS)
        except FileNotFoundError:
            continue
    return tables


def account(run_dir: Path, iterations: int, prompts: int, batch: int, samples: int) -> list[str]:
    """What is missing of a strictly on-policy run, or there twice.

    Args:
        run_dir: the run's folder.
        iterations: that the run has.
        prompts: in the training files.
        batch: prompts of one iteration.
        samples: responses per prompt.

    Returns:
        one sentence each; none for a run in which every iteration has all its rows, by the policy before it, and each
        epoch all its prompts.
    """
    found = []
    records = read_history(run_dir / "metrics.jsonl")
    # Number 0 is the validation before training.
    recorded = [record["iteration"] for record in records if record["iteration"]]
    if recorded != list(range(1, iterations + 1)):
        found.append(f"the record has the iterations {recorded}, not 1 to {iterations}")
    visits: Counter[tuple[int, int]] = Counter()
    tables = rows_of(run_dir, iterations)
    for iteration in range(1, iterations + 1):
        if iteration not in tables:
            found.append(f"iteration {iteration} has no rows")
            continue
        table = tables[iteration]
        if len(table) != batch * samples:
            found.append(f"iteration {iteration} has {len(table)} rows, not {batch} x {samples}")
        if len(set(zip(table["uid"].to_pylist(), table["sample"].to_pylist(), strict=True))) != len(table):
            found.append(f"iteration {iteration} has rows twice")
        if versions := set(table["policy_version"].to_pylist()) - {iteration - 1}:
            found.append(f"iteration {iteration} has rows of policy version {sorted(versions)}")
        visits.update(set(zip(table["epoch"].to_pylist(), table["prompt_index"].to_pylist(), strict=True)))
    for epoch in range(-(-iterations * batch // prompts)):
        seen = sum(1 for visit in visits if visit[0] == epoch)
        expected = min(prompts, iterations * batch - epoch * prompts)
        if seen != expected:
            found.append(f"epoch {epoch} has {seen} prompts, not {expected}")
    return found
