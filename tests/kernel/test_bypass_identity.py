"""A socket belongs to the cgroup of its creator, whichever process uses it or moves."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf.gates import Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import cgroups, guarded, syns, traffic
from tests.kernel.guarded import PodState

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
NODE_DROPPED = (Verdict.DROP, Reason.NODE)

# Starts to connect: with the socket that is its standard input; with one of its own; or with one
# that it creates before it is moved to another cgroup.
BY_GIVEN = """
import socket, sys
socket.socket(fileno=0).connect_ex((sys.argv[1], int(sys.argv[2])))
"""
BY_OWN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
if "wait" in sys.argv:
    print("made", flush=True)
    sys.stdin.readline()
sock.connect_ex((sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
def group(isolated: None) -> Iterator[cgroups.Cgroup]:
    """The cgroup whose sockets a rule admits."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def watched(lab: labs.Lab, gates: Gates, group: cgroups.Cgroup) -> Iterator[PodState]:
    rule = Rule(SourceKind.CGROUP, cgroup=group.id)
    pods = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
    with guarded.guarded(gates, *pods, rule) as made:
        made.set_mode(Mode.ENFORCE)
        yield made


def connecting(program: str, watched: PodState, version: int) -> list[str]:
    address = traffic.address(watched.pod, version)
    return [sys.executable, "-c", program, address, str(guarded.TCP_PORT)]


@VERSIONS
def test_socket_of_an_admitted_cgroup_connects(
    watched: PodState, group: cgroups.Cgroup, version: int
) -> None:
    assert group.run(connecting(BY_OWN, watched, version)).returncode == 0
    assert watched.arrived()


@VERSIONS
def test_socket_passed_from_another_cgroup_does_not_connect(
    watched: PodState, group: cgroups.Cgroup, version: int
) -> None:
    with syns.stream(traffic.family(version)) as sock:
        command = connecting(BY_GIVEN, watched, version)
        with group.popen(command, stdin=sock.fileno()) as process:
            assert process.wait(polling.PATIENCE_SECONDS) == 0
        assert watched.arrived() == []
    assert watched.moved().keys() == {NODE_DROPPED}


@VERSIONS
def test_socket_created_before_its_process_moved_does_not_connect(
    watched: PodState, group: cgroups.Cgroup, version: int
) -> None:
    command = [*connecting(BY_OWN, watched, version), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        group.add(process.pid)
        process.communicate(b"go on\n", timeout=polling.PATIENCE_SECONDS)
    assert watched.arrived() == []
    assert watched.moved().keys() == {NODE_DROPPED}


@VERSIONS
def test_retransmitted_segment_still_counts_as_of_the_host(watched: PodState, version: int) -> None:
    """By a timer, in whatever task that interrupted."""
    with syns.stream(traffic.family(version)) as sock:
        sock.connect_ex((traffic.address(watched.pod, version), guarded.TCP_PORT))
        dropped = 0

        def is_retransmitted() -> bool:
            nonlocal dropped
            moved = watched.moved()
            assert moved.keys() <= {NODE_DROPPED}
            dropped += moved.get(NODE_DROPPED, 0)
            return dropped >= 2

        polling.wait_until("a second drop", is_retransmitted)
        assert watched.arrived() == []
