"""Sources are compiled for the helpers that the kernel offers, each of which is detected."""

import errno
import os
import struct

import pytest

from bpf import errors, features, syscalls
from bpf.features import COARSE_CLOCK, CURRENT_TASK, Helper

GATES = (COARSE_CLOCK, CURRENT_TASK)


@pytest.mark.parametrize("missing", CURRENT_TASK.helpers)
def test_task_is_not_read_without_one_of_its_helpers(
    monkeypatch: pytest.MonkeyPatch, missing: Helper
) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper, kind: helper != missing)
    assert features.offered(GATES) == [COARSE_CLOCK]


def test_with_all_helpers_everything_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper, kind: True)
    assert features.offered(GATES) == [COARSE_CLOCK, CURRENT_TASK]


def test_compiler_gets_every_macro_of_the_sources() -> None:
    flags = features.compiler_flags(GATES, [COARSE_CLOCK])
    assert flags == ["-DCOARSE_CLOCK=1", "-DHAS_CURRENT_TASK=0"]


class Kernel:
    """Loads programs, but for those that call a helper."""

    def __init__(self, number: int = 0, *, has_programs: bool = True) -> None:
        """number: of the error."""
        self._number = number
        self._has_programs = has_programs
        self.programs: list[tuple[int, int, list[tuple[int, ...]]]] = []
        self.opened: list[int] = []

    def load(self, kind: int, code: bytes, *, attach_type: int) -> int:
        instructions = list(struct.iter_unpack("=BBhi", code))
        self.programs.append((kind, attach_type, instructions))
        has_call = any(operation == 0x85 for operation, *_ in instructions)
        if not self._has_programs or (has_call and self._number):
            raise errors.BpfError(self._number, "it is rejected")
        self.opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        return self.opened[-1]


RETURN_0 = [(0xB7, 0, 0, 0), (0x95, 0, 0, 0)]
STACK = [(0xBF, 0xA1, 0, 0), (0x07, 1, 0, -16), (0xB7, 2, 0, 16), (0xB7, 3, 0, 0)]


@pytest.mark.parametrize(
    ("feature", "kind", "attach_type", "arguments"),
    [
        (COARSE_CLOCK, 3, 0, STACK),
        (features.KERNEL_READ, 3, 0, STACK),
        (features.PACKET_NETNS, 8, 1, [(0xB7, 1, 0, 0)]),
        (features.SET_RETVAL, 18, 10, [(0xB7, 1, 0, 0)]),
    ],
    ids=lambda value: getattr(value, "macro", ""),
)
def test_helper_is_offered_where_a_program_that_calls_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    feature: features.Feature,
    kind: int,
    attach_type: int,
    arguments: list[tuple[int, ...]],
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(syscalls, "program_load", kernel.load)
    assert feature.is_offered()
    (helper,) = feature.helpers
    calling = [*arguments, (0x85, 0, 0, int(helper)), *RETURN_0]
    assert kernel.programs == [(kind, attach_type, RETURN_0), (kind, attach_type, calling)]
    for descriptor in kernel.opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.EPERM])
def test_rejected_program_is_a_helper_that_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(syscalls, "program_load", Kernel(number).load)
    assert not features.is_offered(Helper.KTIME_GET_COARSE_NS)
    assert not features.reports_task_name()


@pytest.mark.parametrize("kernel", [Kernel(errno.ENOMEM), Kernel(errno.EPERM, has_programs=False)])
def test_other_errors_of_the_kernel_are_raised(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    monkeypatch.setattr(syscalls, "program_load", kernel.load)
    with pytest.raises(errors.BpfError, match="it is rejected"):
        features.offered(GATES)
