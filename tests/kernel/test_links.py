"""The dump of interfaces equals what pyroute2 decodes from the whole messages."""

import asyncio
import ipaddress
import socket
from typing import Any

import pyroute2
import pytest

from agent.lab import lab as labs
from agent.linux import netlink, pod_network, rtnetlink
from agent.linux.rtnetlink import Link
from tests.kernel import links as made
from tests.polling import wait_until

pytestmark = pytest.mark.kernel


_ARPHRD_ETHER, _TYPE_TAP = 1, 2


def read_whole() -> list[Link]:
    with pyroute2.IPRoute() as netlink:
        return [_decoded(message) for message in netlink.get_links()]


def _decoded(message: Any) -> Link:
    info = message.get_attr("IFLA_LINKINFO")
    kind: str | None = None
    data: Any = None
    if info is not None:
        kind, data = info.get_attr("IFLA_INFO_KIND"), info.get_attr("IFLA_INFO_DATA")
    port = data.get_attr("IFLA_VXLAN_PORT") if kind == "vxlan" else None
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        flags=message["flags"],
        kind=kind,
        peer=message.get_attr("IFLA_LINK"),
        peer_nsid=message.get_attr("IFLA_LINK_NETNSID"),
        master=message.get_attr("IFLA_MASTER"),
        udp_ports=frozenset({port} if port else ()),
        is_tap=kind == "tun" and data.get_attr("IFLA_TUN_TYPE") == _TYPE_TAP,
        is_ethernet=message["ifi_type"] == _ARPHRD_ETHER,
    )


def read_both() -> tuple[list[Link], list[Link]]:
    """As podgate reads the links, and as pyroute2 decodes them before and after that: the kernel
    sets the flags of a carrier some time later (net/core/link_watch.c)."""
    found: list[Link] = []
    whole: list[Link] = []

    def are_unchanged() -> bool:
        nonlocal found, whole
        whole = read_whole()
        found = asyncio.run(rtnetlink.read())
        return whole == read_whole()

    wait_until("links that do not change", are_unchanged)
    return found, whole


def test_each_kind_is_read_as_it_is_decoded(lab: labs.Lab) -> None:
    pods = [lab.add_pod("routed", 1), lab.add_pod("bridged", 2, bridged=True)]
    with (
        made.pair() as (inner, outer),
        made.macvlans() as (macvlan, _),
        made.tun() as (tun, _),
        made.vxlan(bytes((2, 0, 0, 0, 0, 1)), 4790, 7, "198.18.0.1"),
        made.made("tap-pg", "tuntap add tap-pg mode tap"),
    ):
        found, whole = read_both()
        assert found == whole
        by_name = {link.name: link for link in found}
        assert {link.index: link.name for link in found} == dict(socket.if_nameindex())

    routed, bridged = (by_name[pod.interface] for pod in pods)
    assert (routed.kind, routed.master, routed.is_up) == ("veth", None, True)
    assert routed.peer is not None
    assert routed.peer_nsid is not None
    assert bridged.master == by_name[labs.BRIDGE].index
    assert by_name[inner].peer == by_name[outer].index
    assert by_name[inner].peer_nsid is None
    assert by_name[macvlan].kind == "macvlan"
    assert (by_name[tun].kind, by_name[tun].is_tap) == ("tun", False)
    assert (by_name["tap-pg"].kind, by_name["tap-pg"].is_tap) == ("tun", True)
    assert by_name["vxlan4-pg"].udp_ports == {4790}
    assert by_name["lo"].is_loopback
    assert not by_name["tap-pg"].is_up


def test_more_links_than_one_answer_holds_are_all_read(lab: labs.Lab) -> None:
    commands = [f"link add many{number} type veth peer name many-{number}" for number in range(60)]
    try:
        made.ip(*commands)
        assert asyncio.run(rtnetlink.read()) == read_whole()
    finally:
        made.ip(*(f"link del many{number}" for number in range(60)))


def test_address_with_a_peer_is_the_pods_own(lab: labs.Lab) -> None:
    """A point-to-point interface has the address of its peer as well, which is another host's."""
    pod = lab.add_pod("one", 1)
    made.ip_inside(
        pod,
        "address add 198.18.9.1 peer 198.18.9.2/32 dev eth0",
        "address add fd00:18:9::1 peer fd00:18:9::2/128 dev eth0 nodad",
    )
    network = asyncio.run(pod_network.PodNetworkReader().read(pod.netns))
    own = {ipaddress.ip_address("198.18.9.1"), ipaddress.ip_address("fd00:18:9::1")}
    assert {address for address in network.addresses if not address.is_link_local} == {
        *pod.addresses,
        *own,
    }


def test_process_of_a_pod_cannot_answer_for_the_kernel(lab: labs.Lab) -> None:
    """With CAP_NET_ADMIN in its namespace it may send to any netlink socket there."""
    pod = lab.add_pod("one", 1)
    with netlink.opened(pod.netns) as ours:
        port = ours.getsockname()[0]
        address = (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        with pod.netns.socket(*address) as other:
            assert port not in (0, other.getsockname()[0])
            with pytest.raises(ConnectionRefusedError):
                other.sendto(bytes(16), (port, 0))
