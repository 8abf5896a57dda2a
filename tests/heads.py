"""A Ray head on this machine that takes jobs, started by the commands of docs/clusters.md."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.cluster import LOCAL_RAY

PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
START_S, STOP_S = 120.0, 60.0


@dataclass(frozen=True)
class Head:
    """A running head."""

    address: str
    """URL of its job server."""
    env: dict[str, str]
    """Variables with which commands reach it, besides those of this process."""


def executable(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def environment(cpus: int) -> dict[str, str]:
    """Environment of a Ray node with tokens, and so of all its processes."""
    env = {**os.environ, **LOCAL_RAY, "RAY_AUTH_MODE": "token"}
    # Ray counts the machine's cores and warns in every job's log when more processes than that start together.
    env["RAY_worker_maximum_startup_concurrency"] = str(cpus)
    # There is no other node to which work could move first.
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    env.pop("RAY_ADDRESS", None)
    # A job calls `python`, which must be the one that has the packages.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def commands() -> list[str]:
    """The lines of the section "On this machine"."""
    return PAGE.read_text(encoding="utf-8").split("### On this machine")[1].split("```")[1].strip().splitlines()


@contextmanager
def head(cpus: int) -> Iterator[Head]:
    """The page's head, on free ports and in a folder of its own; other Rays of the machine are left alone."""
    lines = commands()
    exported = dict(word.split("=", 1) for line in lines if line.startswith("export ") for word in line.split()[1:])
    [start] = [line for line in lines if line.startswith("ray start ")]
    sockets = [socket.socket() for _ in range(4)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    dashboard, gcs, client, agent = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    address = f"http://127.0.0.1:{dashboard}"
    known = {**exported, "RAY_API_SERVER_ADDRESS": address, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Sockets lie in the folder, and the path of a socket may have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-head-", dir="/tmp")
    command = [executable("ray"), *start.split()[1:], "--disable-usage-stats", f"--temp-dir={folder}"]
    command = [re.sub("^--num-cpus=.*", f"--num-cpus={cpus}", word) for word in command]
    command += [f"--dashboard-port={dashboard}", f"--port={gcs}", f"--ray-client-server-port={client}"]
    command += [f"--dashboard-agent-listen-port={agent}"]
    log = Path(folder, "head.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(cpus) | known,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(address, known["RAY_AUTH_TOKEN"]):
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            assert process.poll() is None and time.monotonic() < deadline, f"the head does not answer:\n{last}"
            time.sleep(0.5)
        yield Head(address, known)
    finally:
        # Ctrl-C in its terminal.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _answers(address: str, token: str) -> bool:
    request = urllib.request.Request(f"{address}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False
