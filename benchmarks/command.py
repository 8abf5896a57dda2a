"""Commands that a benchmark runs, one after the other, each with a deadline and a log of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.run.signals import stops

ENDING_S = 60
"""Seconds that a command has to end after SIGTERM."""


def call(
    command: Sequence[str], log: Path, timeout_s: float, variables: Mapping[str, str] | None = None, name: str = "a run"
) -> None:
    """Run a command, and write its output to `log`.

    Args:
        command: program and arguments.
        log: file that is overwritten.
        timeout_s: seconds that the command may take.
        variables: environment of the command; None takes this process's environment.
        name: name of the command, for errors.

    Raises:
        RuntimeError: the command failed, or took longer than `timeout_s`; the message names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{name} took longer than {timeout_s:.0f} s (--timeout); see {log}") from error
        finally:
            _end(process)
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise RuntimeError("\n".join([f"{name} failed with exit code {code}; see {log}", *last]))


def exit_code(measure: Callable[[], int], *errors: type[Exception]) -> int:
    """Return the result of `measure`; print `errors` and OSError and return 2, and return 130 after Ctrl-C."""
    known: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        with stops():
            return measure()
    except known as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        return 130


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that has not ended; if it does not end in time, kill it with its children."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
