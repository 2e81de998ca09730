"""Which errors mean that a pod is being deleted."""

import errno

import pytest

from agent.gates.failures import has_vanished, is_interface_gone
from bpf.errors import AttachError


def caused(number: int) -> AttachError:
    """As `bpf` raises it."""
    error = AttachError("attaching to interface 7")
    error.__cause__ = OSError(number, "x")
    return error


@pytest.mark.parametrize(
    ("number", "is_gone", "is_vanished"),
    [
        (errno.ENODEV, True, True),
        (errno.ENOENT, False, True),
        (errno.ENXIO, False, True),
        (errno.EBUSY, False, False),
    ],
)
def test_missing_interface_differs_from_other_errors_also_as_a_cause(
    number: int, *, is_gone: bool, is_vanished: bool
) -> None:
    for error in (OSError(number, "x"), caused(number)):
        assert is_interface_gone(error) is is_gone
        assert has_vanished(error) is is_vanished


def test_error_without_a_cause_is_a_failure() -> None:
    assert not is_interface_gone(AttachError("x"))
    assert not has_vanished(ValueError("x"))
