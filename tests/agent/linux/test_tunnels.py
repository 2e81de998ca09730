"""Ports on which the kernel decapsulates: of interfaces, and of listeners without one."""

import errno
import struct
import sys

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


@pytest.mark.parametrize("number", range(1, 20))
def test_interface_of_another_kind_has_no_port(number: int) -> None:
    port = attribute(number, (6635).to_bytes(2, "big"))
    for kind in ("vlan", "tun", ""):
        assert tunnel(kind, port).udp_ports == frozenset()


@pytest.mark.parametrize(
    ("kind", "data", "is_tap"),
    [
        ("macvtap", b"", True),
        # IFLA_TUN_TYPE: IFF_TUN and IFF_TAP.
        ("tun", attribute(3, b"\1"), False),
        ("tun", attribute(3, b"\2"), True),
        ("tun", b"", False),
        ("macvlan", attribute(3, b"\2"), False),
    ],
)
def test_tap_is_an_interface_of_a_process_with_ethernet_frames(
    kind: str, data: bytes, is_tap: bool
) -> None:
    assert tunnel(kind, data).is_tap is is_tap


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


class _L2tp:
    """Two tunnels: one of a process, with a session of PPP or none, and one of root's interface."""

    def __init__(self, family: str) -> None:
        if family != "l2tp":
            raise OSError(errno.ENOENT, "no such family")

    def close(self) -> None:
        pass

    def dump(self, command: int) -> list[dict[int, bytes]]:
        def packed(number: int, size: int) -> bytes:
            return number.to_bytes(size, sys.byteorder)

        if command == 4:
            return [
                {9: packed(1, 4), 2: packed(0, 2), 26: packed(8125, 2)},
                {9: packed(2, 4), 2: packed(0, 2), 26: packed(1701, 2)},
                {9: packed(3, 4), 2: packed(1, 2)},
            ]
        return [{9: packed(1, 4)}, {9: packed(2, 4), 8: b"l2tpeth0\0"}]


@pytest.mark.parametrize(
    ("has_ppp", "ports"), [(False, {1701}), (True, {1701, 8125})], ids=["no-ppp", "ppp"]
)
def test_l2tp_tunnels_of_processes_do_not_count(
    monkeypatch: pytest.MonkeyPatch, has_ppp: bool, ports: set[int]
) -> None:
    """Otherwise a process could close a port of the node to UDP, and with nine of them all other
    tunnels would lose their guard."""
    monkeypatch.setattr(udp_listeners, "GenericSocket", _L2tp)
    assert udp_listeners.read(has_ppp=has_ppp) == TunnelPorts(frozenset(ports), has_any=True)
