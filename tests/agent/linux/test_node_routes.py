"""Where the node would send a packet, from the kernel's answers."""

import errno
import ipaddress
import struct
from collections.abc import Callable

import pytest

from agent.linux import netlink
from agent.linux.node_routes import DeviceRoute, NodeRoute, NodeRoutes, RouteKind
from bpf.abi import IPAddress
from bpf.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, attribute
from tests.agent.linux.route_answers import Answers, route

FOUR, SIX = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("fd00:18::1")
AF_INET, AF_BRIDGE, AF_INET6 = 2, 7, 10
GETROUTE, NEWNEIGH, GETNEIGH = 26, 28, 30
MAC = bytes(range(6))
REACHABLE, INCOMPLETE, FAILED = 0x02, 0x01, 0x20


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def neighbour(family: int, ifindex: int, state: int, values: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack("=BxxxiHBB", family, ifindex, state, flags, 0) + values


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    def make(*responses: list[bytes] | int) -> Answers:
        made = Answers(*responses)
        monkeypatch.setattr(netlink, "within", made.within)
        return made

    return make


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (1, attribute(4, u32(7)), NodeRoute(RouteKind.SENT, 7)),
        (1, b"", NodeRoute(RouteKind.NONE)),
        *((kind, attribute(4, u32(1)), NodeRoute(RouteKind.OWN)) for kind in (2, 3, 4, 5)),
        # Blackhole, unreachable and prohibit.
        *((kind, attribute(4, u32(7)), NodeRoute(RouteKind.NONE)) for kind in (6, 7, 8)),
    ],
)
@pytest.mark.parametrize(("address", "family", "length"), [(FOUR, AF_INET, 32), (SIX, 10, 128)])
async def test_packet_takes_the_route_that_the_kernel_finds(
    answering: Callable[..., Answers],
    address: IPAddress,
    family: int,
    length: int,
    kind: int,
    values: bytes,
    expected: NodeRoute,
) -> None:
    kernel = answering([route(family, length, kind=kind, attributes=values)])
    assert await NodeRoutes().route_to(address) == expected
    head = struct.pack("=8BI", family, length, *[0] * 7)
    assert kernel.requests == [(GETROUTE, head + attribute(1, address.packed), 0)]


@pytest.mark.parametrize(
    "number", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL]
)
async def test_packet_without_a_route_takes_none(
    answering: Callable[..., Answers], number: int
) -> None:
    answering(number)
    assert await NodeRoutes().route_to(FOUR) == NodeRoute(RouteKind.NONE)


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda: NodeRoutes().route_to(FOUR), "route to 198.18.0.1"),
        (lambda: NodeRoutes().uplinks(), "route to 192.0.2.1"),
        (lambda: NodeRoutes().routes_by(7), "routes by interface 7"),
        (lambda: NodeRoutes().bridge_port_of(FOUR, 7), "neighbour of a bridge"),
        (lambda: NodeRoutes().solicit(FOUR, 7), "resolving 198.18.0.1"),
    ],
    ids=["route", "uplinks", "routes by interface", "bridge port", "neighbour"],
)
async def test_other_errors_are_raised_with_what_was_read(
    answering: Callable[..., Answers], read: Callable[[], object], what: str
) -> None:
    answering(errno.ENOMEM)
    with pytest.raises(OSError, match=what) as caught:
        await read()  # type: ignore[misc]
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize(
    ("four", "six", "expected"),
    [
        (7, 8, {7, 8}),
        (7, 7, {7}),
        (7, None, {7}),
        (None, 8, {8}),
        (None, None, set()),
    ],
)
@pytest.mark.parametrize("without", [errno.EAFNOSUPPORT, errno.ENETUNREACH])
async def test_uplinks_are_the_interfaces_of_both_default_routes(
    answering: Callable[..., Answers],
    four: int | None,
    six: int | None,
    expected: set[int],
    without: int,
) -> None:
    """A node may lack the family, or such a route."""
    answering(
        *(
            without if number is None else [route(family, attributes=attribute(4, u32(number)))]
            for family, number in ((AF_INET, four), (AF_INET6, six))
        )
    )
    assert await NodeRoutes().uplinks() == expected


async def test_routes_by_an_interface_are_its_unicast_ones(
    answering: Callable[..., Answers],
) -> None:
    network = ipaddress.ip_address("198.18.0.0").packed
    kernel = answering(
        [
            route(AF_INET, 24, protocol=2, attributes=attribute(1, network)),
            route(AF_INET, 0),
            route(AF_INET, 32, kind=2, attributes=attribute(1, FOUR.packed)),
        ],
        [
            route(AF_INET6, 0, protocol=4),
            route(AF_INET6, 128, kind=7, attributes=attribute(1, SIX.packed)),
            route(AF_INET6, 128, attributes=attribute(1, SIX.packed)),
        ],
    )
    assert await NodeRoutes().routes_by(7) == [
        DeviceRoute(ipaddress.ip_network("198.18.0.0/24"), is_on_link=True),
        DeviceRoute(ipaddress.ip_network("0.0.0.0/0"), is_on_link=False),
        DeviceRoute(ipaddress.ip_network("::/0"), is_on_link=False),
        DeviceRoute(ipaddress.ip_network("fd00:18::1/128"), is_on_link=False),
    ]
    assert kernel.requests == [
        (GETROUTE, route(family, table=0, protocol=0, kind=0) + attribute(4, u32(7)), NLM_F_DUMP)
        for family in (AF_INET, AF_INET6)
    ]
    assert kernel.is_filtered == [True, True]


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EOPNOTSUPP, errno.EAFNOSUPPORT])
async def test_interface_that_is_gone_or_a_family_that_is_off_has_no_routes(
    answering: Callable[..., Answers], number: int
) -> None:
    answering([route(AF_INET)], number)
    default = DeviceRoute(ipaddress.ip_network("0.0.0.0/0"), is_on_link=False)
    assert await NodeRoutes().routes_by(7) == [default]


@pytest.mark.parametrize(("address", "family"), [(FOUR, AF_INET), (SIX, AF_INET6)])
async def test_port_of_a_bridge_is_behind_the_neighbour_s_link_address(
    answering: Callable[..., Answers], address: IPAddress, family: int
) -> None:
    kernel = answering(
        [neighbour(family, 5, REACHABLE, attribute(2, MAC))],
        [neighbour(AF_BRIDGE, 9, REACHABLE)],
    )
    assert await NodeRoutes().bridge_port_of(address, 5) == 9
    assert kernel.requests == [
        (GETNEIGH, neighbour(family, 5, 0, attribute(1, address.packed)), 0),
        (GETNEIGH, neighbour(AF_BRIDGE, 0, 0, attribute(2, MAC) + attribute(9, u32(5))), 0),
    ]


@pytest.mark.parametrize("state", [0x02, 0x04, 0x08, 0x10, 0x80])
async def test_neighbour_in_use_has_a_port(answering: Callable[..., Answers], state: int) -> None:
    answering(
        [neighbour(AF_INET, 5, state, attribute(2, MAC))], [neighbour(AF_BRIDGE, 9, REACHABLE)]
    )
    assert await NodeRoutes().bridge_port_of(FOUR, 5) == 9


@pytest.mark.parametrize(
    "responses",
    [
        [errno.ENOENT],
        [[neighbour(AF_INET, 5, INCOMPLETE, attribute(2, MAC))]],
        [[neighbour(AF_INET, 5, FAILED, attribute(2, MAC))]],
        [[neighbour(AF_INET, 5, REACHABLE)]],
        [[neighbour(AF_INET, 5, REACHABLE, attribute(2, MAC))], errno.ENOENT],
        [[neighbour(AF_INET, 5, REACHABLE, attribute(2, MAC))], errno.ENODEV],
    ],
    ids=["missing", "incomplete", "failed", "without an address", "no port", "no bridge"],
)
async def test_neighbour_that_is_not_resolved_has_no_port(
    answering: Callable[..., Answers], responses: list[list[bytes] | int]
) -> None:
    kernel = answering(*responses)
    assert await NodeRoutes().bridge_port_of(FOUR, 5) is None
    assert len(kernel.requests) == len(responses)


@pytest.mark.parametrize(("address", "family"), [(FOUR, AF_INET), (SIX, AF_INET6)])
async def test_neighbour_is_resolved_as_for_a_packet(
    answering: Callable[..., Answers], address: IPAddress, family: int
) -> None:
    kernel = answering([])
    await NodeRoutes().solicit(address, 7)
    body = neighbour(family, 7, 0, attribute(1, address.packed), flags=0x01)
    flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
    assert kernel.requests == [(NEWNEIGH, body, flags)]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EINVAL])
async def test_neighbour_of_an_interface_that_is_gone_is_not_resolved(
    answering: Callable[..., Answers], number: int
) -> None:
    answering(number)
    await NodeRoutes().solicit(FOUR, 7)
