"""Instructions of BPF programs for tests, in the order of Documentation/bpf/standardization.

Registers are numbers; r1 is a program's context at its start, and r0 what it returns.
"""

import struct

_INSTRUCTION = struct.Struct("=BBhi")

MAP_LOOKUP, TAIL_CALL, CLONE_REDIRECT = 1, 12, 13
VLAN_PUSH, VLAN_POP, CHANGE_TAIL, STORE_BYTES = 18, 19, 38, 9


def move(register: int, value: int) -> bytes:
    return _INSTRUCTION.pack(0xB7, register, 0, value)


def copy(register: int, source: int) -> bytes:
    return _INSTRUCTION.pack(0xBF, register | source << 4, 0, 0)


def add(register: int, value: int) -> bytes:
    return _INSTRUCTION.pack(0x07, register, 0, value)


def load(register: int, base: int, offset: int) -> bytes:
    """32 bits."""
    return _INSTRUCTION.pack(0x61, register | base << 4, offset, 0)


def store(base: int, offset: int, register: int) -> bytes:
    """32 bits."""
    return _INSTRUCTION.pack(0x63, base | register << 4, offset, 0)


def load_map(register: int, fd: int) -> bytes:
    return _INSTRUCTION.pack(0x18, register | 1 << 4, 0, fd) + bytes(_INSTRUCTION.size)


def unless_zero(register: int, *then: bytes) -> bytes:
    """Run the instructions unless the register is 0."""
    return unless_equal(register, 0, *then)


def unless_above(register: int, limit: int, *then: bytes) -> bytes:
    """Run the instructions unless the register is above the limit."""
    code = b"".join(then)
    return _INSTRUCTION.pack(0x25, register, len(code) // _INSTRUCTION.size, limit) + code


def unless_equal(register: int, value: int, *then: bytes) -> bytes:
    """Run the instructions unless the register has this value."""
    code = b"".join(then)
    return _INSTRUCTION.pack(0x15, register, len(code) // _INSTRUCTION.size, value) + code


def skip_unless_zero(register: int, count: int) -> bytes:
    """Skip `count` instructions unless the register is 0."""
    return _INSTRUCTION.pack(0x55, register, count, 0)


def call(helper: int) -> bytes:
    return _INSTRUCTION.pack(0x85, 0, 0, helper)


def leave() -> bytes:
    return _INSTRUCTION.pack(0x95, 0, 0, 0)
