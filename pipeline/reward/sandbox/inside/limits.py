"""Limits a process puts on itself before it runs foreign code: resource limits and a system call filter.

The filter (seccomp) is the second wall behind the namespaces, and most of the wall where there are none. It refuses
sockets, new namespaces, mounts, tracing, memory that belongs to no address space (System V segments, memfd), new
sessions and process groups (so that a group can be killed whole), and the limits of other processes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long to import as a small program to run
    from typing import Any

# Numbers on x86_64 and on aarch64, from the kernel's unistd headers.
REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "socket": (41, 198),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
# Where no process namespace hides other processes, a process may signal itself alone.
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
CLONE, CLONE3, PRLIMIT64, TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
NAMESPACES = 0x7E020080  # CLONE_NEW{CGROUP,UTS,IPC,USER,PID,NET,TIME,NS}: bits of clone's flags
EPERM, ENOSYS = 1, 38

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data, little endian

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, action: str) -> int:
    """`result` of a C call; a negative one is raised as an OSError that names the action."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{action}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int, pointer: Any = None) -> None:
    """`prctl(2)`; OSError where the kernel refuses."""
    checked(libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl({option}, {value})")


def program(machine: str, only_self: int | None) -> bytes:
    """The filter as instructions of classic BPF, 8 bytes each.

    Args:
        machine: `os.uname().machine`.
        only_self: id of the one process that may be signalled; None allows every signal.
    """
    column, arch = MACHINES[machine]
    code: list[tuple[int, int, int, int]] = [  # opcode, jump if true, jump if false, constant
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":  # the x32 numbers name the same calls again
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | EPERM)]
    refused = REFUSED if only_self is None else REFUSED | SIGNALS
    for numbers in refused.values():
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | EPERM)]
    # The flags of clone3 lie in memory that a filter cannot read; libc falls back to clone.
    code += [(_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    code += [
        (_EQUAL, 0, 4, CLONE[column]),
        (_LOAD, 0, 0, _ARG0),
        (_ANY_BIT, 0, 1, NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for numbers, process in ((PRLIMIT64, 0), *(() if only_self is None else ((TGKILL, only_self),))):
        code += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARG0),
            (_EQUAL, 1, 0, process),
            (_RETURN, 0, 0, _ERRNO | EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def filter_calls(only_self: int | None) -> None:
    """Puts the filter on this process and all that come from it, for good."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program(os.uname().machine, only_self))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    prog = Program((len(code) - 1) // 8, ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(prog))


def resources(limits: dict[str, int], processes: int | None) -> None:
    """Resource limits of this process.

    Args:
        limits: `cpu_s`, `memory` and `file` (bytes).
        processes: processes and threads of this user in this user namespace; None sets no limit.
    """
    # The soft limit sends SIGXCPU, which may be ignored; the hard one kills.
    values = [
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_AS, limits["memory"], limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"], limits["file"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ]
    if processes is not None:
        values.append((resource.RLIMIT_NPROC, processes, processes))
    for kind, soft, hard in values:
        # An administrator's lower limit stays: only a privileged process could raise it.
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
