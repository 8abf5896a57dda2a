"""Deletion of old checkpoints: the newest ones stay, and the best by a validation metric.

Only the driver knows which checkpoints are complete and how good each is, so the driver deletes them. It does so in a
background thread, so that a slow storage delays nothing.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pipeline.storage import checkpoints
from pipeline.track.history import write_atomically
from pipeline.track.retry_queue import RetryQueue

log = logging.getLogger(__name__)

BEST_FILE = "best.json"


class CheckpointKeeper:
    """Deletes the old checkpoints of one run.

    Args:
        run_dir: the run's folder, for `best.json`.
        keep: number of newest checkpoints that stay; 0 keeps one until `finished`.
        metric: metric by which the best checkpoint stays, too; None for none.
        mode: `max` or `min`.
        root: folder or URL of the checkpoints.
    """

    CLOSE_S = 60.0

    def __init__(self, run_dir: Path, keep: int, metric: str | None, mode: str, root: str):
        self._run_dir, self._keep, self._metric, self._root = run_dir, max(1, keep), metric, root
        self._keep_at_end = keep
        self._sign = 1 if mode == "max" else -1
        self._parts: dict[int, set[int]] = defaultdict(set)
        # From here on only the thread uses these.
        self._values: dict[int, float] = {}
        self._last_validated, self._warned = -1, False
        # Incomplete ones are forgotten as the run begins after them.
        self._whole = set(checkpoints.iterations(root))
        self._queue = RetryQueue("the deletion of old checkpoints")
        self._queue.start()

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an iteration, also of an iteration before the run was resumed."""
        if self._metric is not None and any(name.startswith("val-") for name in metrics):
            self._queue.put("a metric", self._validated, iteration, metrics.get(self._metric), sorted(metrics))

    def saved(self, version: int, rank: int, ranks: int) -> None:
        """Record that a rank's part of a checkpoint has been stored; when all `ranks` have, the checkpoint is
        complete."""
        self._parts[version].add(rank)
        if len(self._parts[version]) == ranks:
            del self._parts[version]
            self._queue.put("a checkpoint", self._saved, version)

    def forget_after(self, version: int) -> None:
        """Forget all checkpoints after `version`, from which the workers have begun: they are incomplete or damaged."""
        self._parts.clear()
        self._queue.put("a start", self._forget_after, version)

    def finished(self) -> None:
        """Delete the last checkpoint, too, if none is kept of a run that has finished and saved its model."""
        if self._keep_at_end == 0:
            self._queue.put("the end", self._finished)

    def close(self) -> None:
        """Wait at most `CLOSE_S` seconds for pending deletions."""
        if self._queue.close(time.monotonic() + self.CLOSE_S):
            log.warning("old checkpoints in %s are still being deleted after %.0f s", self._root, self.CLOSE_S)

    def _forget_after(self, version: int) -> None:
        self._whole = {iteration for iteration in self._whole if iteration <= version}

    def _validated(self, iteration: int, value: float | None, names: list[str]) -> None:
        self._last_validated = max(self._last_validated, iteration)
        if value is not None:
            self._values[iteration] = value
        elif not self._warned:
            self._warned = True
            there = ", ".join(name for name in names if name.startswith("val-"))
            log.warning(
                "the validation of iteration %d has no trainer.best_metric=%s, so its checkpoint cannot be the best; "
                "it has %s",
                *(iteration, self._metric, there),
            )
        self._tidy()

    def _saved(self, version: int) -> None:
        self._whole.add(version)
        self._tidy()

    def _finished(self) -> None:
        self._keep = 0
        self._tidy()

    def _tidy(self) -> None:
        spare: set[int] = set()
        if self._metric is not None:
            # Checkpoints that are not validated yet may turn out to be the best.
            spare = {iteration for iteration in self._whole if iteration > self._last_validated}
        try:
            if known := sorted(self._values.keys() & self._whole):
                best = max(known, key=lambda iteration: self._sign * self._values[iteration])
                content = {"iteration": best, "metric": self._metric, "value": self._values[best]}
                write_atomically(self._run_dir / BEST_FILE, f"{json.dumps(content)}\n".encode())
                spare.add(best)
            if self._whole:
                self._whole.difference_update(checkpoints.retain(self._root, max(self._whole), self._keep, spare))
        except (OSError, ValueError) as error:
            # A checkpoint that could not be deleted now is deleted with the next one.
            log.warning("an old checkpoint could not be deleted: %s", error)
