"""Router advertisements, sent by a process of the host with a packet socket, give a pod as many
addresses as its kernel makes: it is gated at each of them."""

import ipaddress
import socket
import struct
import subprocess

import pytest

from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from tests import polling
from tests.kernel import enforcing, frames, links, traffic, wire
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_many_addresses import (
    DECLARED,
    LAYOUTS,
    PORT,
    assert_gated_at,
    kubelet,
    start_enforcing,
)

__all__ = ["kubelet"]

pytestmark = pytest.mark.kernel

ROUTER_ADVERTISEMENT, PREFIX_INFORMATION = 134, 3
ON_LINK_AND_AUTONOMOUS = 0xC0
LIFETIME_SECONDS = 3600
# One more than a kernel makes of them by default (sysctl max_addresses), with the pod's own.
PREFIXES = 16
NETWORK = ipaddress.IPv6Network("fd00:18:7::/48")


def accept_advertisements(pod: LabPod) -> None:
    """As the kernel's defaults are where the pod does not forward."""
    settings = {"accept_ra": 2, "autoconf": 1}
    script = "\n".join(
        f"echo {value} > /proc/sys/net/ipv6/conf/eth0/{name}" for name, value in settings.items()
    )
    subprocess.run(["nsenter", f"--net={pod.netns.path}", "sh", "-ec", script], check=True)


def advertise(pod: LabPod) -> str:
    """Advertise prefixes to the pod, until it has 16 IPv6 addresses. Returns the last one."""
    with pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
        inside.bind(("eth0", 0))
        mac = inside.getsockname()[4]
    group, router = frames.address("ff02::1"), frames.address("fe80::77")
    ends = frames.Ends(router, group, mac)
    times = (LIFETIME_SECONDS, LIFETIME_SECONDS, 0)
    with links.packet_socket(pod.interface) as sock:
        for number in range(PREFIXES):
            prefix = NETWORK.network_address + (number << 64)
            head = (PREFIX_INFORMATION, 4, 64, ON_LINK_AND_AUTONOMOUS)
            option = struct.pack("!BBBBIII", *head, *times) + prefix.packed
            message = frames.icmp(ends, ROUTER_ADVERTISEMENT, body=bytes(12) + option)
            packet = frames.ipv6(ends, frames.ICMPV6, message, hop_limit=255)
            wire.send(sock, frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet))
    found = polling.wait_until("16 addresses", lambda: all_of(pod))
    device = labs.BRIDGE if pod.is_bridged else pod.interface
    links.ip(f"route add {NETWORK} dev {device}")
    return str(max(address for address in found if address in NETWORK))


def all_of(pod: LabPod) -> list[ipaddress.IPv6Address]:
    """All IPv6 addresses of the pod's interface, once there are 16; until then none."""
    command = ["ip", "-6", "-o", "address", "show", "dev", "eth0"]
    output = subprocess.run(
        ["nsenter", f"--net={pod.netns.path}", *command],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = [ipaddress.IPv6Interface(line.split()[3]).ip for line in output.splitlines()]
    return found if len(found) == 16 else []


@LAYOUTS
def test_new_pod_is_gated_at_each_advertised_address(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab, is_bridged: bool
) -> None:
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    accept_advertisements(pod)
    last = advertise(pod)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        start_enforcing(operator, pod, kubelet)
        advertised = [address for address in all_of(pod) if address in NETWORK]
        assert len(advertised) >= 14
        assert_gated_at(last, kubelet)
        assert_gated_at(str(advertised[0]), kubelet)


def test_addresses_that_an_audit_pod_accepts_are_closed_when_it_enforces(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab
) -> None:
    pod = lab.add_pod("web", 1)
    accept_advertisements(pod)
    operator.write_manifest(pod, mode="audit", container=DECLARED)
    operator.start(*enforcing.AGENT_OPTIONS)
    operator.wait_for("the gate", lambda r: any(one.gates for one in r.pods))
    last = advertise(pod)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        start_enforcing(operator, pod, kubelet)
        assert_gated_at(last, kubelet)
