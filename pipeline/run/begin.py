"""Joins or starts Ray. Each failure ends within a minute or two, with a message that names a remedy."""

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import ray

from pipeline.errors import NotStarted
from pipeline.upstream import apart

REACH_S, JOIN_S, START_S = 10.0, 45.0, 150.0
"""Maximum seconds: until a head accepts connections, until its cluster is joined, until a Ray on this machine
starts."""
LOOK_S, GONE_S = 1.0, 10.0
"""Seconds between two checks of Ray's processes, and seconds in which a command may still end after they are gone."""
SOCKET = 107
"""Maximum length of a socket's path in Linux, in bytes."""
ALONE = "unset RAY_ADDRESS to start a Ray on this machine"
NEEDED = 64 * 2**20
"""Number of bytes of disk that Ray's logs and sockets need at first."""


def join(address: str, options: dict[str, Any]) -> None:
    """Join the cluster that `RAY_ADDRESS` names.

    Args:
        address: the address.
        options: further arguments of `ray.init`.

    Raises:
        ValueError: nothing answers at the address, it is malformed, or the cluster requires a token that is not
            available.
        NotStarted: the cluster refuses this driver.
    """
    named = f"RAY_ADDRESS={address}"
    try:
        if os.environ.get("RAY_AUTH_MODE") != "token":
            # Ray looks for the token before it connects.
            _reach(_place(address))
        late = (
            f"{named}: no answer to this driver for {JOIN_S:.0f} s; give the address of the head's GCS, "
            f"such as HEAD:6379, on a machine that is a node of the cluster (`ray status` lists them), or {ALONE}"
        )
        with apart.apart(), _deadline(JOIN_S, late):
            ray.init(address=address, **options)
    except ray.exceptions.AuthenticationError as error:
        raise ValueError(
            f"Ray at {address} needs a token: set RAY_AUTH_MODE=token, and have the token of the cluster in "
            f"~/.ray/auth_token or RAY_AUTH_TOKEN ({str(error).split('. ')[0]})"
        ) from error
    except (OSError, ValueError) as error:
        reason = _line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise ValueError(f"{named}: no cluster answers there ({reason}); start its head, or {ALONE}") from error
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise NotStarted(f"{named}: the cluster refuses this driver: {_line(error)}; or {ALONE}") from error


def start_here(options: dict[str, Any]) -> None:
    """Start a Ray on this machine. A failed start is tried once more, since Ray's waits are short for a busy machine.

    Args:
        options: arguments of `ray.init`.

    Raises:
        ValueError: the temporary folder or the resources cannot be used.
        NotStarted: Ray did not start.
    """
    check_folder()
    late = f"Ray has not started for {START_S:.0f} s; {_where()}"
    for last in (False, True):
        try:
            with apart.apart(), _deadline(START_S, late):
                ray.init(**options)
            threading.Thread(target=watch, name="watch over Ray", daemon=True).start()
            return
        except (ValueError, ImportError):
            apart.end()
            raise
        except Exception as error:  # Ray raises plain exceptions, too.
            ray.shutdown()
            apart.end()
            if last:
                raise NotStarted(f"Ray did not start: {_line(error)}; {_where()}") from error
            print(f"Ray did not start ({_line(error)}); trying once more", file=sys.stderr)


def watch() -> None:
    """End the process with a message if the Ray of this machine is gone; Ray itself would abort only after a minute."""
    while ray.is_initialized():
        if apart.dead() is not None:
            time.sleep(GONE_S)
            if ray.is_initialized() and (program := apart.dead()):
                _leave(gone(program))
        time.sleep(LOOK_S)


def gone(program: str) -> str:
    """Format the error message for a Ray whose process `program` has ended."""
    return (
        f"Ray is gone: its {program} has ended, by a signal to all processes of the job (TERM to a control group) or "
        "for lack of memory"
    )


def leave(code: int) -> NoReturn:
    """End the process at once, without Ray's exit handlers, which would wait for a Ray that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_folder() -> None:
    """Check that a Ray on this machine can start in the temporary folder.

    Raises:
        ValueError: the folder's path is too long for sockets or not absolute, or the folder cannot be written or is
            full.
    """
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    folder = os.environ.get(name, "/tmp")
    remedy = f"choose another one: export {name}=/tmp"
    # Ray's longest name of a socket, in the folder of a session.
    session = f"ray/session_2000-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    room = SOCKET - len(os.fsencode(f"/{session}"))
    if not os.path.isabs(folder):
        raise ValueError(f"{name}={folder} is not an absolute path, which Ray's processes need; {remedy}")
    if (length := len(os.fsencode(folder.rstrip("/")))) > room:
        raise ValueError(
            f"{name}={folder} has {length} bytes; Ray's sockets lie in it, and their paths leave {room} bytes; {remedy}"
        )
    try:
        place = Path(folder, "ray")
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    except OSError as error:
        raise ValueError(f"{name}={folder}: Ray cannot write there ({error}); {remedy}") from error
    if free < NEEDED:
        raise ValueError(f"{name}={folder} has {free / 2**20:.0f} MiB free, too few for Ray; make room, or {remedy}")


def _place(address: str) -> str | None:
    """Return HOST:PORT of the head; None if Ray finds no head. For `auto` Ray reads it from a file.

    Raises:
        ValueError, ConnectionError: `address` is malformed, or Ray finds no cluster.
    """
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError("an address is HOST:PORT or auto")
    return apart.canonical(address)


def _reach(place: str | None) -> None:
    """Wait until a server accepts connections at `place` (HOST:PORT).

    Raises:
        OSError: the host has no address, or nothing accepted a connection in time.
    """
    if place is None:
        return
    host, _, port = place.rpartition(":")
    end = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


@contextlib.contextmanager
def _deadline(seconds: float, late: str) -> Iterator[None]:
    """End the process with the message `late` if the block takes longer: a wait in Ray's C++ cannot be ended
    otherwise."""

    timer = threading.Timer(seconds, _leave, [late])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    leave(1)


def _line(error: BaseException) -> str:
    """Return an error's message; if it holds the traceback of another process, only the last line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip() if "Traceback" in str(error) else " ".join(" ".join(lines).split())


def _where() -> str:
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    load = os.getloadavg()[0]
    return (
        f"the machine's load is {load:.0f} on {os.cpu_count()} CPUs; its logs are in {folder}/ray/session_latest/logs. "
        "Start the same command again when the machine is less busy"
    )
