"""The filter's verdicts, by an interpreter of its instructions, for both architectures: also the one not here."""

from __future__ import annotations

import errno
import struct

import pytest

from plaudit_sandbox.confinement import ALLOWED, ARCHITECTURES, CHECKED, OPENING, filter_program

PID = 4321
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
PTHREAD_FLAGS = 0x3D0F00


def verdict(machine: str, number: int, *arguments: int, opens: bool = True, audit: int | None = None) -> int:
    """What the kernel's own interpreter would return."""
    about = ARCHITECTURES[machine]
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, audit or about.audit, 0, *padded)
    program = list(struct.iter_unpack("=HBBI", filter_program(about, PID, opens=opens)))
    accumulator = position = 0
    while True:
        operation, if_true, if_false, operand = program[position]
        position += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
            continue
        truth = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
        position += if_true if truth[operation] else if_false


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def number(machine: str, name: str) -> int:
    found = (CHECKED | OPENING | ALLOWED)[name][ARCHITECTURES[machine].column]
    assert found is not None
    return found


def test_an_unlisted_system_call_is_refused(machine: str) -> None:
    listed = {numbers[ARCHITECTURES[machine].column] for numbers in (ALLOWED | CHECKED | OPENING).values()}
    verdicts = {verdict(machine, n) for n in range(ARCHITECTURES[machine].last + 1) if n not in listed}
    assert verdicts == {ERRNO | errno.EPERM}
    assert verdict(machine, 1000) == ERRNO | errno.ENOSYS


def test_another_table_of_calls_ends_the_process(machine: str) -> None:
    others = {about.audit for name, about in ARCHITECTURES.items() if name != machine}
    assert {verdict(machine, 0, audit=audit) for audit in {*others, 0x40000003}} == {KILL}  # 0x40000003: 32 bits
    assert verdict(machine, 0x40000000 | 1) == KILL


def test_files_are_opened_only_under_landlock(machine: str) -> None:
    assert verdict(machine, number(machine, "openat")) == ALLOW
    assert verdict(machine, number(machine, "openat"), opens=False) == ERRNO | errno.EACCES


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("clone", (PTHREAD_FLAGS,), True),
        ("clone", (17,), False),  # a process
        ("clone", (PTHREAD_FLAGS & ~0x10000,), False),
        ("clone", (PTHREAD_FLAGS | 0x10000000,), False),  # in a user namespace
        ("clone3", (), False),
        ("kill", (PID, 15), True),
        ("kill", (PID, 9), False),
        ("kill", (PID + 1, 15), False),
        ("kill", (0, 15), False),
        ("kill", (0xFFFFFFFF, 15), False),
        ("tgkill", (PID, PID, 6), True),
        ("tgkill", (PID, PID, 9), False),
        ("tgkill", (1, 1, 6), False),
        ("prlimit64", (0, 7), True),
        ("prlimit64", (PID + 1, 7), False),
        ("prlimit64", (PID, 7), False),
        ("prlimit64", (0, 7, 0x1000), False),  # a new limit
        ("prlimit64", (0, 7, 0x100000000), False),
        ("fcntl", (1, 1030), True),
        ("fcntl", (1, 8, 1), False),  # F_SETOWN
        ("fcntl", (1, 4), False),  # F_SETFL
        ("ioctl", (0, 0x5412), False),  # TIOCSTI
    ],
)
def test_calls_are_judged_by_their_arguments(
    machine: str, name: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    assert (verdict(machine, number(machine, name), *arguments) == ALLOW) is allowed
