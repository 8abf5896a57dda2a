"""Run a program in a local sandbox: watch it from outside, and read the result of each test.

The supervisor inside the sandbox enforces most limits (`inside/supervisor.py`). This process enforces the limits of
total memory and of the number of processes, and an overall deadline. If this process ends, the sandbox ends too.
"""

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import isolation, processes
from pipeline.reward.sandbox.inside import folders, values
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.outcome import ProgramRun

START_S = 30.0  # for the supervisor to start, on a machine that is busy
END_S = 10.0  # for all processes to end
LOOK_S = 0.02  # between two looks at what the processes use
CLEAN_S = 2.0  # to remove the folder of a program without isolation
MAX_REPORT = 1000  # bytes
OWN_MEMORY = 96 << 20  # of the supervisor and the processes around it
OWN_THREADS = 6


def run(code: str, stdin: str, config: SandboxConfig) -> ProgramRun:
    """Run a Python program once, as a script.

    Raises:
        SandboxError: the sandbox could not be started, or failed.
    """
    with closing(run_tests(code, [{"kind": "script", "stdin": stdin}], config)) as outcomes:
        return next(outcomes, ProgramRun("time"))


def run_tests(code: str, tests: list[dict[str, Any]], config: SandboxConfig) -> Generator[ProgramRun, None, None]:
    """Yield the result of each test of one program, in order, as soon as it is known.

    The iterator ends early if `total_timeout_s` is over or the processes together exceed a limit. Closing the iterator
    ends the sandbox.

    Args:
        code: the program.
        tests: each with `kind` (`script` or `calls`), `stdin`, and for `calls` the list `calls`, each call a line of
            JSON (`inside/driver.py`).
        config: the section `reward.sandbox`.

    Raises:
        SandboxError: the sandbox could not be started, or failed.
    """
    if config.url:
        # Imported here, because most runs need no HTTP client.
        from pipeline.reward.sandbox import remote

        return remote.run_tests(code, tests, config)
    return _run(code, tests, resolve(config), config)


def resolve(config: SandboxConfig) -> str:
    """Return the isolation that the setting stands for: `namespaces` or `none`.

    Raises:
        SandboxError: the setting is `auto`, and namespaces do not work on this machine.
    """
    return _namespaces() if config.isolation == "auto" else config.isolation


@functools.cache
def _namespaces() -> str:
    try:
        outcome = run("print(6 * 7)", "", SandboxConfig(isolation="namespaces", packages=False))
        problem = outcome.failure
    except SandboxError as error:
        problem = str(error)
    if problem:
        raise SandboxError(
            "reward.sandbox.isolation is auto, but the code of responses cannot be isolated on this machine "
            f"({problem}). Allow user namespaces (sysctl user.max_user_namespaces, or the container's seccomp "
            "profile), or set reward.sandbox.url to a SandboxFusion server. isolation=none runs the code with limits "
            "only: it can then read all files that this user may read"
        )
    return "namespaces"


def _run(code: str, tests: list[dict[str, Any]], kind: str, config: SandboxConfig) -> Generator[ProgramRun, None, None]:
    work = tempfile.mkdtemp(prefix="sandbox-") if kind == "none" else ""
    with ExitStack() as files:
        names = ("job", "errors", "stdout", "stderr", "result")
        job, errors, *streams = [files.enter_context(os.fdopen(os.memfd_create(name), "w+b")) for name in names]
        fds = [stream.fileno() for stream in streams]
        job.write(json.dumps(isolation.job(code, tests, work, fds, config)).encode())
        job.seek(0)
        process = None
        try:
            process = subprocess.Popen(
                isolation.command(job.fileno()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[job.fileno(), *fds],
                bufsize=0,
                env={},
                cwd="/",
                start_new_session=True,
            )
            deadline = time.monotonic() + START_S + config.total_timeout_s + END_S
            for _ in tests:
                report = _next_report(process, deadline, config)
                if report is None:
                    return
                texts = [os.pread(fd, config.output_kb << 10, 0).decode(errors="replace") for fd in fds[:2]]
                yield ProgramRun(
                    stdout=texts[0], stderr=texts[1], result=os.pread(fds[2], values.MAX_FRAME, 0), **report
                )
                if report["ended"] in ("memory", "processes"):
                    return
        except (OSError, _Broken) as error:
            errors.seek(0)
            lines = errors.read(1 << 20).decode(errors="replace").strip().splitlines()
            detail = f": {lines[-1][:300]}" if lines else ""
            raise SandboxError(f"the sandbox (isolation={kind}) failed: {error}{detail}") from error
        finally:
            if process is not None:
                _end(process, work)
            elif work:
                folders.remove(work)


class _Broken(Exception):
    """The supervisor did not run the tests."""


def _next_report(process: subprocess.Popen[bytes], deadline: float, config: SandboxConfig) -> dict[str, Any] | None:
    """Let the supervisor run the next test, and check memory and processes until it ends.

    Returns fields of `ProgramRun`, or None if the time limit of all tests is over. `deadline` is a time on the
    monotonic clock.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not poll.poll(LOOK_S * 1000):
        if time.monotonic() > deadline:
            raise _Broken("its supervisor did not answer in time")
        threads, memory = processes.usage(process.pid)
        if memory > (config.memory_mb << 20) + OWN_MEMORY:
            return {"ended": "memory"}
        if threads > config.max_processes + OWN_THREADS:
            return {"ended": "processes"}
    line = process.stdout.read(MAX_REPORT)
    if line:
        return dict(json.loads(line))
    # The supervisor exits with 0 by itself only when the time of all tests is over.
    if process.wait(END_S) != 0:
        raise _Broken("its supervisor ended before the tests did")
    return None


def _end(process: subprocess.Popen[bytes], work: str) -> None:
    """Let the supervisor kill its processes and exit. `work` is the work folder with `isolation=none`, else ""."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(CLEAN_S if work else END_S)
    except subprocess.TimeoutExpired:
        if work:
            # The supervisor still kills very many processes or removes very many files, and ends by itself.
            threading.Thread(target=process.wait, daemon=True).start()
            return
        process.kill()
        process.wait()
        if sys.exception() is None:
            raise SandboxError(f"the sandbox (isolation=namespaces) did not end within {END_S:g} s") from None
    if work:
        folders.remove(work)
