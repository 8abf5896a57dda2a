"""Runs a program in a local sandbox, watches it from outside, and reads what came of each test.

The limits hold inside (`inside/supervisor.py`). From outside three things are added: the memory of all processes
together, their number where the kernel does not count them, and a deadline for the whole. When this process or its
reading end goes away, the sandbox ends by itself.
"""

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pipeline.reward.sandbox import isolation, processes
from pipeline.reward.sandbox.config import SandboxConfig, problems
from pipeline.reward.sandbox.isolation import SandboxError

START_S = 30.0  # for the supervisor to say that it is ready, on a machine that is busy
END_S = 10.0  # for all processes to be gone
LOOK_S = 0.02  # between two looks at what the processes use
MAX_REASON = 200  # characters
OWN_MEMORY = 96 << 20  # of the supervisor and the processes around it
OWN_THREADS = 6


@dataclass(frozen=True)
class Outcome:
    """What came of one run of a program."""

    ended: str
    """`exit`, or the limit that ended it: `time`, `output`, `memory`, `processes`."""
    returncode: int | None = None
    """Exit status, negative for a signal; None where the program did not end by itself."""
    stdout: str = ""
    stderr: str = ""
    """What was printed, up to `output_kb`; bytes that are not UTF-8 are replaced."""
    seconds: float = 0.0
    """Wall-clock time."""
    verdict: dict[str, Any] | None = None
    """What the judge of a test on functions says, see `inside/judge.py`."""

    @property
    def failure(self) -> str:
        """Why the program did not run to its end, in a few words; "" if it did."""
        limits = {
            "time": "time limit exceeded",
            "output": "output limit exceeded",
            "memory": "memory limit exceeded",
            "processes": "process limit exceeded",
        }
        if self.ended in limits:
            return limits[self.ended]
        if self.returncode is None or self.returncode == 0:
            return ""
        if self.returncode < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"ended by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        lines = self.stderr.strip().splitlines()
        reason = f"exit status {self.returncode}" + (f": {lines[-1].strip()}" if lines else "")
        return reason[:MAX_REASON]


def run(code: str, stdin: str, config: SandboxConfig) -> Outcome:
    """Runs a Python program once, as a script.

    Raises:
        SandboxError: the sandbox could not be started or did not do its work.
        ValueError: the config means nothing.
    """
    with closing(run_tests(code, [{"kind": "script", "stdin": stdin}], config)) as outcomes:
        return next(outcomes, Outcome("time"))


def run_tests(code: str, tests: list[dict[str, Any]], config: SandboxConfig) -> Generator[Outcome, None, None]:
    """Outcomes of the tests of one program, in order, each as soon as it is known.

    The iterator ends early when `total_timeout_s` is over or a limit on all processes together is passed; closing it
    ends the sandbox.

    Args:
        code: the program.
        tests: `{"kind": "script", "stdin": text}`, `{"kind": "call", "name": text, "arguments": packed list}` or
            `{"kind": "assert", "source": text}`.
        config: where and within which limits.

    Raises:
        SandboxError, ValueError: as `run`.
    """
    if config.url:
        # Here, because most runs need no HTTP client.
        from pipeline.reward.sandbox import remote

        return remote.run_tests(code, tests, config)
    return _run(code, tests, resolve(config), config)


def resolve(config: SandboxConfig) -> str:
    """The isolation that is used here: `bubblewrap`, `namespaces` or `none`.

    Raises:
        SandboxError: it is `auto` and neither bubblewrap nor namespaces work.
        ValueError: the config means nothing.
    """
    if found := problems(config):
        raise ValueError("; ".join(found))
    return _first_that_works() if config.isolation == "auto" else config.isolation


def check_isolation(config: SandboxConfig) -> None:
    """Makes sure, before engines start, that code can run as `config` says.

    Raises:
        SandboxError: it cannot; the sentence says why and what to set.
        ValueError: the config means nothing; the sentence names the key.
    """
    name = "url" if config.url else f"isolation={resolve(config)}"
    outcome = run("print(6 * 7)", "", config)
    if outcome.stdout.strip() != "42":
        shown = outcome.failure or f"it printed {outcome.stdout[:100]!r} instead of 42"
        raise SandboxError(
            f"reward.sandbox.{name}: a program of one line does not run in the sandbox: {shown}; raise the limits "
            "under reward.sandbox (memory_mb, timeout_s, cpu_s) or choose another isolation"
        )


@functools.cache
def _first_that_works() -> str:
    reasons = []
    for name in ("bubblewrap", "namespaces"):
        try:
            check_isolation(SandboxConfig(isolation=name, packages=False))
            return name
        except SandboxError as error:
            reasons.append(f"{name}: {error}")
    raise SandboxError(
        "reward.sandbox.isolation is auto, but the code of responses cannot be isolated on this machine ("
        + "; ".join(reasons)
        + "). Install bubblewrap, allow user namespaces (sysctl user.max_user_namespaces, or the container's seccomp "
        "profile), or set reward.sandbox.url to a SandboxFusion server. isolation=none runs the code with resource "
        "limits alone: it can then read and write all files that this user may"
    )


def _run(code: str, tests: list[dict[str, Any]], kind: str, config: SandboxConfig) -> Generator[Outcome, None, None]:
    work = tempfile.mkdtemp(prefix="sandbox-") if kind == "none" else ""
    errors = os.memfd_create("errors")
    job = os.memfd_create("job")
    reading, writing = os.pipe()
    process = None
    try:
        with os.fdopen(job, "w", encoding="utf-8", errors="surrogatepass", closefd=False) as file:
            json.dump(isolation.job(code, tests, kind, work, config), file)
        os.lseek(job, 0, os.SEEK_SET)
        process = subprocess.Popen(
            isolation.command(kind, config),
            stdin=job,
            stdout=writing,
            stderr=errors,
            env={},
            cwd="/",
            start_new_session=True,
        )
        os.close(writing)
        writing = -1
        yield from _watch(_Messages(reading, process, errors, kind, config), len(tests))
    except OSError as error:
        raise SandboxError(f"the sandbox (isolation={kind}) could not be started: {error}") from error
    finally:
        gone = process is None or processes.end(process, END_S)
        for fd in (errors, job, reading, writing):
            if fd >= 0:
                os.close(fd)
        if work:
            shutil.rmtree(work, ignore_errors=True)
        if not gone and sys.exception() is None:
            raise SandboxError(
                f"the processes of a sandbox (isolation={kind}) were still there {END_S:g} s after the kill"
            )


def _watch(messages: "_Messages", count: int) -> Generator[Outcome, None, None]:
    config = messages.config
    if messages.next(time.monotonic() + START_S) != {"ready": True}:
        raise messages.error("did not start")
    deadline = time.monotonic() + config.total_timeout_s + END_S
    for _ in range(count):
        message = messages.next(deadline, limited=True)
        if isinstance(message, str):
            yield Outcome(message)
            return
        if message is None:
            # The supervisor ends by itself only when the time of all tests is over.
            if messages.process.wait(END_S) == 0:
                return
            raise messages.error("ended before its tests did")
        yield Outcome(
            ended=message["ended"] or "exit",
            returncode=message["returncode"],
            stdout=message["stdout"],
            stderr=message["stderr"],
            seconds=message["seconds"],
            verdict=message.get("verdict"),
        )


class _Messages:
    """The supervisor's messages, read while the limits on all processes together are watched."""

    def __init__(
        self, fd: int, process: subprocess.Popen[bytes], errors: int, kind: str, config: SandboxConfig
    ) -> None:
        self.fd, self.process, self.errors, self.kind, self.config = fd, process, errors, kind, config
        self.found = bytearray()
        # JSON writes a character in up to six bytes.
        self.most = 3 * 6 * (config.output_kb << 10) + (1 << 16)

    def next(self, deadline: float, limited: bool = False) -> Any:
        """The next message; None at the end, and with `limited` the name of a limit that was passed.

        Raises:
            SandboxError: no message came until `deadline`, or one that is too long.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while True:
            if len(self.found) >= 4:
                length = int.from_bytes(self.found[:4], "little")
                if length > self.most:
                    raise self.error(f"sent a message of {length} bytes, more than {self.most}")
                if len(self.found) >= 4 + length:
                    message = json.loads(self.found[4 : 4 + length])
                    del self.found[: 4 + length]
                    return message
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.error("did not answer in time")
            if poll.poll(min(left, LOOK_S) * 1000):
                part = os.read(self.fd, 1 << 20)
                if not part:
                    return None
                self.found += part
            elif limited:
                threads, memory = processes.usage(self.process.pid)
                if memory > (self.config.memory_mb << 20) + OWN_MEMORY:
                    return "memory"
                if threads > self.config.max_processes + OWN_THREADS:
                    return "processes"

    def error(self, what: str) -> SandboxError:
        """A sentence on what the supervisor did, with the end of what it wrote to stderr."""
        lines = os.pread(self.errors, 1 << 20, 0).decode(errors="replace").strip().splitlines()
        detail = f": {lines[-1][:300]}" if lines else ""
        return SandboxError(f"the supervisor of the sandbox (isolation={self.kind}) {what}{detail}")
