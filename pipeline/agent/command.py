"""A command that drives an episode (`agent.command`), in the episode's process, with which it and its children end.

Needs Python 3.9 and nothing but the standard library. The command gets the row as a JSON file, whose path is in
SLIPSTREAM_ROW; it is a file in memory that ends with the episode. Its result is the last line that it prints.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from typing import Any

LINE = 1 << 16
"""Bytes of the last line that are read."""


def run(command: list[str], row: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end.

    Args:
        command: program and arguments.
        row: of the episode.
        variables: environment variables beside those of this process.

    Returns:
        The JSON object in the last line that it printed, or none; and `failed`, how it did.
    """
    given = os.memfd_create("row")
    with os.fdopen(given, "wb", closefd=False) as file:
        file.write(json.dumps(row).encode())
    environment = {**os.environ, **variables, "SLIPSTREAM_ROW": f"/proc/{os.getpid()}/fd/{given}"}
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
    except OSError as error:
        return {"failed": f"agent.command: {command[0]} cannot be started ({error.strerror})"}
    assert process.stdout is not None and process.stderr is not None
    out, err = _last_lines(process, process.stdout.fileno(), process.stderr.fileno())
    code = process.wait()
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = f"; the last line on its standard error: {err[:1000]}" if err else ""
        return {"failed": f"agent.command ended with {how}{last}"}
    try:
        result = json.loads(out)
    except (ValueError, RecursionError):
        return {}
    return {"result": result} if isinstance(result, dict) else {}


def _last_lines(process: subprocess.Popen[bytes], *pipes: int) -> list[str]:
    """The last line of each pipe when the process ends, which others may still hold open."""
    poll, tails = select.poll(), dict.fromkeys(pipes, b"")
    ended = os.pidfd_open(process.pid)
    for descriptor in (ended, *pipes):
        poll.register(descriptor, select.POLLIN)
    open_pipes = set(pipes)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        # What was printed before the end is there by now.
        for pipe in open_pipes & (set(pipes) if ended in ready else ready):
            more = _read(pipe, tails, ended in ready)
            if not more:
                poll.unregister(pipe)
                open_pipes = open_pipes - {pipe}
        if ended in ready:
            os.close(ended)
            return [tail.strip().split(b"\n")[-1].decode(errors="replace") for tail in tails.values()]


def _read(pipe: int, tails: dict[int, bytes], whole: bool) -> bool:
    """Add what a pipe holds to its tail, up to 16 MiB with `whole`; False where nothing more will come."""
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
