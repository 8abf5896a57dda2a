"""The first process inside the sandbox: runs the tests of one program, one after the other.

For each byte on stdin it runs the next test, and writes a line of JSON to stdout: `ended` (the reason why the test
ended), `returncode` of the program, and `seconds`. The program's output and results are then in the job's `streams`
(memory files for stdout, stderr and results of calls); the supervisor never reads them. A test starts with an empty
work folder; all of its processes are killed before its line is written. When stdin is closed, everything ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time

from . import driver, folders, limits, namespaces, values
from .dialogue import Dialogue

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from collections.abc import Callable
    from typing import Any

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Numeric libraries start a thread for each core otherwise, more than the limit of processes on large machines.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
KILL_S = 5.0  # for killed processes to end
LOOK_S = 0.02  # between two looks at how much was printed
ASKED, REPORTS = 0, 1  # file descriptors
READY = 39  # file descriptor by which a child reports that it could not start
STREAMS = 50  # first file descriptor of the job, above the numbers that children get


class RunnerEnded(Exception):
    """The process that waits for the results of the tests has ended."""


class Supervisor:
    """Runs tests within the limits of a job (see `isolation.job`).

    Args:
        job: the job.
        uid: user id for the code; None keeps the user id of this process.
    """

    def __init__(self, job: dict[str, Any], uid: int | None) -> None:
        self.job, self.uid = job, uid
        self.alone = job["namespaces"]  # process 1 of a namespace of its own
        self.group = 0  # first process of the running test; without namespaces, leader of its process group
        self.ends = time.monotonic() + job["total_s"]
        if self.alone and os.getpid() != 1:
            raise RuntimeError("the supervisor is not process 1 of a namespace, so it may not kill all it can see")

    def run(self) -> None:
        """Run the tests that are requested on stdin, until the time limit of all tests is over."""
        try:
            for number, test in enumerate(self.job["tests"]):
                if not os.read(ASKED, 1) or time.monotonic() >= self.ends:
                    return
                self._fresh_work(f"{self.job['work']}/{number}")
                values.send(REPORTS, self._test(test))
        except (RunnerEnded, BrokenPipeError):
            pass
        finally:
            if not self.alone:
                folders.remove(self.job["work"])

    def _fresh_work(self, folder: str) -> None:
        if self.alone:
            os.chdir("/")
            namespaces.fresh_work(self.job["temp"])
            os.chdir(namespaces.WORK)
        else:
            # The folders of earlier tests are removed at the end: a program can fill them faster than they are emptied.
            os.makedirs(folder)
            os.chdir(folder)
        with open(driver.PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(self.job["code"])

    def _test(self, test: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        out, err, result = self.job["streams"]
        for fd in (out, err, result):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        given = os.memfd_create("stdin")
        values.write(given, test["stdin"].encode(errors="surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        fds = {0: given, 1: out, 2: err}
        near: list[int] = []
        dialogue = None
        main = self.group = 0
        try:
            if test["kind"] == "calls":
                fds[driver.REQUESTS], requests = os.pipe()
                replies, fds[driver.REPLIES] = os.pipe()
                near = [requests, replies]
                dialogue = Dialogue(test["calls"], requests, replies, lambda piece: values.write(result, piece))
            main = self._start(fds, lambda: self._execute(test["kind"]))
            for fd in fds.values():
                if fd not in (out, err):
                    os.close(fd)
            ended = self._watch(main, min(started + self.job["test_s"], self.ends), dialogue)
        finally:
            returncode = self._end(main)
            for fd in near:
                os.close(fd)
        if ended == "exit" and self._printed_too_much():
            ended = "output"
        return {"ended": ended, "returncode": returncode, "seconds": time.monotonic() - started}

    def _start(self, fds: dict[int, int], run: Callable[[], None]) -> int:
        """Start a child process that calls `run`, and return its process id.

        `fds` maps the numbers of the child's file descriptors to file descriptors of this process; others are closed.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.dup2(writing, READY, inheritable=False)
                for number, fd in fds.items():
                    os.dup2(fd, READY + 1 + number)
                for number in fds:
                    os.dup2(READY + 1 + number, number)
                os.closerange(max(fds) + 1, READY)
                os.closerange(READY + 1, 1024)
                self._confine()
                run()
            except BaseException as error:  # noqa: BLE001 (the supervisor reads and raises it)
                os.write(READY, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(127)
        self.group = self.group or child
        os.close(writing)
        problem = os.read(reading, 1000)  # empty once the child runs something else, or has closed its end
        os.close(reading)
        if problem:
            raise RuntimeError(f"a process of the program could not be started: {problem.decode(errors='replace')}")
        return child

    def _confine(self) -> None:
        """Apply user id, limits and filters to this process, a child that will run foreign code."""
        limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.uid is not None:
            limits.change_user(self.uid)
        if not self.alone:
            os.setpgid(0, self.group)
        limits.resources(self.job["limits"], self.job["processes"])
        limits.drop_privileges()
        if not self.alone:
            limits.write_only_below(".")
        limits.filter_calls(None if self.alone else os.getpid())

    def _execute(self, kind: str) -> None:
        start = f"import sys; sys.path.append({self.job['here']!r}); from inside.driver import main; "
        start += f"main({kind!r}, {self.job['packages']!r})"
        os.execve(self.job["python"], [self.job["python"], "-I", "-S", "-c", start], ENVIRONMENT)

    def _watch(self, main: int, deadline: float, dialogue: Dialogue | None) -> str:
        """Wait for the end of a test, and return the reason.

        "exit": process `main` has ended, or all calls have results. "time": `deadline` is over. "output": the program
        has printed or returned too much.
        """
        poll = select.poll()
        ending = os.pidfd_open(main)
        poll.register(ending, select.POLLIN)
        poll.register(ASKED, 0)  # reports that the other end is closed
        try:
            ended = dialogue.step(poll) if dialogue else ""
            while not ended and time.monotonic() < deadline:
                ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
                if ASKED in ready:
                    raise RunnerEnded
                if dialogue:
                    ended = dialogue.step(poll)
                if ending in ready:
                    return ended or "exit"
                if self._printed_too_much():
                    return "output"
            return ended or "time"
        finally:
            os.close(ending)

    def _printed_too_much(self) -> bool:
        return any(os.fstat(fd).st_size > self.job["output"] for fd in self.job["streams"][:2])

    def _end(self, main: int) -> int | None:
        """Kill and reap all processes of the test.

        Returns the exit code of process `main` (negative for a signal), or None if it was killed here.
        """
        # The status is read before the killing, and `main` stays unreaped so that no other group gets its number.
        status = os.waitid(os.P_PID, main, os.WEXITED | os.WNOHANG | os.WNOWAIT) if main else None
        deadline = time.monotonic() + KILL_S
        try:
            while time.monotonic() < deadline:
                # The filter keeps the program's descendants in its process group.
                if self.alone:
                    os.kill(-1, signal.SIGKILL)
                elif self.group:
                    os.killpg(self.group, signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.0005)
        except (ProcessLookupError, ChildProcessError):
            if status is None:
                return None
            return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        raise RuntimeError(f"processes of the program were still there {KILL_S:g} s after they were killed")


def main(job_fd: int) -> None:
    """Read the job from the file descriptor `job_fd`, isolate this process, and run the tests."""
    with open(job_fd) as file:
        job = json.load(file)
    # The worker may have had any numbers for them, and children must keep only the ones that they are given.
    inherited = job["streams"]
    job["streams"] = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STREAMS) for fd in inherited]
    for fd in inherited:
        os.close(fd)
    if job["namespaces"]:
        # The namespace ends with the supervisor. Without one, the supervisor must survive to kill its processes.
        limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    uid = None
    if job["namespaces"]:
        uid = namespaces.enter(job["mounts"], job["temp"])
    else:
        limits.prctl(limits.PR_SET_CHILD_SUBREAPER, 1)
    limits.prctl(limits.PR_SET_DUMPABLE, 0)
    Supervisor(job, uid).run()
