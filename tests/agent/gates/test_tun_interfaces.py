"""tun interfaces: routes show whether one carries traffic of other nodes."""

import ipaddress

import pytest

from agent.gates import tun_interfaces
from agent.linux.node_routes import DeviceRoute
from agent.linux.rtnetlink import Link

POD = ipaddress.ip_address("10.244.1.7")


def route(network: str, *, is_on_link: bool = False) -> DeviceRoute:
    return DeviceRoute(ipaddress.ip_network(network), is_on_link)


@pytest.mark.parametrize(
    "found",
    [
        route("10.244.0.0/16", is_on_link=True),  # flannel0, whose address is of all pods' network
        route("10.244.3.0/24"),  # another node's pods
        route("100.64.0.9/32"),  # another node
        route("fd00:244:3::/64"),
    ],
    ids=lambda found: str(found.network),
)
def test_route_to_pods_or_nodes_shows_that_it_forwards(found: DeviceRoute) -> None:
    assert tun_interfaces.forwarding_routes([found], {POD}) == [found]


@pytest.mark.parametrize(
    "found",
    [
        route("0.0.0.0/0"),
        route("128.0.0.0/1"),
        route("2000::/3"),
        route("10.8.0.0/24", is_on_link=True),
        route("fe80::/64", is_on_link=True),
        route("fe80::/64"),
        route("ff00::/8"),
    ],
    ids=lambda found: str(found.network),
)
def test_default_routes_and_neighbours_do_not(found: DeviceRoute) -> None:
    assert tun_interfaces.forwarding_routes([found], {POD}) == []


def test_tap_of_a_virtual_machine_on_a_bridge_is_none() -> None:
    plain, port = Link(2, "tun2", kind="tun"), Link(3, "tap3", kind="tun", master=4)
    assert tun_interfaces.find_tuns([plain, port, Link(4, "br4", kind="bridge")]) == [plain]


@pytest.mark.parametrize(
    ("patterns", "is_named"),
    [((), False), (("tailscale0",), True), (("wg*", "tail*"), True), (("tailscale",), False)],
)
def test_operator_names_interfaces(patterns: tuple[str, ...], is_named: bool) -> None:
    assert tun_interfaces.is_named(Link(2, "tailscale0", kind="tun"), patterns) is is_named
