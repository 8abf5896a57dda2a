"""A Ray node on each of two hosts, and whoever starts a node again when it has ended."""

import secrets
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.heads import environment, executable
from tests.hosts.network import HOSTS, Network

ROOT = Path(__file__).resolve().parents[2]
CPUS = 8
OBJECT_STORE_BYTES = 1 << 29
PORT = 6379
LABELS = {"a": "role=train", "b": "role=rollout"}
START_S, AGAIN_S = 120.0, 2.0
UP = b"Ray runtime started"
"""What `ray start` says once the node has joined."""


class ClusterError(RuntimeError):
    """A node did not start; the message has the last that it said."""


class Node:
    """`ray start --block` on a host, started again whenever it ends, as systemd or Kubernetes would do.

    Args:
        network: the hosts.
        host: `a`, which has the head, or `b`.
        env: environment of the node's processes.
        temp_dir: Ray's folder of this node; sockets lie in it, so the path must be short.
        log: file for what `ray start` says, whichever time it was started.
    """

    def __init__(self, network: Network, host: str, env: dict[str, str], temp_dir: Path, log: Path):
        self._network, self._host, self._env, self.log = network, host, env, log
        joins = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if host != "a":
            joins = [f"--address={HOSTS['a']}:{PORT}"]
        self._command = [
            *(executable("ray"), "start", "--block", "--disable-usage-stats", *joins),
            *(f"--node-ip-address={HOSTS[host]}", f"--temp-dir={temp_dir}", f"--labels={LABELS[host]}"),
            *(f"--num-cpus={CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        ]
        self.ended_at: list[float] = []
        """Unix times at which a node that had joined the cluster ended."""
        self._stopping = threading.Event()
        self._said_before = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name=f"node-{host}", daemon=True)

    def start(self) -> None:
        """Start it and wait until it has joined.

        Raises:
            ClusterError: it has not after two minutes.
        """
        self._thread.start()
        self.wait()

    def wait(self) -> None:
        """Wait until the node is part of the cluster, which it may have been all along.

        Raises:
            ClusterError: it is not after two minutes.
        """
        deadline = time.monotonic() + START_S
        while not self.is_up():
            if time.monotonic() > deadline:
                last = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
                raise ClusterError(
                    f"the node on host {self._host} has not joined the cluster; the last it said:\n{last}"
                )
            time.sleep(0.2)

    def is_up(self) -> bool:
        """Whether the node runs and has said that it joined."""
        return self._process is not None and self._process.poll() is None and self._has_joined()

    def stop(self) -> None:
        """Do not start it again; the network ends its processes."""
        self._stopping.set()
        self._network.kill(self._host)
        while self._thread.is_alive():
            # It may have been about to start the next one.
            self._network.kill(self._host)
            self._thread.join(0.5)

    def _has_joined(self) -> bool:
        """Whether the last process did, by what it has said."""
        return UP in self.log.read_bytes()[self._said_before :]

    def _keep(self) -> None:
        while not self._stopping.is_set():
            with self.log.open("ab") as output:
                self._said_before = output.tell()
                self._process = subprocess.Popen(
                    self._network.inside(self._host, self._command),
                    env=self._env,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                self._process.wait()
            if self._stopping.is_set():
                return
            if self._has_joined():
                self.ended_at.append(time.time())
            # Nothing of the old node may live on beside the new one.
            self._network.kill(self._host)
            self._stopping.wait(AGAIN_S)


class Cluster:
    """The head on host a and a worker node on host b, from `with` to its end.

    Args:
        network: the hosts.
        temp_dir: folder for those of Ray, with a short path.
        logs: folder for what `ray start` says.
        unanswered: checks of a node's health, one a second with two seconds for its answer, without an answer to which
            the head declares it dead; None leaves the checks as Ray has them.
    """

    def __init__(self, network: Network, temp_dir: Path, logs: Path, unanswered: int | None):
        self.env = environment(CPUS) | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # The rows of a tiny run would else be small enough to travel in messages. Those of a real one lie in the
            # memory of the node that made them, and are lost with it.
            "RAY_max_direct_call_object_size": "1000",
        }
        if unanswered is not None:
            self.env["RAY_health_check_failure_threshold"] = str(unanswered)
            self.env |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
        self.head, self.worker = (
            Node(network, host, self.env, temp_dir / host, logs / f"node_{host}.log") for host in HOSTS
        )
        self.driver_env = {**self.env, "RAY_ADDRESS": f"{HOSTS['a']}:{PORT}"}
        """Environment of a driver on host a."""

    def __enter__(self) -> "Cluster":
        try:
            self.head.start()
            self.worker.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        for node in (self.worker, self.head):
            node.stop()
