"""What other nodes send is the network's, also what they forward for a process of this node."""

import socket
from collections.abc import Iterator

import pytest

from agent.lab import attempts
from agent.lab import lab as labs
from bpf.gates import Gates
from tests.kernel import conversations, links, traffic
from tests.kernel.test_untouched import enforcing_by

pytestmark = pytest.mark.kernel

NODE_PORT = 30080
PORT = conversations.TCP_PORT
VERSIONS = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def other(lab: labs.Lab) -> labs.LabPod:
    """Another node: it forwards."""
    made = lab.add_pod("other", 9)
    links.let_forward(made)
    return made


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


@VERSIONS
def test_node_port_of_another_node_leads_back_as_that_node_s_traffic(
    other: labs.LabPod, web: labs.LabPod, version: int
) -> None:
    """A known bypass (docs/security.md), as kube-proxy and a load balancer make it."""
    own, target = traffic.address(other, version), traffic.address(web, version)
    name, to = ("ip", f"{target}:{PORT}") if version == 4 else ("ip6", f"[{target}]:{PORT}")
    body = (
        "chain translated { type nat hook prerouting priority -100; "
        f"{name} daddr {own} tcp dport {NODE_PORT} dnat to {to}; }}\n"
        "chain masqueraded { type nat hook postrouting priority 100; ct status dnat masquerade; }\n"
    )
    with links.table_inside(other, name, body):
        with socket.socket(family(version)) as sock:
            assert connect(sock, target, PORT) != "connects"
        with socket.socket(family(version)) as sock:
            assert connect(sock, own, NODE_PORT) == "connects"
