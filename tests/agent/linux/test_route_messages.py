"""Bodies of route netlink's messages, byte for byte as iproute2 sends them."""

import ipaddress
import struct
from collections.abc import Callable

import pytest

from agent.linux import route_messages
from agent.linux.route_messages import LinkState, Route
from bpf.netlink import attribute, attributes

FOUR, SIX = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("fd00:18::1")
AF_INET, AF_INET6 = 2, 10
HEAD = bytes(16)
MAC = bytes(range(6))


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def link_head(ifindex: int = 0, *, is_up: bool = False) -> bytes:
    return struct.pack("=BxHiII", 0, 0, ifindex, is_up, is_up)


def route_head(*fields: int, flags: int = 0) -> bytes:
    return struct.pack("=8BI", *fields, flags)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: route_messages.link(), link_head()),
        (lambda: route_messages.link(7, is_up=True), link_head(7, is_up=True)),
        (
            lambda: route_messages.link(name="eth0", group=0, bridge=0, address=MAC, mtu=1400),
            link_head()
            + attribute(3, b"eth0\0")
            + attribute(27, u32(0))
            + attribute(10, u32(0))
            + attribute(1, MAC)
            + attribute(4, u32(1400)),
        ),
        (lambda: route_messages.in_namespace(9), attribute(28, u32(9))),
        (lambda: route_messages.of_kind("dummy"), attribute(18, attribute(1, b"dummy"))),
        (
            lambda: route_messages.veth(b"peer"),
            attribute(18, attribute(1, b"veth") + attribute(2, attribute(1, b"peer"))),
        ),
    ],
)
def test_interface_and_what_changes_of_it(make: Callable[[], bytes], expected: bytes) -> None:
    assert make() == expected


@pytest.mark.parametrize(
    ("make", "head", "values"),
    [
        (
            lambda: route_messages.address(7, FOUR),
            (AF_INET, 32, 0, 0, 7),
            {1: FOUR.packed, 2: FOUR.packed, 8: u32(0)},
        ),
        (
            lambda: route_messages.address(7, FOUR, 24, has_route=False),
            (AF_INET, 24, 0, 0, 7),
            {1: FOUR.packed, 2: FOUR.packed, 8: u32(0x200)},
        ),
        (
            lambda: route_messages.address(7, SIX),
            (AF_INET6, 128, 0, 0, 7),
            {1: SIX.packed, 8: u32(0x02)},
        ),
        (
            lambda: route_messages.address(7, SIX, 64, has_route=False),
            (AF_INET6, 64, 0, 0, 7),
            {1: SIX.packed, 8: u32(0x202)},
        ),
    ],
)
def test_address_is_usable_at_once(
    make: Callable[[], bytes], head: tuple[int, ...], values: dict[int, bytes]
) -> None:
    made = make()
    assert struct.unpack_from("=BBBBi", made) == head
    assert attributes(made, 8) == values


@pytest.mark.parametrize(("address", "family"), [(FOUR, AF_INET), (SIX, AF_INET6)])
def test_neighbour_is_permanent(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, family: int
) -> None:
    made = route_messages.neighbour(7, address, MAC)
    assert struct.unpack_from("=BxxxiHBB", made) == (family, 7, 0x80, 0, 0)
    assert attributes(made, 12) == {1: address.packed, 2: MAC}


def test_route_has_what_is_set() -> None:
    default = Route(ipaddress.ip_network("0.0.0.0/0"))
    assert default.packed() == route_head(AF_INET, 0, 0, 0, 254, 4, 0, 1)
    every = Route(
        ipaddress.ip_network("fd00:18::/64"),
        type=route_messages.LOCAL,
        ifindex=7,
        gateway=SIX,
        scope=route_messages.LINK,
        table=route_messages.LOCAL_TABLE,
        protocol=113,
        metric=300,
        source=SIX,
        is_on_link=True,
    )
    assert every.packed() == (
        route_head(AF_INET6, 64, 0, 0, 255, 113, 253, 2, flags=4)
        + attribute(1, ipaddress.ip_address("fd00:18::").packed)
        + attribute(4, u32(7))
        + attribute(5, SIX.packed)
        + attribute(6, u32(300))
        + attribute(7, SIX.packed)
    )


def test_routes_are_read_by_family_or_destination() -> None:
    assert route_messages.all_routes(AF_INET6) == route_head(AF_INET6, *[0] * 7)
    for address, family, length in ((FOUR, AF_INET, 32), (SIX, AF_INET6, 128)):
        expected = route_head(family, length, *[0] * 6) + attribute(1, address.packed)
        assert route_messages.route_to(address) == expected


@pytest.mark.parametrize(
    "route",
    [
        Route(ipaddress.ip_network("0.0.0.0/0")),
        Route(ipaddress.ip_network("::/0"), metric=1024, ifindex=7),
        Route(
            ipaddress.ip_network("198.18.0.0/24"),
            type=route_messages.UNREACHABLE,
            scope=route_messages.HOST,
            protocol=2,
        ),
        Route(ipaddress.ip_network("fd00:18::1/128"), ifindex=7, table=255),
    ],
)
def test_route_comes_back_from_a_message(route: Route) -> None:
    assert route_messages.parsed_route(HEAD + route.packed()) == route


def test_table_with_a_large_number_is_in_an_attribute() -> None:
    packed = Route(ipaddress.ip_network("198.18.0.0/24"), table=252).packed()
    found = route_messages.parsed_route(HEAD + packed + attribute(15, u32(1000)))
    assert found == Route(ipaddress.ip_network("198.18.0.0/24"), table=1000)
    cut = route_messages.parsed_route(HEAD + packed + attribute(15, b"\1\0\0"))
    assert cut.table == 252


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (b"", LinkState(7, b"", 0, is_active=False)),
        (
            attribute(1, MAC) + attribute(4, u32(1400)) + attribute(16, b"\6"),
            LinkState(7, MAC, 1400, is_active=True),
        ),
        (attribute(16, b"\2"), LinkState(7, b"", 0, is_active=False)),
    ],
)
def test_state_of_an_interface_is_in_its_attributes(values: bytes, expected: LinkState) -> None:
    assert route_messages.parsed_link(HEAD + link_head(7) + values) == expected
