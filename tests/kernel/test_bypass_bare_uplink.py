"""An uplink without Ethernet header, such as WireGuard's, PPP's or a VPN's tun. tests/attacks
has what a router behind it sends back (topology tun-uplink)."""

import os
import socket

import pytest

from agent.gates.host_devices import programs_for
from agent.linux.rtnetlink import Link
from bpf import loader, pins
from bpf.verdicts import Mode
from tests.kernel import guarded, links, syns, traffic
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import programs

pytestmark = pytest.mark.kernel

_TUN_BYTES = 1 << 16


@pytest.mark.parametrize("version", [4, 6])
def test_host_still_talks_to_others_by_the_uplink(
    watched: PodState, loaded: loader.Loaded, installation: pins.Pins, version: int
) -> None:
    watched.set_mode(Mode.ENFORCE)
    other = syns.STRANGER[version]
    with (
        programs(loaded, installation) as devices,
        links.tun() as (name, descriptor),
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        links.ip(f"route add {other} dev {name}")
        devices.ensure_bare_devices({links.index_of(name)})
        sock.sendto(b"to-another", (other, guarded.UDP_PORT))
        sent = os.read(descriptor, _TUN_BYTES)
        while b"to-another" not in sent:  # the kernel's own, such as router solicitations
            sent = os.read(descriptor, _TUN_BYTES)


def test_agent_guards_each_device_without_ethernet() -> None:
    found = [
        Link(2, "wg0", kind="wireguard", is_ethernet=False),
        Link(3, "ppp0", kind="ppp", is_ethernet=False),
        Link(4, "vpn0", kind="tun", is_ethernet=False),
        Link(5, "mine0", kind="tun", is_ethernet=False),
        Link(6, "vxlan0", kind="vxlan"),
    ]
    needed = programs_for(found, gated={9}, enforced={9}, tuns={5})
    assert needed.bare_devices == {2, 3, 4, 5}
    assert needed.devices == {6}
    assert needed.tuns == {5}
