"""The node's own addresses, from the kernel's tables of addresses and of local routes."""

import errno
import ipaddress
import os
import struct

import pytest

from agent.linux import netlink, own_addresses
from agent.linux.rtnetlink import Link
from bpf.netlink import NLM_F_DUMP, attribute
from tests.agent.linux.route_answers import OWN_ERRORS, Answers, route

AF_INET, AF_INET6 = 2, 10
GETADDR, GETROUTE = 22, 26
LOCAL = 255
FOUR, SIX = "198.18.0.1", "fd00:18::1"


def packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


def address(ifindex: int, values: bytes) -> bytes:
    return struct.pack("=BBBBI", 0, 0, 0, 0, ifindex) + values


def local(
    address: str, length: int, *, table: int = LOCAL, protocol: int = 3, kind: int = 2
) -> bytes:
    family = AF_INET if len(packed(address)) == 4 else AF_INET6
    values = attribute(1, packed(address))
    return route(family, length, table=table, protocol=protocol, kind=kind, attributes=values)


async def read(
    monkeypatch: pytest.MonkeyPatch, *responses: list[bytes] | int
) -> tuple[set[str], Answers]:
    kernel = Answers(*responses)
    monkeypatch.setattr(netlink, "within", kernel.within)
    links = [Link(2, "eth0"), Link(3, "kube-ipvs0"), Link(4, "kube-ipvs01")]
    return {str(one) for one in await own_addresses.read(links)}, kernel


async def test_addresses_of_interfaces_are_own_but_those_of_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = [
        address(2, attribute(1, packed(FOUR)) + attribute(2, packed(FOUR))),
        # With a peer; IPv6 has one attribute.
        address(2, attribute(1, packed("198.18.0.9")) + attribute(2, packed("198.18.0.2"))),
        address(4, attribute(1, packed(SIX))),
        address(3, attribute(1, packed("198.18.0.3"))),
        address(2, b""),
    ]
    found, kernel = await read(monkeypatch, addresses, [], [])
    assert found == {f"{FOUR}/32", "198.18.0.2/32", f"{SIX}/128"}
    table = attribute(15, struct.pack("=I", LOCAL))
    assert kernel.requests == [
        (GETADDR, bytes(8), NLM_F_DUMP),
        *(
            (GETROUTE, route(family, table=LOCAL, protocol=0, kind=2) + table, NLM_F_DUMP)
            for family in (AF_INET, AF_INET6)
        ),
    ]
    assert kernel.is_filtered == [True]


async def test_local_routes_of_administrators_are_own_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = [
        local("198.18.0.0", 24, protocol=3),
        local("198.18.1.0", 24, protocol=4),
        # The kernel's own, podgate's, another table's, and a broadcast address.
        local("198.18.2.0", 24, protocol=2),
        local("198.18.3.0", 24, protocol=113),
        local("198.18.4.0", 24, table=254),
        local("198.18.5.255", 32, kind=3),
        route(AF_INET, table=LOCAL, kind=2),
    ]
    found, _ = await read(monkeypatch, [], four, [local("fd00:18::", 64)])
    assert found == {"198.18.0.0/24", "198.18.1.0/24", "fd00:18::/64"}


async def test_node_without_a_family_has_no_routes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = await read(monkeypatch, [], [local("198.18.0.0", 24)], errno.EOPNOTSUPP)
    assert found == {"198.18.0.0/24"}


@pytest.mark.parametrize("number", OWN_ERRORS)
async def test_addresses_are_unknown_where_no_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        await read(monkeypatch, [], number)
