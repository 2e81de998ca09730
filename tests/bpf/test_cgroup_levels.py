"""The level of a cgroup, by a program that compares ids."""

import errno
import os
import struct
from collections.abc import Sequence

import pytest

from bpf import cgroup_levels, errors, syscalls

ANCESTORS = {0: 1, 1: 300, 2: 1 << 40 | 7, 63: 99, 64: 100}
"""By level, the root of all first."""
ANCESTOR_CGROUP_ID = 123  # bpf_get_current_ancestor_cgroup_id in linux/bpf.h


class Machine:
    """Runs the instructions that the program has (Documentation/bpf/standardization)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error_at = ""
        self.loaded: list[int] = []
        self.runs = 0
        self._code = b""
        monkeypatch.setattr(syscalls, "program_load", self._load)
        monkeypatch.setattr(syscalls, "run_raw_tracepoint", self._run)

    def _load(self, kind: int, code: bytes) -> int:
        assert kind == 17
        if self.error_at == "load":
            raise errors.BpfError(errno.EINVAL, "no such helper")
        self._code = code
        self.loaded.append(os.open("/dev/null", os.O_RDONLY))
        return self.loaded[-1]

    def _run(self, fd: int, arguments: Sequence[int]) -> int:
        assert fd == self.loaded[-1]
        if self.error_at == "run":
            raise errors.BpfError(errno.EOPNOTSUPP, "cannot be run")
        self.runs += 1
        registers: list[object] = [None, arguments, *[None] * 8]
        instructions = list(struct.iter_unpack("=BBhi", self._code))
        at = 0
        while True:
            opcode, both, offset, immediate = instructions[at]
            source, target = divmod(both, 16)
            at += 1
            match opcode:
                case 0xBF:
                    registers[target] = registers[source]
                case 0xB7:
                    registers[target] = immediate
                case 0x79:
                    assert registers[source] is arguments
                    registers[target] = arguments[offset // 8]
                case 0x85:
                    assert immediate == ANCESTOR_CGROUP_ID
                    level = registers[1]
                    assert isinstance(level, int)
                    registers[:6] = [ANCESTORS.get(level, 0), *[None] * 5]
                case 0x1D:
                    at += offset * (registers[target] == registers[source])
                case _:
                    assert opcode == 0x95
                    assert isinstance(registers[0], int)
                    return registers[0]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("cgroup", "level"), [(1, 0), (300, 1), (1 << 40 | 7, 2), (99, 63), (7, None), (100, None)]
)
def test_level_is_that_of_the_ancestor_with_this_id(
    machine: Machine, cgroup: int, level: int | None
) -> None:
    assert cgroup_levels.of_ancestor(cgroup) == level
    assert machine.runs == (64 if level is None else level + 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(machine.loaded[0])


@pytest.mark.parametrize("error_at", ["load", "run"])
def test_level_is_unknown_where_the_kernel_runs_no_such_program(
    machine: Machine, error_at: str
) -> None:
    machine.error_at = error_at
    before = os.listdir("/proc/self/fd")
    assert cgroup_levels.of_ancestor(1) is None
    assert os.listdir("/proc/self/fd") == before
