"""Sides of a measurement in processes of their own, which take turns: each has CPU seconds and a peak of its own.

It imports nothing of this project, so that a side can run in another environment.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from typing import Self


def serve(build: Callable[[], Callable[[], None]]) -> None:
    """Be a side: build what is measured, and then run it once for each line of the standard input.

    For each run a line of JSON goes to the standard output: CPU seconds `cpu_s`, and `peak_mib`, the process's peak of
    memory in the run over its memory before `build`, in MiB.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    before = _memory("VmRSS")
    run = build()
    answers.write("{}\n")
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        begun = time.process_time()
        run()
        found = {"cpu_s": time.process_time() - begun, "peak_mib": _memory("VmHWM") - before}
        answers.write(json.dumps(found) + "\n")


def _memory(name: str) -> float:
    """Read a line of this process's status, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


class Side:
    """A process that runs `serve`.

    Args:
        name: name of the side, for errors.
        command: program and arguments.
        timeout_s: seconds that its start, and each of its turns, may take.

    Raises:
        RuntimeError: it ended, or took longer.
    """

    def __init__(self, name: str, command: Sequence[str], timeout_s: float):
        self._name, self._timeout_s = name, timeout_s
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def turn(self) -> dict[str, float]:
        """Run once; `cpu_s` and `peak_mib` as in `serve`.

        Raises:
            RuntimeError: it ended, or took longer than the timeout.
        """
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        timer = Timer(self._timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError(f"{self._name} ended, or took longer than {self._timeout_s:.0f} s (--timeout)")
        found: dict[str, float] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
