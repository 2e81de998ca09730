"""Ports on which the kernel decapsulates: of interfaces, and of listeners without one."""

import struct

import pytest

from agent.linux import rtnetlink, udp_listeners
from agent.linux.rtnetlink import Link
from agent.linux.tunnels import TunnelPorts, find_tunnels
from bpf.netlink import attribute, encode

# Attributes of RTM_NEWLINK (include/uapi/linux/if_link.h).
_IFNAME, _LINKINFO, _INFO_KIND, _INFO_DATA = 3, 18, 1, 2
_NEWLINK = 16


def tunnel(kind: str, *data: bytes) -> Link:
    """An interface as the kernel describes it, with attributes of its kind."""
    info = attribute(_INFO_KIND, kind.encode() + b"\0") + attribute(_INFO_DATA, b"".join(data))
    header = struct.pack("=BxHiII", 0, 0xFFFE, 7, 1, 0)
    body = header + attribute(_IFNAME, b"tunnel7\0") + attribute(_LINKINFO, info)
    return rtnetlink.parse(encode(_NEWLINK, 0, body))


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("vxlan", 15), ("geneve", 5), ("bareudp", 1)),
        *((kind, 18) for kind in ("ipip", "sit", "ip6tnl")),
        *((kind, 17) for kind in ("gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan")),
    ],
)
def test_port_of_a_tunnel_is_read_from_its_kinds_attribute(kind: str, number: int) -> None:
    port = attribute(number, (6635).to_bytes(2, "big"))
    link = tunnel(kind, attribute(number + 1, b"\x08\x00"), port)
    assert (link.name, link.kind) == ("tunnel7", kind)
    assert link.udp_ports == {6635}
    assert not link.is_ethernet
    # FOU and GUE are off.
    assert tunnel(kind, attribute(number, bytes(2))).udp_ports == frozenset()
    assert tunnel(kind).udp_ports == frozenset()


def test_gtp_has_the_ports_of_its_protocol() -> None:
    assert tunnel("gtp").udp_ports == {2152, 3386}


def test_interface_without_a_kind_has_no_port() -> None:
    header = struct.pack("=BxHiII", 0, 1, 2, 1, 0)
    link = rtnetlink.parse(encode(_NEWLINK, 0, header + attribute(_IFNAME, b"eth0\0")))
    assert link == Link(2, "eth0", flags=1)


def test_listeners_without_an_interface_are_protected_too() -> None:
    link = Link(2, "vxlan2", kind="vxlan", udp_ports=frozenset({8472}))
    expected = TunnelPorts(frozenset({8472, 5555}), has_any=True)
    listeners = TunnelPorts(frozenset({5555}), has_any=True)
    assert find_tunnels([link], listeners) == expected


def test_tunnel_without_an_interface_or_a_port_is_one() -> None:
    listeners = TunnelPorts(frozenset(), has_any=True)
    assert find_tunnels([], listeners) == listeners


def test_a_kernel_without_such_listeners_has_none() -> None:
    assert udp_listeners.read() == TunnelPorts(frozenset(), has_any=False)
