"""What stands around a run and starts again what has died, as KubeRay and its operators would.

    head (its own Ray, on free ports) ── [second node]        tracking server        driver: python -m jobs.train ...

The driver is started again by the same command until it ends well. Nothing here looks into the run.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.run.cluster import LOCAL_RAY
from tests.chaos import processes
from tests.chaos.inputs import NODE_LABEL
from tests.chaos.processes import Found

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
CPUS = 8
"""What each node says it has: the phases of a run alternate."""
START_S = 240.0
PAUSE_S = {"head": 1.0, "node": 3.0, "tracker": 5.0, "driver": 1.0}
"""Seconds for which each stays away when it has died."""
OUTLIVES_S = 120.0
"""Seconds in which a driver must notice that its Ray is gone."""
REFUSED = 2
"""Exit code of a driver that does not like its settings."""


class ChaosError(RuntimeError):
    """The run did not do what it must; the message says what."""


class Daemon:
    """A process that is started again when it has ended.

    Args:
        name: for messages and for the name of its log.
        folder: of the log.
        command: what to start; called anew each time.
        env: its environment.
        ready: whether it can be used; called with what it has printed.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Callable[[], Sequence[str]],
        env: Callable[[], dict[str, str]],
        ready: Callable[[str], bool] = lambda printed: True,
    ):
        self.name, self._folder, self._command, self._env, self._ready = name, folder, command, env, ready
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.created = 0.0
        self._died_at: float | None = None

    @property
    def log(self) -> Path:
        """What the process prints; a new file for each start."""
        return self._folder / f"{self.name}-{self.starts}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it and wait until it can be used.

        Raises:
            ChaosError: it ended or did not get ready in time.
        """
        self.starts += 1
        self._died_at = None
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self._command(), env=self._env(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self.created = time.time()
        deadline = time.monotonic() + START_S
        while not self._ready(self.printed()):
            if not self.alive or time.monotonic() > deadline:
                raise ChaosError(f"the {self.name} did not start; see {self.log}")
            time.sleep(0.1)

    def due(self) -> bool:
        """Whether it has died and has been away for long enough."""
        if self.alive:
            return False
        self._died_at = self._died_at or time.monotonic()
        return time.monotonic() - self._died_at >= PAUSE_S[self.name]

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to it and to all it has started."""
        if self.process is not None:
            processes.kill_tree(self.process.pid)
            self.process.wait()


class Site:
    """A cluster of this script's own, a tracking server and a driver.

    Args:
        folder: of logs and of the tracking server's database.
        command: the driver's command.
        nodes: 2 adds a second node.
        mlflow: whether there is a tracking server.
    """

    def __init__(self, folder: Path, command: Sequence[str], nodes: int = 1, mlflow: bool = True):
        self._logs = folder / "logs"
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        # Sockets lie there, and the path of one may not exceed 107 characters.
        self.ray_folder = Path(tempfile.mkdtemp(prefix="ray-chaos-", dir="/tmp"))
        self._port = self._tracker_port = 0
        self._tracker_folder = folder / "tracking"
        self.head = Daemon("head", self._logs, self._head_command, _ray_env, _ray_runs)
        self.node = Daemon("node", self._logs, self._node_command, _ray_env, _ray_runs) if nodes > 1 else None
        self.tracker = (
            Daemon("tracker", self._logs, self._tracker_command, driver_env, self._answers) if mlflow else None
        )
        self.driver = Daemon("driver", self._logs, lambda: command, self._driver_env)
        self.ended: list[tuple[int, str]] = []
        """Exit code and last words of each driver that has ended."""

    def start(self) -> None:
        """Start everything."""
        for daemon in (self.tracker, self.head, self.node, self.driver):
            if daemon is not None:
                daemon.start()

    def stop(self) -> None:
        """End everything that was started here."""
        for daemon in (self.driver, self.node, self.head, self.tracker):
            if daemon is not None:
                daemon.kill()
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    @property
    def finished(self) -> bool:
        """Whether the driver has ended well."""
        return self.driver.process is not None and self.driver.process.poll() == 0

    def tend(self) -> list[str]:
        """Start again what has died; sentences on drivers that ended by themselves.

        Raises:
            ChaosError: the driver refuses its settings, or does not end though its Ray has.
        """
        told = []
        if self.head.due():
            self._await_the_drivers_end()
            if self.node is not None:
                self.node.kill()
            self.head.start()
        for daemon in (self.node, self.tracker):
            if daemon is not None and daemon.due():
                daemon.start()
        if not self.driver.alive and len(self.ended) < self.driver.starts:
            assert self.driver.process is not None
            code = self.driver.process.returncode
            self.ended.append((code, last_words(self.driver.printed())))
            if code == REFUSED:
                raise ChaosError(f"the driver refused to go on: {self.ended[-1][1]}")
            if code not in (0, -signal.SIGKILL):
                told.append(f"driver {self.driver.starts} ended with code {code}: {self.ended[-1][1]}")
        # Without the second node the run would be refused.
        if not self.finished and self.driver.due() and (self.node is None or self.node.alive):
            self.driver.start()
        return told

    def find(self) -> list[Found]:
        """All processes that can be killed."""
        roots = [daemon.pid for daemon in (self.head, self.node) if daemon is not None and daemon.alive]
        daemons = [daemon for daemon in (self.head, self.node, self.tracker, self.driver) if daemon is not None]
        own = [Found(daemon.name, daemon.pid, daemon.created, "") for daemon in daemons if daemon.alive]
        return [*own, *processes.workers(roots)]

    def kill(self, found: Found) -> None:
        """SIGKILL to the process; to all processes of a node and of the tracking server."""
        for daemon in (self.head, self.node, self.tracker):
            if daemon is not None and daemon.name == found.kind:
                daemon.kill()
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, signal.SIGKILL)

    def _await_the_drivers_end(self) -> None:
        assert self.driver.process is not None
        try:
            self.driver.process.wait(OUTLIVES_S)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"the driver went on for {OUTLIVES_S:.0f} s after the end of its Ray") from None

    def _head_command(self) -> list[str]:
        self._port = free_port()
        return [
            *_ray_start(), "--head", f"--port={self._port}", f"--temp-dir={self.ray_folder}",
            "--include-dashboard=false", "--disable-usage-stats", f"--ray-client-server-port={free_port()}",
        ]  # fmt: skip

    def _node_command(self) -> list[str]:
        return [*_ray_start(), f"--address={HOST}:{self._port}", f"--labels={NODE_LABEL}"]

    def _tracker_command(self) -> list[str]:
        # The same port each time: the driver knows no other.
        self._tracker_port = self._tracker_port or free_port()
        self._tracker_folder.mkdir(parents=True, exist_ok=True)
        return [
            _executable("mlflow"), "server", "--host", HOST, "--port", str(self._tracker_port), "--workers", "1",
            "--backend-store-uri", self.tracking_database, "--artifacts-destination", f"{self._tracker_folder}/files",
        ]  # fmt: skip

    @property
    def tracking_database(self) -> str:
        """URI of the tracking server's database."""
        return f"sqlite:///{self._tracker_folder}/mlflow.db"

    def _driver_env(self) -> dict[str, str]:
        env = driver_env() | {"RAY_ADDRESS": f"{HOST}:{self._port}", "RAY_AUTH_MODE": "disabled"}
        if self.tracker is not None:
            env["MLFLOW_TRACKING_URI"] = f"http://{HOST}:{self._tracker_port}"
        return env

    def _answers(self, printed: str) -> bool:
        with contextlib.closing(socket.socket()) as sock:
            return sock.connect_ex((HOST, self._tracker_port)) == 0


def last_words(printed: str) -> str:
    """The sentence with which a driver ended, or the last line that it printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["nothing"])[-1]


def free_port() -> int:
    """A port that nobody listens on now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def _executable(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def _ray_start() -> list[str]:
    # Two nodes on one machine would take each other's ports from a range; 0 lets the system choose.
    ports = ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
    sizes = [f"--num-cpus={CPUS}", f"--object-store-memory={512 << 20}"]
    return [_executable("ray"), "start", "--block", f"--node-ip-address={HOST}", *ports, *sizes]


def _ray_runs(printed: str) -> bool:
    return "Ray runtime started" in printed


def _ray_env() -> dict[str, str]:
    # Ray counts the machine's cores and starts few workers at a time.
    return driver_env() | LOCAL_RAY | {"RAY_AUTH_MODE": "disabled", "RAY_worker_maximum_startup_concurrency": str(CPUS)}


def driver_env() -> dict[str, str]:
    """Environment of a driver that knows of no cluster and no tracking server."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "200"}
    env["PYTHONUNBUFFERED"] = "1"
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        env.pop(name, None)
    return env
