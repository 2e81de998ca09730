"""Ports on which the kernel decapsulates: of interfaces, and of listeners without one."""

import errno
import struct

import pytest

from agent.linux import rtnetlink, udp_listeners
from agent.linux.rtnetlink import Link
from agent.linux.tunnels import TunnelPorts, find_tunnels


class _Message(dict[str, int]):
    """A link's message as pyroute2 decodes it."""

    def __init__(self, kind: str, data: object) -> None:
        super().__init__(index=7, flags=1, ifi_type=0xFFFE)
        self._attributes = {"IFLA_IFNAME": "tunnel7", "IFLA_LINKINFO": self}
        self._info = {"IFLA_INFO_KIND": kind, "IFLA_INFO_DATA": data}

    def get_attr(self, name: str) -> object:
        return self._attributes.get(name) or self._info.get(name)


def attribute(type_: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), type_) + value + bytes(-len(value) % 4)


def dumped(*attributes: bytes, kind: int = 0x20) -> bytes:
    body = struct.pack("=BBH", 1, 1, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


def test_bareudp_shows_its_port_in_attributes_that_pyroute2_does_not_decode() -> None:
    data = attribute(2, b"\x08\x00") + attribute(1, (6635).to_bytes(2, "big"))
    link = rtnetlink.of_message(_Message("bareudp", data.hex(":")))
    assert link.udp_ports == {6635}
    assert not link.is_ethernet


def test_gtp_has_the_ports_of_its_protocol() -> None:
    assert rtnetlink.of_message(_Message("gtp", None)).udp_ports == {2152, 3386}


def test_listeners_without_an_interface_are_protected_too() -> None:
    link = Link(2, "vxlan2", kind="vxlan", udp_ports=frozenset({8472}))
    expected = TunnelPorts(frozenset({8472, 5555}), has_any=True)
    listeners = TunnelPorts(frozenset({5555}), has_any=True)
    assert find_tunnels([link], listeners) == expected


def test_tunnel_without_an_interface_or_a_port_is_one() -> None:
    listeners = TunnelPorts(frozenset(), has_any=True)
    assert find_tunnels([], listeners) == listeners


def test_ports_are_read_from_each_message_of_a_dump() -> None:
    data = b"".join(
        dumped(attribute(2, b"\x02"), attribute(1, port.to_bytes(2, "big")))
        for port in (5555, 1701)
    )
    found = list(udp_listeners.values(data, 1))
    assert [int.from_bytes(value, "big") for value in found] == [5555, 1701]


def test_end_of_a_dump_is_no_error() -> None:
    with pytest.raises(EOFError):
        list(udp_listeners.values(struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0), 1))
    with pytest.raises(FileNotFoundError):
        list(udp_listeners.values(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -errno.ENOENT), 1))


def test_a_kernel_without_such_listeners_has_none() -> None:
    assert udp_listeners.read() == TunnelPorts(frozenset(), has_any=False)
