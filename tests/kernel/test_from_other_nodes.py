"""What processes of other nodes send is the network's; what they send back: test_hairpins.py."""

import socket
from collections.abc import Iterator

import pytest

from agent.lab import attempts
from agent.lab import lab as labs
from bpf.gates import Gates
from tests.kernel import conversations, traffic
from tests.kernel.test_untouched import enforcing_by

pytestmark = pytest.mark.kernel

PORT = conversations.TCP_PORT
VERSIONS = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def other(lab: labs.Lab) -> labs.LabPod:
    """Another node."""
    return lab.add_pod("other", 9)


@pytest.fixture
def web(lab: labs.Lab, gates: Gates) -> Iterator[labs.LabPod]:
    """An enforced pod of this node."""
    pod = lab.add_pod("web", 1)
    enforcing_by(gates)(pod)
    with conversations.served_by(pod.open_socket):
        yield pod


def connect(sock: socket.socket, address: str, port: int) -> str:
    return attempts.connect(sock, address, port, traffic.LIMIT_SECONDS)


def family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


@VERSIONS
def test_processes_of_another_node_reach_pods(
    other: labs.LabPod, web: labs.LabPod, version: int
) -> None:
    with other.open_socket(family(version), socket.SOCK_STREAM) as sock:
        assert connect(sock, traffic.address(web, version), PORT) == "connects"
