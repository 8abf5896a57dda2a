"""The kills of one run, one after the other, and what followed each of them."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.track.history import read_history
from tests.chaos.processes import Found
from tests.chaos.schedule import Kill
from tests.chaos.site import ChaosError, Site

POLL_S = 0.1
LOOK_S = 0.05
"""Between two looks for a process; tasks last a fraction of a second."""
SHORT_LIVED = ("light task", "reward task", "reward worker", "service")
"""Kinds of which there are many or none; that one of them is new says nothing."""


@dataclass
class Strike:
    """A kill that was made, and what became of it."""

    number: int
    kind: str
    pid: int
    early: bool
    iteration: int
    """The last one in `metrics.jsonl` when the process was killed."""
    at: float
    """Unix time."""
    title: str = ""
    next_s: float | None = None
    """Seconds until the next iteration was done, which may have been in work already."""
    second_s: float | None = None
    """Seconds until the one after it was done, which the killed process would have had a part in."""
    again: int = 0
    """Iterations that had been done and were done again."""
    renewed: list[str] = field(default_factory=list)
    """Kinds whose process is another one since."""

    @property
    def told(self) -> str:
        """What happened, in words."""
        if "driver" in self.renewed:
            whole = "with a new Ray" if "head" in self.renewed else "its actors with it"
            return f"the same command was started again, {whole}"
        if "train worker" in self.renewed:
            return "Ray Train restarted the train workers from the checkpoint, and the stream"
        if self.renewed:
            return f"restarted: {', '.join(self.renewed)}"
        return "the work was done again by another process" if self.kind in SHORT_LIVED else "nothing else"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"told": self.told}


class Campaign:
    """Kills processes of a run by a schedule and waits for its end.

    Args:
        site: the run and what stands around it; started.
        run_dir: the run's folder.
        kills: the schedule.
        seed: of the choice among several processes of a kind.
        patience_s: longest time without a new iteration.
        say: told every event in a sentence.
    """

    def __init__(
        self,
        site: Site,
        run_dir: Path,
        kills: Sequence[Kill],
        seed: int,
        patience_s: float,
        say: Callable[[str], None],
    ):
        self._site, self._metrics, self._kills = site, run_dir / "metrics.jsonl", kills
        self._random = random.Random(seed)
        self._patience_s, self._say = patience_s, say
        self.strikes: list[Strike] = []
        self.events: list[str] = []
        self._before: dict[int, dict[str, set[int]]] = {}
        """By number of a kill: the processes of each kind before it, until the next kill."""
        self._moved_at = time.time()
        self._last: tuple[int, float] = (0, 0.0)
        """Iteration and time of the last line of the history."""

    def run(self) -> None:
        """Make all kills, then wait until the run has ended.

        Raises:
            ChaosError: the run did not come back, or ended before the last kill.
        """
        for number, kill in enumerate(self._kills, start=1):
            self._await_moment(kill)
            self._strike(number, kill)
        self._say("the last kill is made; the run goes on to its end")
        while not self._site.finished:
            self._tick()
            time.sleep(POLL_S)
        self._tick()

    def _await_moment(self, kill: Kill) -> None:
        since = self.strikes[-1].at if self.strikes else time.time()
        while not kill.early and self._last[1] <= since:
            self._tick()
            time.sleep(POLL_S)
        until = (since if kill.early else time.time()) + kill.delay_s
        while time.time() < until:
            self._tick()
            time.sleep(POLL_S)

    def _strike(self, number: int, kill: Kill) -> None:
        while True:
            self._tick()
            if self._site.finished:
                raise ChaosError(f"the run ended before kill {number} ({kill.kind}); give it more --iterations")
            found = self._site.find()
            if candidates := [process for process in found if process.kind == kill.kind]:
                break
            time.sleep(LOOK_S)
        for strike in self.strikes:
            self._compare(strike, found)
        self._before.clear()
        victim = self._random.choice(sorted(candidates, key=lambda process: process.pid))
        self._before[number] = _by_kind(found)
        self._site.kill(victim)
        iteration = self._last[0]
        strike = Strike(number, kill.kind, victim.pid, kill.early, iteration, time.time(), victim.title)
        self.strikes.append(strike)
        self._moved_at = strike.at
        when = "while it recovered" if kill.early else "later"
        self._say(
            f"kill {number} of {len(self._kills)}: {kill.kind} (process {victim.pid}), iteration {iteration}, {when}"
        )

    def _tick(self) -> None:
        told = self._site.tend()
        self.events += told
        for sentence in told:
            self._say(sentence)
        for record in read_history(self._metrics):
            if record["time"] > self._last[1]:
                self._last = record["iteration"], record["time"]
                self._moved_at = time.time()
                self._settle(*self._last)
        if time.time() - self._moved_at > self._patience_s and not self._site.finished:
            raise ChaosError(
                f"no iteration came for {self._patience_s:.0f} s{self._after()}; the driver's last words: "
                f"{self._site.driver.printed().strip().splitlines()[-1:]}"
            )

    def _after(self) -> str:
        return f" after kill {self.strikes[-1].number} ({self.strikes[-1].kind})" if self.strikes else ""

    def _settle(self, iteration: int, at: float) -> None:
        """A new line of the history, of `iteration` and written at `at`."""
        for strike in self.strikes:
            if strike.second_s is not None or at <= strike.at:
                continue
            strike.again = max(strike.again, strike.iteration + 1 - iteration)
            if strike.next_s is None and iteration > strike.iteration:
                strike.next_s = round(at - strike.at, 1)
            if iteration > strike.iteration + 1:
                strike.second_s = round(at - strike.at, 1)
                self._compare(strike, self._site.find())

    def _compare(self, strike: Strike, found: Sequence[Found]) -> None:
        if before := self._before.get(strike.number):
            now = _by_kind(found)
            both = sorted(before.keys() & now.keys() - set(SHORT_LIVED))
            strike.renewed = [kind for kind in both if now[kind] - before[kind]]


def _by_kind(found: Sequence[Found]) -> dict[str, set[int]]:
    kinds: dict[str, set[int]] = {}
    for process in found:
        kinds.setdefault(process.kind, set()).add(process.pid)
    return kinds
