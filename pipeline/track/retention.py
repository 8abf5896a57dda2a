"""Which checkpoints stay: the newest ones, and the best by a validation metric.

The driver deletes, since it alone knows both what is whole and how good it was. It does so in a thread of its own, one
deletion after the other, so that a slow storage holds nothing up.
"""

import json
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pipeline.storage import checkpoints

log = logging.getLogger(__name__)

BEST_FILE = "best.json"


class Retention:
    """Keeps the checkpoints of one run.

    Args:
        run_dir: the run's folder.
        keep: newest checkpoints that stay.
        metric: by which the best one stays, too; None for none.
        mode: `max` or `min`.
        root: folder or URL of the checkpoints; None is the run's folder.
    """

    CLOSE_S = 60.0

    def __init__(self, run_dir: Path, keep: int, metric: str | None, mode: str, root: str | None = None):
        self._run_dir, self._keep, self._metric = run_dir, keep, metric
        self._root = str(run_dir) if root is None else root
        self._sign = 1 if mode == "max" else -1
        self._parts: dict[int, set[int]] = defaultdict(set)
        self._values: dict[int, float] = {}
        self._checkpoints = set(checkpoints.iterations(self._root))
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="retention", daemon=True)
        self._thread.start()

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an iteration; those of a resumed run's past, too."""
        if self._metric is not None and (value := metrics.get(self._metric)) is not None:
            self._tasks.put(partial(self._validated, iteration, value))

    def saved(self, version: int, rank: int, ranks: int) -> None:
        """A rank's part of a checkpoint is in place."""
        self._parts[version].add(rank)
        if len(self._parts[version]) == ranks:
            del self._parts[version]
            self._tasks.put(partial(self._whole, version))

    def restarted(self) -> None:
        """The train workers begin anew: parts of a checkpoint that is not whole yet are none any more."""
        self._parts.clear()

    def close(self) -> None:
        """Wait for what is under way, but not long: a storage that hangs holds no run up."""
        self._tasks.put(None)
        self._thread.join(self.CLOSE_S)
        if self._thread.is_alive():
            log.warning("old checkpoints in %s are still being deleted after %.0f s", self._root, self.CLOSE_S)

    # In the thread, which alone knows values and checkpoints.

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _validated(self, iteration: int, value: float) -> None:
        self._values[iteration] = value
        self._tidy()

    def _whole(self, version: int) -> None:
        self._checkpoints.add(version)
        self._tidy()

    def _tidy(self) -> None:
        known = [iteration for iteration in sorted(self._values) if iteration in self._checkpoints]
        # Those that are not validated yet may turn out to be the best.
        last = max(self._values, default=-1)
        spare = (
            {iteration for iteration in self._checkpoints if iteration > last} if self._metric is not None else set()
        )
        try:
            if known:
                best = max(known, key=lambda iteration: self._sign * self._values[iteration])
                content = {"iteration": best, "metric": self._metric, "value": self._values[best]}
                (self._run_dir / BEST_FILE).write_text(json.dumps(content) + "\n")
                spare.add(best)
            if self._checkpoints:
                gone = checkpoints.retain(self._root, max(self._checkpoints), self._keep, spare)
                self._checkpoints.difference_update(gone)
        except (OSError, ValueError) as error:
            # What could not be deleted now goes with the next one.
            log.warning("an old checkpoint could not be deleted: %s", error)
