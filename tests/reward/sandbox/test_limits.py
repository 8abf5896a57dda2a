"""The system call filter, run by a small interpreter of its instructions for both machines."""

import struct

import pytest

from pipeline.reward.sandbox.inside import limits

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
MACHINES = ["x86_64", "aarch64"]
# Numbers of x86_64 and of aarch64, from the kernel's unistd headers; None where the machine has no such call.
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
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
}
CLONE, CLONE3, PRLIMIT64, TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
FCNTL, IOCTL, SOCKETPAIR = (72, 25), (16, 29), (53, 199)


def decide(machine: str, number: int, *arguments: int, only_self: int | None = None, arch: int | None = None) -> int:
    """What the filter answers to a system call."""
    code = limits.program(machine, only_self)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine] if arch is None else arch
    call = struct.pack("<IIQQQ", number, arch, 0, *arguments, *[0] * (2 - len(arguments)))
    accumulator = position = 0
    while True:
        opcode, yes, no, constant = struct.unpack_from("<HBBI", code, 8 * position)
        position += 1
        if opcode == 0x06:
            return int(constant)
        if opcode == 0x20:
            accumulator = struct.unpack_from("<I", call, constant)[0]
            continue
        holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
        position += yes if holds[opcode] else no


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_refused(machine: str) -> None:
    column = MACHINES.index(machine)
    for name, numbers in REFUSED.items():
        assert decide(machine, numbers[column]) == EPERM, name
    assert decide(machine, CLONE3[column]) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_allowed(machine: str) -> None:
    column = MACHINES.index(machine)
    refused = {numbers[column] for numbers in REFUSED.values()} | {CLONE3[column]}
    refused.add(SOCKETPAIR[column])  # its first argument is never 0
    for number in set(range(453)) - refused:
        assert decide(machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_count(machine: str) -> None:
    column = MACHINES.index(machine)
    clone, prlimit, tgkill = CLONE[column], PRLIMIT64[column], TGKILL[column]
    assert decide(machine, clone, 0x003D0F00) == ALLOW  # a thread
    assert decide(machine, clone, 17) == ALLOW  # a process
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        assert decide(machine, clone, flag | 17) == EPERM
    assert decide(machine, prlimit, 0) == ALLOW and decide(machine, prlimit, 1) == EPERM
    assert decide(machine, tgkill, 1) == ALLOW
    assert decide(machine, tgkill, 7, only_self=7) == ALLOW and decide(machine, tgkill, 1, only_self=7) == EPERM
    for name, numbers in REFUSED_IN_THE_OPEN.items():
        number = numbers[column]
        if number is not None:
            assert decide(machine, number, only_self=7) == EPERM, name
            assert decide(machine, number) == ALLOW, name
    fcntl, ioctl, pair = FCNTL[column], IOCTL[column], SOCKETPAIR[column]
    for number, command in ((fcntl, 8), (fcntl, 15), (ioctl, 0x8901), (ioctl, 0x8902)):
        assert decide(machine, number, 3, command) == EPERM and decide(machine, number, command, 3) == ALLOW
    cloexec = 0o2000000
    assert decide(machine, pair, 1, 1 | cloexec) == ALLOW
    for domain, kind in ((1, 2), (1, 5), (1, 2 | cloexec), (30, 1)):
        assert decide(machine, pair, domain, kind) == EPERM


def test_other_ways_to_call_the_kernel_are_closed() -> None:
    assert decide("x86_64", 0, arch=0x40000003) == KILL  # the 32-bit numbers
    assert decide("x86_64", 0x40000000 + 41) == EPERM  # the x32 numbers
    assert decide("aarch64", 0, arch=0x40000028) == KILL
