"""Datagrams that the node puts together for conntrack, and takes apart again in the slow way."""

import socket

import pytest

from agent.lab import lab as labs
from bpf.gates import Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import guarded, links, traffic, tunnelled

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])


@VERSIONS
def test_forwarded_fragments_of_the_slow_path_pass(
    lab: labs.Lab, gates: Gates, version: int
) -> None:
    """Over IPv6 the kernel forgets how they came in, and a gate sees them as its own.

    A tunnel in the bridge wants room for its headers, which routed fragments do not have."""
    pod, client = lab.add_pod("web", 1, bridged=True), lab.add_pod("client", 2)
    tracking = "chain c { type filter hook forward priority 0; ct state new accept; }"
    with (
        guarded.guarded(gates, pod, client) as made,
        links.table("inet", tracking),
        links.vxlan(tunnelled.MAC, tunnelled.VXLAN_PORT, tunnelled.NETWORK, traffic.NODE[4]),
        client.open_socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        links.ip(f"link set vxlan4-pg master {labs.BRIDGE}")
        made.set_mode(Mode.ENFORCE)
        sock.sendto(bytes(5000), (traffic.address(pod, version), guarded.UDP_PORT))
        assert len(made.arrived()) == 4
        forgotten = {(Verdict.PASS, Reason.FORWARDED)} if version == 6 else set()
        assert made.moved().keys() == forgotten
