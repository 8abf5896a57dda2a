"""A Ray head on this machine for `ray job submit`: `python -m jobs.cluster start`, and `... stop`.

The head runs beside any other Ray: on free ports, in a folder of its own, with the job server on 127.0.0.1 only, and
every request needs a token. A state file records what was started. `stop` ends that process only, whereas `ray stop`
would end every Ray of the user.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from jobs.command import exit_code, new_parser
from jobs.entry import command
from pipeline.config.paths import local_path
from pipeline.run.cluster import LOCAL_RAY

HOST = "127.0.0.1"
DASHBOARD_PORT = 8265
"""Ray's default port, used when it is free."""
START_S, STOP_S = 120.0, 60.0

COMMANDS = """\
Ray runs at {address}; its logs are in {folder}/session_latest/logs. For the `ray job` commands below:

  export RAY_API_SERVER_ADDRESS={address} RAY_AUTH_MODE=token

  ray job submit --no-wait --submission-id first --working-dir . -- \\
      python -m jobs.train experiment=countdown_cpu trainer.default_local_dir={here}/runs \\
      trainer.experiment_name=submitted model.path={here}/models/tiny-sft-1 \\
      data.train_files={here}/data/countdown-1/train.parquet data.val_files={here}/data/countdown-1/test.parquet
  ray job status first
  ray job logs -f first
  ray job stop first

Paths are absolute because a job runs in a copy of this folder. `make cluster-stop` ends this Ray."""


@dataclass(frozen=True)
class Head:
    """A running head, as the state file records it."""

    pid: int
    address: str
    """URL of its job server and dashboard."""
    folder: str
    """Ray's temporary folder of this head: logs, sockets, packages."""

    def is_running(self) -> bool:
        """Whether the process exists and is this head, and not a later process with the same number."""
        try:
            return self.folder.encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False


class ClusterError(RuntimeError):
    """The head could not be started or ended; the message says why and what to do."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 done, 1 failed)."""
    parser = new_parser("cluster", "Start or stop a Ray head on this machine, to submit jobs to.")
    cpus, state = max(8, os.cpu_count() or 1), Path(".cluster.json")
    cpus_help = "CPUs that Ray may schedule, more than the machine has since phases of a run alternate (%(default)s)"
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("--cpus", type=int, default=cpus, help=cpus_help)
    parser.add_argument("--state", type=local_path, default=state, help="file that records the head (%(default)s)")
    options = parser.parse_args(arguments)

    def run() -> None:
        if options.action == "start":
            head = start(options.state, options.cpus)
            print(COMMANDS.format(address=head.address, folder=head.folder, here=Path.cwd()))
        else:
            print("The head has ended." if stop(options.state) else "No head of this folder was running.")

    return exit_code(run, failed=(ClusterError, OSError))


def start(state: Path, cpus: int) -> Head:
    """Start a head that may schedule `cpus` CPUs, record it in `state`, and wait until it takes jobs."""
    if (running := read(state)) and running.is_running():
        raise ClusterError(f"a head of this folder runs already, at {running.address}; end it with make cluster-stop")
    # Sockets lie in the folder, and the path of a socket may have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-head-", dir="/tmp")
    env, ray = environment(cpus), executable("ray")
    made = subprocess.run([ray, "get-auth-token", "--generate"], env=env, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ClusterError(f"Ray made no token: {made.stderr.strip()}")
    dashboard, gcs, client, agent = free_ports(4, first=DASHBOARD_PORT)
    command = [ray, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder}", f"--num-cpus={cpus}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}", f"--port={gcs}"]
    command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    log = Path(folder, "head.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    head = Head(process.pid, f"http://{HOST}:{dashboard}", folder)
    state.write_text(json.dumps(asdict(head)))
    deadline = time.monotonic() + START_S
    while not answers(head, made.stdout.strip()):
        if process.poll() is not None or time.monotonic() > deadline:
            problem = "did not answer in time" if process.poll() is None else f"ended with code {process.returncode}"
            last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            stop(state)
            raise ClusterError(f"the head {problem}; its last lines were:\n{last_lines}")
        time.sleep(0.5)
    return head


def stop(state: Path) -> bool:
    """End the head that the state file records; returns whether it was running."""
    head = read(state)
    if head is None:
        return False
    was_running = head.is_running()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S
        if head.is_running():
            os.kill(head.pid, number)
        while head.is_running() and time.monotonic() < deadline:
            time.sleep(0.2)
    if head.is_running():
        raise ClusterError(f"process {head.pid} does not end; its logs are in {head.folder}")
    state.unlink()
    shutil.rmtree(head.folder, ignore_errors=True)
    return was_running


def read(state: Path) -> Head | None:
    """The head of a state file; None without a file. Raises ClusterError for a file with something else."""
    try:
        return Head(**json.loads(state.read_text())) if state.is_file() else None
    except (ValueError, TypeError) as error:
        raise ClusterError(f"{state} does not describe a head; give another --state") from error


def environment(cpus: int) -> dict[str, str]:
    """Environment of the head, and so of every driver and worker."""
    env = {**os.environ, **LOCAL_RAY, "RAY_AUTH_MODE": "token"}
    # How long `ray job stop` lets a run end its iteration and save; Ray's default is 3 s.
    env["RAY_JOB_STOP_WAIT_TIME_S"] = "600"
    # Ray counts the machine's cores and warns in every job's log when more processes than that start together.
    env["RAY_worker_maximum_startup_concurrency"] = str(cpus)
    # There is no other node to which work could move first.
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    env.pop("RAY_ADDRESS", None)
    # A job calls `python`, which must be the one that has the packages.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def executable(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def free_ports(count: int, first: int) -> list[int]:
    """`count` different ports that are free now; `first` comes first when it is free."""
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
    try:
        # The head is on this machine, and the token is not for a proxy.
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(f"{head.address}/api/jobs/", headers=headers, trust_env=False).is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
