"""Runs a command that drives an episode (`agent.command`), in the episode's process.

This module needs Python 3.9 and nothing but the standard library. The command and its children end with the process.

The command gets the row as a JSON file, with the path in SLIPSTREAM_ROW; the file is in memory and ends with the
episode. The result of the command is the last line that it prints.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from typing import Any

LINE = 1 << 16
"""Maximum number of bytes of the last line that are read."""


def run(command: list[str], row: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end.

    Args:
        command: program and arguments.
        row: row of the episode.
        variables: environment variables in addition to this process's variables.

    Returns:
        `result`, the JSON object in the last line that the command printed; `failed`, a sentence, if the command did
        not start or ended with an error; or an empty dict if the last line is not a JSON object.
    """
    given = os.memfd_create("row")
    with os.fdopen(given, "wb", closefd=False) as file:
        file.write(json.dumps(row).encode())
    variables = {**variables, "SLIPSTREAM_ROW": f"/proc/{os.getpid()}/fd/{given}"}
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    try:
        process = _start(command, variables, (out_end, err_end))
    except OSError as error:
        return {"failed": f"agent.command: {command[0]} cannot be started ({error.strerror})"}
    for descriptor in (out_end, err_end):
        os.close(descriptor)
    printed, said = _last_lines(process, out, err)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = f"; the last line on its standard error: {said[:1000]}" if said else ""
        return {"failed": f"agent.command ended with {how}{last}"}
    try:
        result = json.loads(printed)
    except (ValueError, RecursionError):
        return {}
    return {"result": result} if isinstance(result, dict) else {}


def _start(command: list[str], variables: dict[str, str], outputs: tuple[int, int]) -> int:
    """Start a program with these two descriptors as standard output and standard error. Returns the process id."""
    out, err = outputs
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
    # `run` reaps it.
    process.returncode = 0
    return process.pid


def _last_lines(process: int, *pipes: int) -> list[str]:
    """Read pipes until a process ends, and return the last line of each.

    Other processes may still hold the pipes open.
    """
    poll, tails = select.poll(), dict.fromkeys(pipes, b"")
    ended = os.pidfd_open(process)
    for descriptor in (ended, *pipes):
        poll.register(descriptor, select.POLLIN)
    open_pipes = set(pipes)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        # Output printed before the end has arrived by now.
        for pipe in open_pipes & (set(pipes) if ended in ready else ready):
            more = _read(pipe, tails, ended in ready)
            if not more:
                poll.unregister(pipe)
                open_pipes = open_pipes - {pipe}
        if ended in ready:
            os.close(ended)
            return [tail.strip().split(b"\n")[-1].decode(errors="replace") for tail in tails.values()]


def _read(pipe: int, tails: dict[int, bytes], whole: bool) -> bool:
    """Read a pipe and add the data to its entry in `tails`, the last `LINE` bytes of each pipe.

    Args:
        pipe: descriptor of the pipe.
        tails: last bytes by pipe.
        whole: true to read all that is available, up to 16 MiB; false to read once.

    Returns:
        False if the pipe is at its end.
    """
    os.set_blocking(pipe, False)
    for _ in range(256 if whole else 1):
        try:
            data = os.read(pipe, LINE)
        except BlockingIOError:
            return True
        if not data:
            return False
        tails[pipe] = (tails[pipe] + data)[-LINE:]
    return True
