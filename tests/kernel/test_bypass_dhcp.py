"""A process with CAP_NET_RAW answers a pod as its DHCP server would."""

import time

import pytest

from bpf import loader
from bpf.replies import GROUP_LIFETIME_NS, ReplyFlow
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, links, traffic, wire
from tests.kernel.guarded import PodState
from tests.kernel.test_replies import fill

pytestmark = pytest.mark.kernel

DHCP_SERVER, DHCP_CLIENT = 67, 68


@pytest.mark.usefixtures("attached_hooks")
def test_answer_of_dhcp_that_a_process_writes_passes_for_ten_seconds(
    watched: PodState, loaded: loader.Loaded
) -> None:
    """A pod renews its address from its server, whose daemon answers with a packet socket. Any
    process with one may answer in that name, and does not prolong the time."""
    server = frames.address(traffic.NODE[4])
    watched.set_mode(Mode.ENFORCE)
    for pod, age_ns in ((watched.pod, GROUP_LIFETIME_NS + 10**9), (watched.neighbour, 10**9)):
        own = frames.address(pod.ipv4)
        flow = ReplyFlow(frames.UDP, own, DHCP_CLIENT, server, DHCP_SERVER)
        fill(loaded, pod, flow, time.monotonic_ns() - age_ns)
        ends = frames.Ends(server, own, watched.mac, source_port=DHCP_SERVER, port=DHCP_CLIENT)
        with links.packet_socket(pod.interface) as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, b"acknowledged")))
    watched.arrived()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}
    assert watched.moved_at_neighbour() == {(Verdict.PASS, Reason.REPLY): 1}
