"""Requests to generic netlink, to the kernel's own family, which lists all."""

import contextlib
import errno

import pytest

from agent.linux.generic_netlink import GenericSocket

GET_FAMILY, FAMILY_ID, FAMILY_NAME = 3, 1, 2


def test_dump_has_the_attributes_of_each_message() -> None:
    with contextlib.closing(GenericSocket("nlctrl")) as control:
        families = {one[FAMILY_NAME]: one[FAMILY_ID] for one in control.dump(GET_FAMILY)}
    assert len(families) > 1
    assert int.from_bytes(families[b"nlctrl\0"], "little") == 0x10


def test_missing_family_is_an_error() -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        GenericSocket("NO-SUCH-FAMILY")
    assert raised.value.errno == errno.ENOENT


def test_rejected_request_is_an_error_and_the_next_one_works() -> None:
    with contextlib.closing(GenericSocket("nlctrl")) as control:
        with pytest.raises(OSError, match="not supported"):
            control.change(200, b"")
        assert control.dump(GET_FAMILY)
