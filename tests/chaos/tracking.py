"""What the tracking server has of a run, read from its database."""

import contextlib
import sqlite3
from pathlib import Path

from tests.chaos.checks import Check

METRIC = "critic/score/mean"


def tracked(database: Path, iterations: int) -> Check:
    """Judges that there is one run; tells how many iterations it has.

    Records that wait in a driver for the server are gone when the driver is killed, too; `metrics.jsonl` has them.
    """
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        runs = connection.execute("select run_uuid, status from runs").fetchall()
        steps = connection.execute("select distinct step from metrics where key = ?", (METRIC,)).fetchall()
    states = ", ".join(state for _, state in runs)
    sentence = f"{len(runs)} run ({states}) with {len(steps)} of {iterations} iterations in MLflow"
    return Check("tracking server", len(runs) == 1, sentence)
