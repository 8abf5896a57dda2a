"""A Ray head on this machine to try `ray job submit` with: `python -m jobs.cluster start` and `... stop`.

It runs beside any other Ray: on free ports, in a folder of its own, the job server on 127.0.0.1 alone and all of it
behind a token. What was started stands in the state file, and `stop` ends that and nothing else; `ray stop` would end
every Ray of the user.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs.train import complain
from pipeline.cluster import LOCAL_RAY

HOST = "127.0.0.1"
DASHBOARD_PORT = 8265
"""Ray's own default, taken where it is free."""

START_S, STOP_S = 120.0, 60.0
JOB_STOP_WAIT_S = 600
"""How long `ray job stop` lets a run end its iteration and save, in place of Ray's three seconds."""


@dataclass(frozen=True)
class Head:
    """A running head, as it stands in the state file."""

    pid: int
    address: str
    """URL of its job server and dashboard."""
    folder: str
    """Ray's temporary folder of this head alone: logs, sockets, packages."""

    def is_running(self) -> bool:
        """Whether the process is there and is this head, not another one that got its number since."""
        try:
            return self.folder.encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False


class ClusterError(RuntimeError):
    """The head could not be started or ended; the message says why and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 done, 1 failed)."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.cluster", description="Start or stop a Ray head on this machine, to submit jobs to."
    )
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument(
        "--cpus",
        type=int,
        default=max(8, os.cpu_count() or 1),
        help="CPUs that Ray is told it has; phases of a run alternate, so more than there are (default: %(default)s)",
    )
    parser.add_argument(
        "--state", type=Path, default=Path(".cluster.json"), help="file that says what runs (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.action == "start":
            head = start(options.state, options.cpus)
            print(f"Ray runs at {head.address}; its logs are in {head.folder}/session_latest/logs. To submit a run:\n")
            print(f"  {submit_line(head)}\n")
            print("Paths are absolute because a job runs in a copy of this folder. To end this Ray: make cluster-stop")
        else:
            print("The head has ended." if stop(options.state) else "No head of this folder was running.")
    except (ClusterError, OSError) as error:
        complain(str(error))
        return 1
    return 0


def submit_line(head: Head) -> str:
    """The command that submits the demo's run, once `make demo` has made its data and model."""
    here = Path.cwd()
    data = here / "data" / "countdown-1"
    lines = (
        f"RAY_AUTH_MODE=token ray job submit --address {head.address} --working-dir . --",
        f"    python -m jobs.train experiment=countdown_cpu trainer.default_local_dir={here}/runs",
        f"    trainer.experiment_name=submitted model.path={here}/models/tiny-sft-1",
        f"    data.train_files={data}/train.parquet data.val_files={data}/test.parquet",
    )
    return " \\\n".join(lines)


def start(state: Path, cpus: int) -> Head:
    """Start a head and wait until it takes jobs.

    Args:
        state: file that will say what runs.
        cpus: CPUs that Ray is told it has.

    Raises:
        ClusterError: one runs already, or it did not come up in time.
    """
    if (running := read(state)) and running.is_running():
        raise ClusterError(f"a head of this folder runs already, at {running.address}; end it with make cluster-stop")
    # Sockets lie in the folder, and the path of one may not exceed 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-head-", dir="/tmp")
    dashboard, *others = free_ports(4, first=DASHBOARD_PORT)
    env = environment(cpus)
    token = subprocess.run(
        [executable("ray"), "get-auth-token", "--generate"], env=env, capture_output=True, text=True, check=False
    )
    if token.returncode:
        raise ClusterError(f"Ray made no token: {token.stderr.strip()}")
    names = ("--port", "--ray-client-server-port", "--dashboard-agent-listen-port")
    command = [executable("ray"), "start", "--head", "--block", f"--temp-dir={folder}", f"--num-cpus={cpus}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"]
    command += ["--disable-usage-stats", *(f"{name}={port}" for name, port in zip(names, others, strict=True))]
    log = Path(folder, "head.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    head = Head(process.pid, f"http://{HOST}:{dashboard}", folder)
    state.write_text(json.dumps(asdict(head)))
    deadline = time.monotonic() + START_S
    while not answers(head, token.stdout.strip()):
        if process.poll() is not None or time.monotonic() > deadline:
            problem = "did not answer in time" if process.poll() is None else f"ended with code {process.returncode}"
            said = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            stop(state)
            raise ClusterError(f"the head {problem}; the last it said:\n{said}")
        time.sleep(0.5)
    return head


def stop(state: Path) -> bool:
    """End the head of the state file; whether one ran.

    Raises:
        ClusterError: it goes on after SIGKILL.
    """
    head = read(state)
    if head is None:
        return False
    ran = head.is_running()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S
        if head.is_running():
            os.kill(head.pid, number)
        while head.is_running():
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    if head.is_running():
        raise ClusterError(f"process {head.pid} does not end; its logs are in {head.folder}")
    state.unlink()
    shutil.rmtree(head.folder, ignore_errors=True)
    return ran


def read(state: Path) -> Head | None:
    """The head of a state file; None without one."""
    return Head(**json.loads(state.read_text())) if state.is_file() else None


def environment(cpus: int) -> dict[str, str]:
    """Of the head and thereby of every driver and worker."""
    env = {**os.environ, **LOCAL_RAY, "RAY_AUTH_MODE": "token", "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_WAIT_S)}
    # Ray counts the machine's cores and warns in every job's log when more processes than that start together.
    env["RAY_worker_maximum_startup_concurrency"] = str(cpus)
    # There is no other node to which work could move first.
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    env.pop("RAY_ADDRESS", None)
    # A job says `python`; that is to be the one that has the packages.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def executable(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def free_ports(count: int, first: int) -> list[int]:
    """Ports that are free now, all different; `first` among them, in front, where it is free."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for number, sock in enumerate(sockets):
            try:
                sock.bind((HOST, 0 if number else first))
            except OSError:
                sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def answers(head: Head, token: str) -> bool:
    """Whether the job server takes requests."""
    request = urllib.request.Request(f"{head.address}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


if __name__ == "__main__":
    sys.exit(main())
