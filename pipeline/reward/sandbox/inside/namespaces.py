"""Move this process into its own namespaces, with a file system that holds only the files that the code needs.

1. New mount, process, network, IPC, UTS and cgroup namespaces; with a new user namespace unless the process may make
   them without (root with CAP_SYS_ADMIN, who instead gives the code a user id of its own).
2. The root is a small tmpfs. Into it go, read-only and without set-user-id bits, the system's libraries and programs,
   the Python installation, and four harmless devices. No /sys, no home, no run folder; a /proc only on request.
3. The process forks; the child is process 1, so that everything inside ends when it ends.

Needs Python 3.9 and nothing but the standard library: environment processes use it as well (`pipeline/agent/`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from . import limits
from .limits import checked, libc

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from collections.abc import Iterable
    from typing import NoReturn

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
HERE = "/sandbox"  # the place of this package inside
WORK = "/tmp"  # the folder that the code may write to

NOBODY = 65534
FIRST_UID, UIDS = 20000, 40000  # ids for the code if root starts it: one for each running sandbox

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_OTHERS = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000  # pid, net, ipc, uts, cgroup
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call `mount(2)`. Raises OSError with source and target if it fails."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    checked(result, f"mounting {source} at {target}")


def enter(mounts: Iterable[tuple[str, str]], size: int, current: str | None = None) -> int | None:
    """Create namespaces and fork their process 1. This process must have only one thread.

    Args:
        mounts: (folder outside, folder inside) to show read-only, in addition to `SYSTEM`.
        size: size of the work folder, in bytes.
        current: folder in which process 1 begins; it is created if `mounts` do not show it, and a read-only /proc
            exists then. None: no such folder, and no /proc.

    Returns:
        In process 1: the user id for the code, or None if the code keeps the user id of this process. The calling
        process does not return: it waits for process 1, and ends in the same way.

    Raises:
        OSError: the kernel or its settings refuse a step; the message names the step.
    """
    uid = _unshare()
    child = os.fork()
    if child:
        os.closerange(0, 1024)
        _end_like(os.waitpid(child, 0)[1])
    limits.prctl(limits.PR_SET_PDEATHSIG, signal.SIGKILL)
    _root(mounts, size, current)
    return uid


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def fresh_work(size: int) -> None:
    """Replace the work folder by an empty one with room for `size` bytes."""
    libc.umount2(WORK.encode(), _DETACH)  # fails the first time, when there is none
    mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes={max(4096, size >> 14)},mode=777")


def _unshare() -> int | None:
    if os.geteuid() == 0 and libc.unshare(_NEWNS | _OTHERS) == 0:
        return FIRST_UID + os.getpid() % UIDS
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(_NEWUSER | _NEWNS | _OTHERS), "making namespaces (unshare)")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def _root(mounts: Iterable[tuple[str, str]], size: int, current: str | None) -> None:
    # Resolved now: an absolute link would be followed inside the new root.
    wanted = [(os.path.realpath(source), target) for source, target in mounts]
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path) and os.path.isdir(path)}
    wanted += [(os.path.realpath(path), path) for path in SYSTEM if path not in links and os.path.exists(path)]
    mount("none", "/", None, _REC | _PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=4m,nr_inodes=4096,mode=755")
    os.mkdir("/tmp/.old", 0o700)
    os.chdir("/tmp")
    checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b".old"), "changing the root (pivot_root)")
    os.chdir("/")
    os.mkdir(WORK)
    # This one comes first, because some of the others may lie below it.
    fresh_work(size)
    for source, target in sorted(wanted, key=lambda pair: pair[1]):
        _show("/.old" + source, target, _RDONLY | _NOSUID | _NODEV)
    for device in DEVICES:
        _show("/.old" + device, device, _RDONLY | _NOSUID | _NOEXEC)
    for path, target in links.items():
        os.symlink(target, path)
    if current is not None:
        os.mkdir("/proc")
        # The old one must still be mounted: a user namespace may only see what it could see before.
        mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        os.makedirs(current, exist_ok=True)
        os.chdir(current)
    checked(libc.umount2(b"/.old", _DETACH), "leaving the old root (umount2)")
    os.rmdir("/.old")
    mount("none", "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    libc.sethostname(b"sandbox", 7)


def _show(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, _BIND | _REC)
    settings = struct.pack("<QQQQ", attributes, 0, 0, 0)
    result = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, settings, len(settings))
    checked(result, f"making {target} read-only (mount_setattr, Linux 5.12 or newer)")
