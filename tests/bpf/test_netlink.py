"""Attributes of netlink."""

import pytest

from bpf import netlink


def test_attributes_are_padded_and_read_back() -> None:
    content = netlink.attribute(1, b"eth0\0") + netlink.attribute(5, b"\1\0\0\0")
    assert len(content) % 4 == 0
    assert netlink.attributes(content, 0) == {1: b"eth0\0", 5: b"\1\0\0\0"}


@pytest.mark.parametrize("content", [b"\x02\0\1\0", b"\x08\0\1\0a", b"\x08"])
def test_attribute_that_is_cut_off_ends_the_reading(content: bytes) -> None:
    whole = netlink.attribute(3, b"abcd")
    assert netlink.attributes(whole + content, 0)[3] == b"abcd"
