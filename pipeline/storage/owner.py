"""A lock on a folder that a command writes: a file that names the owning process and has a heartbeat.

    nothing there                          it is created, exclusively                    this process owns the folder
    owner lives on this machine, or its
    heartbeat changes                      -                                             refused, with host and process
    owner's process is gone, or its
    heartbeat stands still for `DEAD_S`    its file is replaced, by one process only     this process owns the folder

1. Only changes of the heartbeat count, by the clock of the process that waits: clocks of two hosts differ.
2. Processes of another machine or container have numbers of their own, so only their heartbeat decides.
3. To replace a dead owner's file, a process must own the file `NAME.next` in the same way; then it looks once more.
4. The owner reads its file before each heartbeat, to detect that another process has taken over.
5. An object store cannot create a file exclusively: there the last one that writes it wins, and looks after `SETTLE_S`.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs

from pipeline.storage.checkpoints import root
from pipeline.storage.filesystem import filesystem_of

if TYPE_CHECKING:
    from pipeline.config.trainer import TrainerConfig

FILE = "owner.json"
"""Name of the lock file in a run's folder; names of its temporary files begin with this name."""
BEAT_S, DEAD_S, POLL_S, SETTLE_S = 10.0, 60.0, 1.0, 2.0
"""Seconds: between heartbeats; without a heartbeat until an owner counts as dead; between two looks at another's file;
and, on an object store, from writing a file to checking who won."""

log = logging.getLogger(__name__)


class Owned(ValueError):
    """The folder has another owner. The message names the owner and a remedy."""


@dataclass(frozen=True)
class Owner:
    """The content of a lock file: a process, and its number of heartbeats so far."""

    host: str
    machine: str
    """Id of the boot and of the process namespace in which `pid` is valid; "" if the system does not show them."""
    pid: int
    started: str
    """Start of the process, in clock ticks since the boot: a later process may get the same `pid`."""
    since: str
    token: str
    beat: int = 0

    @classmethod
    def here(cls) -> "Owner":
        """Describe this process as an owner."""
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or "", since, uuid.uuid4().hex)

    @classmethod
    def read(cls, text: str) -> "Owner | None":
        """Parse the content of a lock file; None if it is incomplete, or from another program."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            owner = cls(**json.loads(text))
            texts = (owner.host, owner.machine, owner.started, owner.since, owner.token)
            if all(isinstance(value, str) for value in texts) and type(owner.pid) is int and 0 < owner.pid < 2**31:
                return owner
        return None

    def alive(self) -> bool | None:
        """Return whether the process is running; None if that cannot be seen from this machine."""
        here = (socket.gethostname(), _machine())
        if not self.machine or not self.started or (self.host, self.machine) != here:
            return None
        started = _started(self.pid)
        return None if started is None else started == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """The lock file that makes this process the owner of a folder.

    Args:
        place: path or URL of the file.
        what: name of the owned folder for messages, such as "the run in runs/a".
    """

    def __init__(self, place: str, what: str):
        self._files, self._path = _files(place)
        self._what, self._place = what, place
        self._me = Owner.here()
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.lost: str | None = None
        """Reason why this process lost the ownership; None while it has it."""

    def acquire(self, say: Callable[[str], None]) -> None:
        """Become the owner.

        Args:
            say: function that gets a sentence if this process must wait, or takes over from a dead owner.

        Raises:
            Owned: another owner is alive.
            OSError: the file cannot be written.
        """
        try:
            self._made = self._files.make_folder(self._path)
            self._take(self._path, say)
        except OSError as error:
            self._remove_folders()
            raise OSError(
                error.errno or 5, f"{self._what} cannot be used: {self._place}: {error.strerror or error}"
            ) from error
        except BaseException:
            self._remove_folders()
            raise
        self._thread.start()

    def release(self) -> None:
        """Remove the lock file, unless another process owns it now, and the empty folders that were made for it."""
        self._ended.set()
        self._thread.join(BEAT_S)
        try:
            if self.lost is None and self._is_mine(self._files.read(self._path)):
                self._files.delete(self._path)
        except OSError as error:
            log.warning("%s could not be removed (%s); the next start waits %.0f s", self._place, error, DEAD_S)
        self._remove_folders()

    def _take(self, path: str, say: Callable[[str], None]) -> None:
        text = json.dumps(asdict(self._me))
        while not self._files.create(path, text):
            dead = self._dead(path, say)
            if dead is None:
                continue
            following = f"{path}.next"
            self._take(following, say)
            try:
                # The owner may have come back, or another process may have been faster.
                if self._files.read(path) == dead:
                    self._files.write(path, text)
                    return
            finally:
                self._files.delete(following)

    def _dead(self, path: str, say: Callable[[str], None]) -> str | None:
        """Return the content of the lock file of a dead owner; None if the file no longer exists.

        Waits up to `DEAD_S` if it cannot be seen whether the owner is running. Raises Owned if the owner is alive.
        """
        first = self._files.read(path)
        if first is None:
            return None
        owner = Owner.read(first)
        alive = owner.alive() if owner else None
        if alive is None:
            say(
                f"{self._what} has an owner, {owner or 'which is unknown'}; waiting up to {DEAD_S:.0f} s for a sign of "
                "life before this process takes over"
            )
            end = time.monotonic() + DEAD_S
            while (text := self._files.read(path)) == first and time.monotonic() < end:
                time.sleep(POLL_S)
            if text is None:
                return None
            alive, owner = text != first, Owner.read(text) or owner
        if alive:
            raise Owned(
                f"{self._what} is in use by {owner or 'an unknown process'}; wait for its end, or end it, or choose "
                "another name or folder"
            )
        if owner and path == self._path:
            say(f"{self._what}: its last owner ({owner}) is gone, this process takes over")
        return first

    def _beat(self) -> None:
        """Write heartbeats to the lock file until it is released or another process owns it."""
        beaten, failing = self._me, False
        while not self._ended.wait(BEAT_S):
            try:
                if not self._is_mine(text := self._files.read(self._path)):
                    other = f"is owned by {owner}" if (owner := Owner.read(text or "")) else "was removed"
                    self.lost = (
                        f"{self._what} is not this process's any more: {self._place} {other}. That happens after "
                        f"{DEAD_S:.0f} s without a heartbeat, if the process was stopped; it ends and writes no more"
                    )
                    return
                beaten = replace(beaten, beat=beaten.beat + 1)
                self._files.write(self._path, json.dumps(asdict(beaten)))
                failing = False
            except OSError as error:
                if not failing:
                    log.warning("the heartbeat %s cannot be written (%s); it is tried again", self._place, error)
                failing = True

    def _is_mine(self, text: str | None) -> bool:
        owner = Owner.read(text or "")
        return owner is not None and owner.token == self._me.token

    def _remove_folders(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def of_run(run_dir: Path, trainer: "TrainerConfig") -> list[Lock]:
    """Return the locks of a run: in its folder and, if its checkpoints are stored elsewhere, in that folder, too."""
    folders: dict[tuple[bool, str], str] = {}
    for place in (str(run_dir), root(trainer, run_dir)):
        filesystem, path = filesystem_of(place)
        local = isinstance(filesystem, pafs.LocalFileSystem)
        folders.setdefault((local, os.path.realpath(path) if local else path), place)
    return [Lock(f"{place}/{FILE}", f"the run in {place}") for place in folders.values()]


def of_folder(folder: Path) -> Lock:
    """Return the lock of a folder that a command fills. The lock file is next to the folder, not in it."""
    folder = Path(os.path.realpath(folder))
    return Lock(f"{folder.parent}/.{folder.name}.{FILE}", f"the folder {folder}")


@contextlib.contextmanager
def owned(locks: list[Lock], say: Callable[[str], None]) -> Iterator[Callable[[], str | None]]:
    """Hold the locks while the block runs.

    Yields:
        A function that returns the reason if this process has lost one of the locks, else None.

    Raises:
        Owned, OSError: see `Lock.acquire`.
    """
    with contextlib.ExitStack() as stack:
        for lock in locks:
            lock.acquire(say)
            stack.callback(lock.release)
        yield lambda: next((lock.lost for lock in locks if lock.lost), None)


class _Local:
    """Operations on lock files on a local or shared disk."""

    def make_folder(self, path: str) -> list[Path]:
        """Make the folder of a file; returns the folders that did not exist, the deepest first."""
        folder = Path(path).parent
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        return missing

    def create(self, path: str, text: str) -> bool:
        """Write a file only if it does not exist; returns False if it does."""
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            # An empty file would delay the next start.
            self.delete(path)
            raise
        return True

    def read(self, path: str) -> str | None:
        """Return the content of a file; "" for a broken link, None if the file does not exist."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "" if os.path.islink(path) else None

    def write(self, path: str, text: str) -> None:
        """Replace the content of a file atomically."""
        aside = Path(f"{path}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise

    def delete(self, path: str) -> None:
        """Remove the file, if it is there."""
        Path(path).unlink(missing_ok=True)


class _Remote:
    """Operations on lock files in an object store that pyarrow or fsspec knows."""

    def __init__(self, filesystem: pafs.FileSystem):
        self._filesystem = filesystem

    def make_folder(self, path: str) -> list[Path]:
        """Make the folder of an object; returns an empty list, since the folder is not removed later."""
        self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        return []

    def create(self, path: str, text: str) -> bool:
        """Write an object only if it does not exist.

        Returns False if it does, or if another process wrote it at the same time and won.
        """
        if self.read(path) is not None:
            return False
        self.write(path, text)
        time.sleep(SETTLE_S)
        return self.read(path) == text

    def read(self, path: str) -> str | None:
        """Return the content of an object; None if it does not exist."""
        if self._filesystem.get_file_info(path).type != pafs.FileType.File:
            return None
        with self._filesystem.open_input_stream(path) as stream:
            return stream.read().decode("utf-8", errors="replace")

    def write(self, path: str, text: str) -> None:
        """Replace the content of an object."""
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(text.encode())

    def delete(self, path: str) -> None:
        """Remove the object, if it is there."""
        if self._filesystem.get_file_info(path).type == pafs.FileType.File:
            self._filesystem.delete_file(path)


def _files(place: str) -> tuple[Any, str]:
    filesystem, path = filesystem_of(place)
    return (_Local() if isinstance(filesystem, pafs.LocalFileSystem) else _Remote(filesystem)), path


def _machine() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start of a process in clock ticks since the boot.

    Returns "" if the process has ended, None if it belongs to another user and cannot be seen.
    """
    try:
        # The name is in brackets, and may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except PermissionError:
        return None
    except OSError:
        return ""
    return None
