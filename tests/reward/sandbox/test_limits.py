"""The system call filter, run by a small interpreter of its instructions for both machines."""

import struct

import pytest

from pipeline.reward.sandbox.inside import limits

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
MACHINES = list(limits.MACHINES)


def decide(machine: str, number: int, *arguments: int, only_self: int | None = None, arch: int | None = None) -> int:
    """What the filter answers to a system call."""
    code = limits.program(machine, only_self)
    arch = limits.MACHINES[machine][1] if arch is None else arch
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
    column = limits.MACHINES[machine][0]
    for name, numbers in limits.REFUSED.items():
        assert decide(machine, numbers[column]) == EPERM, name
    assert decide(machine, limits.CLONE3[column]) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_allowed(machine: str) -> None:
    column = limits.MACHINES[machine][0]
    refused = {numbers[column] for numbers in limits.REFUSED.values()} | {limits.CLONE3[column]}
    refused.add(limits.SOCKETPAIR[column])  # its first argument is never 0
    for number in set(range(453)) - refused:
        assert decide(machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_count(machine: str) -> None:
    column = limits.MACHINES[machine][0]
    clone, prlimit, tgkill = limits.CLONE[column], limits.PRLIMIT64[column], limits.TGKILL[column]
    assert decide(machine, clone, 0x003D0F00) == ALLOW  # a thread
    assert decide(machine, clone, 17) == ALLOW  # a process
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        assert decide(machine, clone, flag | 17) == EPERM
    assert decide(machine, prlimit, 0) == ALLOW and decide(machine, prlimit, 1) == EPERM
    assert decide(machine, tgkill, 1) == ALLOW
    assert decide(machine, tgkill, 7, only_self=7) == ALLOW and decide(machine, tgkill, 1, only_self=7) == EPERM
    for numbers in limits.REFUSED_IN_THE_OPEN.values():
        assert decide(machine, numbers[column], only_self=7) == EPERM
        if numbers[column] != limits.ABSENT:
            assert decide(machine, numbers[column]) == ALLOW
    fcntl, ioctl, pair = limits.FCNTL[column], limits.IOCTL[column], limits.SOCKETPAIR[column]
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
