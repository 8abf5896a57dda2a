"""Take rights away from this process before it runs foreign code: capabilities, resources, files and system calls.

Without capabilities the kernel itself refuses mounts, new roots, other users' files and most of what administrators do.
The filter (seccomp) refuses the rest that would reach outside: sockets, new namespaces, the memory and the limits of
other processes, signals through file descriptors, kernel objects that outlive the process or belong to no address
space, and new sessions and process groups (so that one kill reaches them all). If no namespace hides the files and
processes of others, Landlock keeps writes inside one folder and closes `/proc` of other processes. The filter then also
refuses signals, and changes to the priority, the shared memory or the file modes of others.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from collections.abc import Container
    from typing import Any

# Numbers on x86_64 and on aarch64, from the kernel's unistd headers.
REFUSED = {
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "socket": (41, 198),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "syslog": (103, 116),
}
ABSENT = 0xFFFFFFFF  # the number of a system call that a machine does not have
# These are refused as well if no namespace hides other processes and files.
REFUSED_IN_THE_OPEN = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_unlink": (241, 181),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "chmod": (90, ABSENT),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
}
CLONE, CLONE3, PRLIMIT64, TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
FCNTL, IOCTL, SOCKETPAIR = (72, 25), (16, 29), (53, 199)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
NAMESPACES = 0x7E020080  # CLONE_NEW{CGROUP,UTS,IPC,USER,PID,NET,TIME,NS}: bits of clone's flags
EPERM, ENOSYS = 1, 38

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data, little endian

# A system call is refused if one of its arguments has, has not, or has a bit of, a value.
_IS, _IS_NOT, _HAS_BIT_OF = (_EQUAL, 0, 1), (_EQUAL, 1, 0), (_ANY_BIT, 0, 1)
REFUSED_ARGUMENTS = (
    (CLONE, 0, _HAS_BIT_OF, NAMESPACES),
    (PRLIMIT64, 0, _IS_NOT, 0),
    # F_SETOWN, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP name the process that a file descriptor sends signals to.
    (FCNTL, 1, _IS, 8),
    (FCNTL, 1, _IS, 15),
    (IOCTL, 1, _IS, 0x8901),
    (IOCTL, 1, _IS, 0x8902),
    # Only a pair of local streams (AF_UNIX, SOCK_STREAM) can never be pointed at another socket.
    (SOCKETPAIR, 0, _IS_NOT, 1),
    (SOCKETPAIR, 1, _HAS_BIT_OF, 0xE),
)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE = 1 << 1
_WRITES = 0x1FF2  # LANDLOCK_ACCESS_FS_{WRITE_FILE,REMOVE_*,MAKE_*}
_MOVE, _TRUNCATE = 1 << 13, 1 << 14  # known since versions 2 and 3

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, action: str) -> int:
    """Return `result`, the result of a C call. Raises OSError, with `action` in its text, if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{action}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int, pointer: Any = None) -> None:
    """Call `prctl(2)`. Raises OSError if the kernel refuses."""
    checked(libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl({option}, {value})")


def change_user(uid: int) -> None:
    """Change user id and group id of this process to `uid`, which owns no files."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def drop_privileges() -> None:
    """Give up all capabilities of this process and its descendants permanently, also if root runs them."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked(libc.capset(struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "dropping capabilities (capset)")


def write_only_below(folder: str) -> None:
    """Forbid this process to write outside of `folder`, and to inspect processes other than its children.

    Does nothing if the kernel has no Landlock (before Linux 5.13, or not switched on).
    """
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    writes = _WRITES | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = checked(libc.syscall(_LANDLOCK_CREATE, struct.pack("<Q", writes), 8, 0), "making Landlock rules")
    for path, allowed in ((folder, writes), ("/dev/null", _WRITE_FILE)):
        fd = os.open(path, os.O_PATH)
        checked(libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("<Qi", allowed, fd), 0), f"a Landlock rule on {path}")
        os.close(fd)
    checked(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "taking on Landlock rules")
    os.close(rules)


def program(machine: str, only_self: int | None, allowed: Container[str] = ()) -> bytes:
    """Return the filter of system calls as instructions of classic BPF, 8 bytes each.

    Args:
        machine: `os.uname().machine`.
        only_self: process id of the filtered process if no namespace hides other processes; it may then only send
            signals to itself. None with namespaces.
        allowed: names in `REFUSED` that are allowed nevertheless.
    """
    column, arch = MACHINES[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | EPERM)
    code: list[tuple[int, int, int, int]] = [  # opcode, jump if true, jump if false, constant
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":  # the x32 numbers name the same calls again
        code += [(_AT_LEAST, 0, 1, 0x40000000), refuse]
    refused = REFUSED if only_self is None else REFUSED | REFUSED_IN_THE_OPEN
    for name, numbers in refused.items():
        if name not in allowed:
            code += [(_EQUAL, 0, 1, numbers[column]), refuse]
    # The flags of clone3 lie in memory that a filter cannot read; libc falls back to clone.
    code += [(_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    arguments = list(REFUSED_ARGUMENTS)
    if only_self is not None:
        arguments.append((TGKILL, 0, _IS_NOT, only_self))
    for numbers, index, (opcode, if_true, if_false), constant in arguments:
        code += [
            (_LOAD, 0, 0, _NR),
            (_EQUAL, 0, 3, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * index),
            (opcode, if_true, if_false, constant),
            refuse,
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def filter_calls(only_self: int | None, allowed: Container[str] = ()) -> None:
    """Apply the filter of `program` to this process and its descendants permanently. Call `drop_privileges` before."""
    code = ctypes.create_string_buffer(program(os.uname().machine, only_self, allowed))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program((len(code) - 1) // 8, ctypes.addressof(code))))


def resources(limits: dict[str, int], processes: int | None) -> None:
    """Set the resource limits of this process.

    Args:
        limits: `cpu_s` (seconds of CPU time), `memory` and `file` (bytes).
        processes: maximum number of processes of this user; None: not set.
    """
    # The soft limit sends SIGXCPU, which may be ignored; the hard one kills.
    values = [
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_AS, limits["memory"], limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"], limits["file"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ]
    if processes is not None:
        values.append((resource.RLIMIT_NPROC, processes, processes))
    for kind, soft, hard in values:
        # A lower limit that is already set is kept: only a privileged process could raise it.
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
