"""The filter program, run by a small interpreter of its instructions."""

import errno

import pytest

from t1jax.sandbox import seccomp

ALLOWED = 0x7FFF0000
EPERM = 0x00050000 | errno.EPERM
READ = 0


def verdict(number, arguments=(), arch=seccomp.X86_64):
    """What the program returns for one system call."""
    data = {seccomp.NUMBER_AT: number, seccomp.ARCH_AT: arch}
    for i, argument in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6]):
        data[seccomp.ARGUMENTS_AT + 8 * i] = argument & 0xFFFFFFFF
    program, at, value = seccomp.program(), 0, 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            value = data[operand]
            continue
        holds = {
            seccomp.EQUAL: value == operand,
            seccomp.AT_LEAST: value >= operand,
            seccomp.ANY_BIT: bool(value & operand),
        }[code]
        at += true if holds else false


@pytest.mark.parametrize("name", seccomp.DENIED)
def test_denied(name):
    assert verdict(seccomp.DENIED[name]) == EPERM


@pytest.mark.parametrize("name", seccomp.ONLY_ONESELF)
def test_only_oneself(name):
    number, argument = seccomp.ONLY_ONESELF[name]
    others = [0] * 6
    others[argument] = 1
    assert verdict(number, others) == EPERM
    assert verdict(number, [0] * 6) == ALLOWED


def test_rest():
    special = {seccomp.SOCKET, seccomp.CLONE3, *seccomp.DENIED.values()}
    for number in set(range(450)) - special:
        assert verdict(number) == ALLOWED
    assert verdict(READ, arch=0x40000003) == 0x80000000  # a 32-bit call
    assert verdict(READ | seccomp.X32_BIT) == EPERM
    assert verdict(seccomp.CLONE, [0x01200011]) == ALLOWED  # fork()
    assert verdict(seccomp.CLONE, [0x10000011]) == EPERM
    assert verdict(seccomp.CLONE3) == 0x00050000 | errno.ENOSYS
    allowed = [family for family in range(64) if verdict(seccomp.SOCKET, [family]) == ALLOWED]
    assert tuple(allowed) == seccomp.FAMILIES
