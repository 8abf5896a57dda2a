"""The command of a run, given on host a as often as it takes."""

import re
import subprocess
import sys
import time
from pathlib import Path

from pipeline.track.history import read_history
from tests.hosts.cluster import LABELS, ROOT, Cluster
from tests.hosts.network import Network

PATIENCE_S = 300.0
"""Longest wait for the next iteration; covers what starts before the first, and a new engine."""
DEADLINES = {"engine_start": 90, "chunk": 30, "admission": 120, "rows": 130}
"""Shorter than the patience here: a wait that nobody ends is to end with the run's own sentence."""
WORKERS = 2
STAGES = {"prompts": "a", "rollout": "b", "reward": "a", "train": "a"}
"""Which host each stage is kept to."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Stuck(Exception):
    """Nothing has moved for `PATIENCE_S`."""


class Driver:
    """`python -m jobs.train` on host a.

    Args:
        network: the hosts.
        cluster: Ray on them.
        folder: for the run's folder and `console.log`.
        name: of the run.
        settings: further settings.
    """

    def __init__(self, network: Network, cluster: Cluster, folder: Path, name: str, settings: list[str]):
        self._cluster = cluster
        self.run_dir = folder / name
        self.metrics = self.run_dir / "metrics.jsonl"
        self.console = folder / "console.log"
        placement = (f"trainer.placement.{stage}.{LABELS[host]}" for stage, host in STAGES.items())
        self._command = network.inside(
            "a",
            [
                *(sys.executable, "-m", "jobs.train", *settings, *placement),
                *(f"trainer.experiment_name={name}", f"trainer.default_local_dir={folder}"),
                *(f"trainer.num_workers={WORKERS}", "trainer.save_freq=1", "trainer.max_failures=3"),
                *(f"trainer.deadlines.{wait}={seconds}" for wait, seconds in DEADLINES.items()),
            ],
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0
        self.failed = False
        """Whether the last command ended before the run did."""
        self.endings: list[str] = []
        """The sentence of each that did."""

    def give(self) -> None:
        """Give the command."""
        with self.console.open("ab") as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                self._command,
                env=self._cluster.driver_env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def recorded(self) -> int:
        """The last iteration in the run's record, 0 before the first."""
        records = read_history(self.metrics)
        return records[-1]["iteration"] if records else 0

    def follow(self, until: int | None = None) -> bool:
        """Wait until iteration `until` is recorded or the command has ended; whether it has ended.

        Raises:
            Stuck: no iteration came for too long.
        """
        assert self._process is not None
        last, moved_at = self.recorded(), time.monotonic()
        while (code := self._process.poll()) is None:
            now = self.recorded()
            if until is not None and now >= until:
                return False
            if now != last:
                last, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > PATIENCE_S:
                said = self.console.read_text(errors="replace").strip().splitlines()[-1:]
                raise Stuck(f"nothing came after iteration {last} for {PATIENCE_S:g} s; the run's last words: {said}")
            time.sleep(0.1)
        self.failed = code != 0
        if self.failed:
            said = STYLE.sub("", self.console.read_bytes()[self._began :].decode(errors="replace")).splitlines()
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
            self.endings.append(errors[-1] if errors else f"code {code} and no sentence")
        return True
