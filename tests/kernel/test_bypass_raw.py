"""What a process writes header by header does not count as the kernel's, nor as part of a flow:
an attacker with raw and packet sockets ends a pod's connections, takes its traffic elsewhere, and
sends packets in the name of the pod's peers.

Each attempt is repeated with the gate off and must reach the pod.
"""

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog.testing

from agent.gates.worker import record_raw_sockets
from agent.lab import lab as labs
from agent.logs import Event
from bpf import abi, loader, map_specs
from bpf.gates import Gates
from bpf.raw_sockets import OldRawSockets
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, offers, traffic
from tests.kernel.guarded import PodState

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("attached_hooks")]

OSPF = 89
SO_COOKIE = 57


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates) -> Iterator[PodState]:
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


@pytest.mark.parametrize("version", [4, 6])
def test_a_rule_admits_what_a_raw_socket_sends(lab: labs.Lab, gates: Gates, version: int) -> None:
    pod, neighbour = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
    rule = Rule(SourceKind.ANY, OSPF)
    with (
        guarded.guarded(gates, pod, neighbour, rule) as watched,
        socket.socket(traffic.family(version), socket.SOCK_RAW, OSPF) as sock,
    ):
        watched.set_mode(Mode.ENFORCE)
        sock.sendto(b"hello-from-ospf", (traffic.address(pod, version), 0))
        assert any(b"hello-from-ospf" in frame for frame in watched.arrived())


_HOARDERS = 4
"""A process may have 20,000 descriptors here."""

_HOARD = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = [socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) for _ in range(int(sys.argv[1]))]
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _hoarding(count: int) -> Iterator[None]:
    """A process with as many raw sockets."""
    arguments = [sys.executable, "-c", _HOARD, str(count)]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield


def test_raw_sockets_have_no_limit(lab: labs.Lab, watched: PodState) -> None:
    """Otherwise one process could leave none for others, iptables and daemons of
    routing protocols included. What the last one sends is still a process's."""
    watched.set_mode(Mode.ENFORCE)
    with contextlib.ExitStack() as stack:
        for _ in range(_HOARDERS):
            stack.enter_context(_hoarding(abi.MAX_OLD_RAW_SOCKETS // _HOARDERS + 100))
        sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, frames.ICMP))
        destination = watched.pod.ipv4
        ends = frames.Ends(frames.address(traffic.NODE[4]), frames.address(destination), b"")
        sock.sendto(frames.icmp(ends, 3, 1), (destination, 0))
        watched.arrived()
    assert watched.moved() == {(Verdict.DROP, Reason.NODE): 1}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_raw_sockets_from_before_the_hooks_are_recorded(
    lab: labs.Lab, loaded: loader.Loaded, family: int
) -> None:
    """Where the kernel lists them; elsewhere they are reported as unknown."""
    is_listed = offers.lists_raw_sockets()
    with socket.socket(family, socket.SOCK_RAW, OSPF) as sock:
        cookie = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
        loaded.map(map_specs.OLD_RAW_SOCKETS).delete(struct.pack("=Q", cookie))
        with structlog.testing.capture_logs() as lines:
            record_raw_sockets(loaded)
        assert (cookie in OldRawSockets(loaded).cookies()) is is_listed
        reported = any(line["event"] == Event.RAW_SOCKETS_UNKNOWN for line in lines)
        assert reported is not is_listed
    assert cookie not in OldRawSockets(loaded).cookies()
