"""What a process writes to a tun of the host in the name of others belongs to no flow of a pod, and
answers of those behind the tun do.

Each packet is shown to pass without the program at the tun.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, syns, traffic
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import Way, end_by, marked, programs, tun_way

pytestmark = pytest.mark.kernel

BEHIND = {4: "198.18.77.7", 6: "fd00:18:77::7"}
"""The node reaches it by the tun."""

SERVER_PORT = 20000


def _datagram(ends: frames.Ends) -> bytes:
    return frames.packet(ends, frames.UDP, frames.udp(ends, b"answer"))


def _unreachable(ends: frames.Ends) -> bytes:
    type_, protocol = (3, frames.ICMP) if ends.family == 4 else (1, frames.ICMPV6)
    return frames.packet(ends, protocol, frames.icmp(ends, type_))


# What belongs to a flow of the pod, or claims to.
ANSWERS: dict[str, Callable[[frames.Ends], bytes]] = {
    "data": lambda ends: frames.segment(ends, frames.ACK | frames.PSH, data=b"data"),
    "syn-ack": lambda ends: frames.segment(ends, frames.SYN | frames.ACK),
    "bare ack": lambda ends: frames.segment(ends, frames.ACK),
    "rst": lambda ends: frames.segment(ends, frames.RST),
    "reply": _datagram,
    "icmp error": _unreachable,
}


@contextlib.contextmanager
def enforced(
    watched: PodState, loaded: loader.Loaded, installation: pins.Pins, *, has_program: bool
) -> Iterator[Way]:
    """A tun that counts as the host's, with a route to BEHIND, and the pod's gate."""
    with programs(loaded, installation) as devices, tun_way() as by, marked(loaded, by.interface):
        for address in BEHIND.values():
            links.ip(f"route add {address} dev {by.interface}")
        if watched.pod.is_bridged:
            devices.ensure_bridges({links.index_of(labs.BRIDGE)})
        if has_program:
            devices.ensure_spoofed({links.index_of(by.interface)})
        watched.set_mode(Mode.ENFORCE)
        yield by


def send_question(watched: PodState, peer: str, version: int) -> None:
    """By a datagram to `peer`, from the port of the answers."""
    with watched.pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as sock:
        sock.bind(("", guarded.TCP_PORT))
        sock.sendto(b"question", (peer, SERVER_PORT))


def answered(watched: PodState, by: Way, source: str) -> dict[str, bool]:
    """Which answers reach the pod."""
    version = 6 if ":" in source else 4
    send_question(watched, source, version)
    pod = traffic.address(watched.pod, version)
    ends = frames.Ends(frames.address(source), frames.address(pod), by.mac, SERVER_PORT)
    sent = {name: write(ends) for name, write in ANSWERS.items()}
    for frame in sent.values():
        by.send(frame)
    arrived = watched.arrived(end_by(by, ends), with_control=True)
    transport = 14 + (20 if version == 4 else 40)
    return {
        name: any(frame[transport:] in each for each in arrived) for name, frame in sent.items()
    }


@pytest.mark.parametrize("version", [4, 6])
def test_answers_of_a_host_behind_the_tun_pass(
    watched: PodState, loaded: loader.Loaded, installation: pins.Pins, version: int
) -> None:
    with enforced(watched, loaded, installation, has_program=True) as by:
        assert answered(watched, by, BEHIND[version]) == dict.fromkeys(ANSWERS, True)
        assert not any(verdict is Verdict.DROP for verdict, _ in watched.moved())


# Not from the node's IPv4 address: the kernel takes no packet from one of its own.
@pytest.mark.parametrize("source", [*syns.STRANGER.values(), traffic.NODE[6], "pod-4", "pod-6"])
def test_answers_in_the_name_of_a_host_elsewhere_are_rejected(
    watched: PodState, loaded: loader.Loaded, installation: pins.Pins, source: str
) -> None:
    if source.startswith("pod"):
        source = traffic.address(watched.neighbour, int(source[-1]))
    with enforced(watched, loaded, installation, has_program=False) as by:
        assert answered(watched, by, source) == dict.fromkeys(ANSWERS, True)
    with enforced(watched, loaded, installation, has_program=True) as by:
        assert answered(watched, by, source) == dict.fromkeys(ANSWERS, False)
        assert watched.moved() == {(Verdict.DROP, Reason.NODE): len(ANSWERS)}
    assert watched.moved_at_neighbour() == {}
