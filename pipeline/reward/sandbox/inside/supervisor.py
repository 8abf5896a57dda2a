"""The first process inside the sandbox: runs the tests of one program, one after the other.

A job comes as JSON on stdin. Messages go out as the first lines of `values.py` describe: `{"ready": true}`, then one
for each test. A test starts with an empty work folder and its own processes, all of which are killed before its
message is sent. When the reader of the messages goes away, everything ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

from . import driver, limits, namespaces, values

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Numeric libraries start a thread for each core otherwise, more than the limit of processes on large machines.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
KILL_S = 5.0  # for killed processes to be gone


class Gone(Exception):
    """Nobody reads the messages any more."""


class Supervisor:
    """Runs tests within the limits of a job (see `runner.py`, which makes it)."""

    def __init__(self, job: dict[str, Any], messages: int, uid: int | None) -> None:
        self.job, self.messages, self.uid = job, messages, uid
        self.alone = job["isolation"] != "none"  # process 1 of a namespace of its own
        self.ends = time.monotonic() + job["total_s"]
        if self.alone and os.getpid() != 1:
            raise RuntimeError("the supervisor is not process 1 of a namespace, so it may not kill all it can see")

    def run(self) -> None:
        """Runs all tests, sending a message for each; stops when the time of all is used up."""
        for test in self.job["tests"]:
            if time.monotonic() >= self.ends:
                return
            self._empty_work()
            values.send(self.messages, self._test(test))

    def _empty_work(self) -> None:
        work = self.job["work"]
        os.chdir("/")
        if self.job["isolation"] == "namespaces":
            namespaces.fresh_work(self.job["temp"])
        else:
            import shutil  # with its archive formats, which most sandboxes do without

            for name in os.listdir(work):
                path = os.path.join(work, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
        os.chdir(work)
        with open(driver.PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(self.job["code"])

    def _test(self, test: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        script = test["kind"] == "script"
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        given = os.memfd_create("stdin")
        with os.fdopen(given, "wb", closefd=False) as file:
            file.write(test.get("stdin", "").encode(errors="surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        fds = {0: given, 1: out_end, 2: err_end}
        verdict: int | None = None
        if not script:
            program_reads, judge_writes = os.pipe()
            judge_reads, program_writes = os.pipe()
            verdict, verdict_end = os.pipe()
            fds |= {driver.REQUESTS: program_reads, driver.REPLIES: program_writes}
        program = self._start(fds, "script" if script else "serve")
        for fd in fds.values():
            os.close(fd)
        main = program
        if not script:
            main = self._start_judge(test, judge_writes, judge_reads, verdict_end)
            for fd in (judge_writes, judge_reads, verdict_end):
                os.close(fd)
        deadline = min(started + self.job["test_s"], self.ends)
        pipes = {out: bytearray(), err: bytearray()} | ({} if verdict is None else {verdict: bytearray()})
        try:
            ended = self._watch(main, pipes, deadline)
        finally:
            status = self._end(program, main)
        if ended == "":
            ended = self._drain(pipes)
        for fd in pipes:
            os.close(fd)
        result: dict[str, Any] = {
            "ended": ended,  # "", "time" or "output"
            "returncode": os.waitstatus_to_exitcode(status) if status is not None else None,
            "stdout": pipes[out].decode(errors="replace"),
            "stderr": pipes[err].decode(errors="replace"),
            "seconds": time.monotonic() - started,
        }
        if verdict is not None:
            text = pipes[verdict]
            result["verdict"] = json.loads(text) if text else None
        return result

    def _child(self) -> None:
        """What a process does to itself before it runs anything foreign."""
        limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
            limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        if not self.alone:
            os.setpgid(0, 0)
        limits.resources(self.job["limits"], self.job["processes"])
        limits.filter_calls(None if self.alone else os.getpid())

    def _start(self, fds: dict[int, int], mode: str) -> int:
        """Process id of the program, started with the file descriptors `fds` (number inside: number here)."""
        child = os.fork()
        if child:
            return child
        try:
            high = {number: os.dup2(fd, 40 + number) for number, fd in fds.items()}
            for number, fd in high.items():
                os.dup2(fd, number)
            os.closerange(max(fds) + 1, 1024)
            self._child()
            start = f"import sys; sys.path.append({self.job['here']!r}); from inside.driver import main; "
            start += f"main({mode!r}, {self.job['packages']!r})"
            os.execve(self.job["python"], [self.job["python"], "-I", "-S", "-c", start], ENVIRONMENT)
        finally:
            os._exit(127)

    def _start_judge(self, test: dict[str, Any], requests: int, replies: int, out: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            from . import judge

            keep = {requests, replies, out}
            for fd in set(range(64)) - keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._child()
            limits.prctl(limits.PR_SET_DUMPABLE, 0)  # no process of the program may look into this one
            values_out = json.dumps(judge.verdict(test, requests, replies)).encode()
            with os.fdopen(out, "wb") as file:
                file.write(values_out)
        finally:
            os._exit(0)

    def _watch(self, main: int, pipes: dict[int, bytearray], deadline: float) -> str:
        """Reads pipes until process `main` ends (""), the time is over ("time") or too much is printed ("output")."""
        poll = select.poll()
        ending = os.pidfd_open(main)
        try:
            for fd in pipes:
                os.set_blocking(fd, False)
                poll.register(fd, select.POLLIN)
            poll.register(ending, select.POLLIN)
            poll.register(self.messages, 0)  # reports an error when the reader is gone
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return "time"
                for fd, _ in poll.poll(left * 1000):
                    if fd == ending:
                        return ""
                    if fd == self.messages:
                        raise Gone
                    if not self._read(fd, pipes[fd]):
                        poll.unregister(fd)
                    elif len(pipes[fd]) > self.job["output"]:
                        return "output"
        finally:
            os.close(ending)

    def _read(self, fd: int, found: bytearray) -> bool:
        """Whether the pipe may hold more, now or later."""
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        # One byte past the limit is enough to know that it is passed.
        found += part[: self.job["output"] + 1 - len(found)]
        return bool(part)

    def _drain(self, pipes: dict[int, bytearray]) -> str:
        """Reads what killed processes left in the pipes."""
        for fd, found in pipes.items():
            while len(found) <= self.job["output"] and self._read(fd, found):
                if not select.select([fd], [], [], 0)[0]:
                    break
            if len(found) > self.job["output"]:
                return "output"
        return ""

    def _end(self, program: int, main: int) -> int | None:
        """Kills and reaps every process of the test; wait status of the program, None where it had to be killed."""
        ended: dict[int, int] = {}
        try:
            # Asked before the killing: a program that ended by itself has a status of its own.
            pid, status = os.waitpid(program, os.WNOHANG)
        except ChildProcessError:
            pid = 0
        if pid:
            ended[program] = status
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            self._kill(program, main)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.0005)
            except ChildProcessError:
                return ended.get(program)
        raise RuntimeError(f"processes of the program were still there {KILL_S:g} s after they were killed")

    def _kill(self, program: int, main: int) -> None:
        if self.alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        # The filter keeps what the program starts in its process group. A child that has not made its group yet is
        # reached by its own id.
        for pid in {program, main}:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)


def main() -> None:
    """Reads the job, isolates this process, runs the tests."""
    messages = os.dup(1)
    job = json.load(sys.stdin)
    if job["isolation"] != "none":
        # Its namespace dies with the supervisor. Without one, the supervisor stays to kill what it has started.
        limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if any(test["kind"] != "script" for test in job["tests"]):
        from . import judge  # noqa: F401  (while its file can still be seen)
    uid = None
    if job["isolation"] == "namespaces":
        uid = namespaces.enter(job["mounts"], job["temp"])
    limits.prctl(limits.PR_SET_DUMPABLE, 0)
    if job["isolation"] == "none":
        limits.prctl(limits.PR_SET_CHILD_SUBREAPER, 1)
    values.send(messages, {"ready": True})
    try:
        Supervisor(job, messages, uid).run()
    except (Gone, BrokenPipeError):
        if job["isolation"] == "none":
            import shutil

            os.chdir("/")
            shutil.rmtree(job["work"], ignore_errors=True)
