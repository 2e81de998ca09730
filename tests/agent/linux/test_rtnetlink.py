"""Interfaces in the messages of rtnetlink (linux/if_link.h)."""

import errno
import struct
from typing import cast

import pytest

from agent.linux import rtnetlink
from agent.linux.netlink import Exchange
from agent.linux.rtnetlink import Link
from bpf.netlink import NLM_F_DUMP, attribute
from tests.agent.linux.route_answers import OWN_ERRORS, Answers

_GETLINK = 18
_IFNAME, _LINK, _MASTER, _LINKINFO, _EXT_MASK, _LINK_NETNSID = 3, 5, 10, 18, 29, 37
_INFO_KIND = 1
_UP, _LOOPBACK = 1, 8
_ETHERNET, _LOOPBACK_TYPE = 1, 772


def message(index: int, name: str, kind: int, flags: int, *attributes: bytes) -> bytes:
    header = struct.pack("=BxHiII", 0, kind, index, flags, 0xFFFFFFFF)
    return header + attribute(_IFNAME, name.encode() + b"\0") + b"".join(attributes)


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=i", value))


LOOPBACK = message(1, "lo", _LOOPBACK_TYPE, _UP | _LOOPBACK)
VETH = message(
    *(7, "veth7", _ETHERNET, 0),
    *(number(_LINK, 2), number(_LINK_NETNSID, 0), number(_MASTER, 3)),
    attribute(_LINKINFO, attribute(_INFO_KIND, b"veth\0")),
)
LINKS = [
    Link(1, "lo", _UP | _LOOPBACK, is_ethernet=False),
    Link(7, "veth7", 0, "veth", peer=2, peer_nsid=0, master=3),
]


def request(index: int) -> bytes:
    """One interface, or all of them, without statistics."""
    return struct.pack("=BxHiII", 0, 0, index, 0, 0) + number(_EXT_MASK, 1 << 3)


def test_all_interfaces_of_a_namespace_are_read_at_once() -> None:
    answers = Answers([LOOPBACK, VETH])
    assert rtnetlink.read_in(cast(Exchange, answers)) == LINKS
    assert answers.requests == [(_GETLINK, request(0), NLM_F_DUMP)]
    assert [(link.is_up, link.is_loopback) for link in LINKS] == [(True, True), (False, False)]


def test_one_interface_is_found_or_none() -> None:
    answers = Answers([VETH], errno.ENODEV)
    found = [rtnetlink.found_in(cast(Exchange, answers), 7) for _ in range(2)]
    assert found == [LINKS[1], None]
    assert answers.requests == [(_GETLINK, request(7), 0)] * 2


@pytest.mark.parametrize("error", OWN_ERRORS)
def test_interface_is_unknown_where_this_process_lacks_something(error: int) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        rtnetlink.found_in(cast(Exchange, Answers(error)), 7)
    assert caught.value.errno == error


def test_number_that_is_cut_off_is_none() -> None:
    short = message(7, "a", _ETHERNET, _UP, attribute(_LINK, b"\2\0"), attribute(_MASTER, b""))
    assert rtnetlink.read_in(cast(Exchange, Answers([short]))) == [Link(7, "a", _UP)]


async def test_interface_of_this_process_is_found_by_its_number() -> None:
    found = await rtnetlink.find(1)
    assert found is not None
    assert (found.name, found.is_loopback, found.kind) == ("lo", True, None)
    assert await rtnetlink.find(1 << 30) is None
    assert found in await rtnetlink.read()
