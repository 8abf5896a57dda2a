"""One run over two hosts whose cable is pulled in its middle, and what became of it."""

import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.track.history import read_history
from pipeline.track.trajectories import read_trajectories
from tests.hosts.account import account
from tests.hosts.cluster import HOSTS, Cluster
from tests.hosts.driver import WORKERS, Driver, Stuck
from tests.hosts.network import Network

COMMANDS, PAUSE_S = 4, 10.0
"""Times that the command of the run is given at most, and seconds before each that is not the first."""
PLACES = {"MapBatches(Rollout)": {"b": 1}, "RayTrainWorker": {"a": WORKERS}, "PolicyStore": {"a": 1}}
"""How many processes with this in their title belong on a host: engines, train workers, and what must outlive them."""


@dataclass(frozen=True)
class Scenario:
    """How long the cable is out."""

    name: str
    cut_s: float
    """Seconds without the cable."""
    unanswered: int | None
    """Health checks without an answer after which node b is dead (`Cluster`); None leaves Ray's rule, five checks with
    ten seconds for each answer."""
    node_dies: bool
    """Whether node b is expected to be declared dead in these seconds."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    settings: list[str]
    """Of the run, without its name, length, workers and placement."""
    prompts: int
    """In the training files."""
    batch: int
    """Prompts of an iteration."""
    samples: int
    """Responses per prompt."""
    iterations: int


@dataclass
class Outcome:
    """What became of a run."""

    scenario: Scenario
    work: Work
    cut_after: int
    """Iterations that were recorded when the cable was to be pulled."""
    node_ends: list[float] = field(default_factory=list)
    """Seconds from the cut to each end of node b, which was started again each time."""
    endings: list[str] = field(default_factory=list)
    """The sentence of each command that ended before the run did."""
    quiet_s: float = 0.0
    """The longest time between two iterations from the cut on."""
    usual_s: float = 0.0
    """The run's median time between two iterations."""
    problems: list[str] = field(default_factory=list)
    """What should have been otherwise; empty for a good run."""

    def told(self) -> str:
        """What happened, in words."""
        node = "node b stayed in the cluster"
        if self.node_ends:
            times = " and ".join(f"{seconds:.0f} s" for seconds in self.node_ends)
            node = f"node b was given up, ended {times} after the cut and was started again"
        run = "; ".join(f"the run ended with “{ending}” and went on by the same command" for ending in self.endings)
        where = f"cable out for {self.scenario.cut_s:g} s after iteration {self.cut_after}"
        return f"{where}; {node}; {run or 'the run went on by itself'}"

    def result(self) -> str:
        """The verdict, in words."""
        if self.problems:
            return f"FAILED: {'; '.join(self.problems)}"
        work = self.work
        rows = work.iterations * work.batch * work.samples
        return f"{work.iterations} of {work.iterations} iterations, {rows} of {rows} rows, each prompt once per epoch"


def play(scenario: Scenario, work: Work, folder: Path, seed: int) -> Outcome:
    """Play a scenario, from no network to the end of the run and of everything that was started.

    Args:
        scenario: what is done to the cable.
        work: what is trained meanwhile.
        folder: for the run's folder and all logs; made.
        seed: of the moment at which the cable is pulled.
    """
    folder.mkdir(parents=True)
    draw = random.Random(f"{seed} {scenario.name}")
    outcome = Outcome(scenario, work, cut_after=draw.randint(2, work.iterations // 2))
    delay_s = draw.uniform(0.0, 2.0)
    # Sockets lie in it, and the path of one may not exceed 107 characters.
    temp_dir = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
    steps = f"trainer.total_training_steps={work.iterations}"
    try:
        with (
            Network(f"slip-{os.getpid()}") as network,
            Cluster(network, temp_dir, folder, scenario.unanswered) as cluster,
        ):
            driver = Driver(network, cluster, folder, scenario.name, [*work.settings, steps])
            driver.give()
            try:
                if driver.follow(until=outcome.cut_after):
                    outcome.problems.append(f"the run ended before the cable was pulled: {driver.endings}")
                else:
                    time.sleep(delay_s)
                    _pull(network, cluster, driver, outcome)
            except Stuck as error:
                outcome.problems.append(str(error))
            if not outcome.problems:
                outcome.problems += account(driver.run_dir, work.iterations, work.prompts, work.batch, work.samples)
            if not outcome.problems:
                outcome.problems += _strangers(driver.run_dir, work.iterations)
    finally:
        for host in HOSTS:
            logs = temp_dir / host / "session_latest" / "logs"
            if logs.is_dir():
                shutil.copytree(logs, folder / f"ray_{host}", ignore_dangling_symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(temp_dir, ignore_errors=True)
    return outcome


def _pull(network: Network, cluster: Cluster, driver: Driver, outcome: Outcome) -> None:
    """Pull the cable, put it back, and see the run to its end."""
    outcome.problems += _misplaced(network, driver.console.parent)
    cut_at = time.time()
    network.cut()
    try:
        time.sleep(outcome.scenario.cut_s)
    finally:
        network.mend()
    outcome.endings = driver.endings
    try:
        driver.follow()
        while driver.failed and len(driver.endings) < COMMANDS:
            time.sleep(PAUSE_S)
            cluster.worker.wait()
            driver.give()
            driver.follow()
    finally:
        outcome.node_ends = [at - cut_at for at in cluster.worker.ended_at]
    if driver.failed:
        outcome.problems.append(f"the command was given {COMMANDS} times and the run is not at its end")
    if bool(outcome.node_ends) != outcome.scenario.node_dies:
        outcome.problems.append("node b was given up" if outcome.node_ends else "node b was not given up")
    if driver.endings and not outcome.scenario.node_dies:
        outcome.problems.append("the run did not go on by itself")
    times = [record["time"] for record in read_history(driver.metrics)]
    gaps = [(later, later - earlier) for earlier, later in zip(times, times[1:], strict=False)]
    outcome.quiet_s = max((gap for at, gap in gaps if at > cut_at), default=0.0)
    outcome.usual_s = statistics.median([gap for _, gap in gaps] or [0.0])


def _misplaced(network: Network, folder: Path) -> list[str]:
    """What runs on the wrong host, by the namespaces of the processes; all of Ray's are listed in `processes.txt`."""
    titles = {host: sorted(network.processes(host).values()) for host in HOSTS}
    lines = [f"host {host}: {title}" for host in HOSTS for title in titles[host] if title.startswith("ray::")]
    (folder / "processes.txt").write_text("\n".join(lines) + "\n")
    found = []
    for part, expected in PLACES.items():
        for host in HOSTS:
            count = sum(part in title for title in titles[host])
            if count != expected.get(host, 0):
                found.append(f"host {host} has {count} processes of {part}, not {expected.get(host, 0)}")
    return found


def _strangers(run_dir: Path, iterations: int) -> list[str]:
    """What was not generated on host b, by the rows."""
    tables = [read_trajectories(str(run_dir), iteration, columns=["engine"]) for iteration in range(1, iterations + 1)]
    engines = {engine for table in tables for engine in table["engine"].to_pylist()}
    strange = sorted(engine for engine in engines if not engine.startswith("host-b:"))
    return [f"rows came from {', '.join(strange)}, which are not on host b"] if strange else []
