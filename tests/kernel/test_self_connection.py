"""A connection from inside the pod to a port at which nothing listens is never one to itself."""

import errno
import json
import subprocess
import sys

import pytest

from agent.lab.lab import Lab, LabPod
from agent.relay.dialling import dial
from agent.relay.messages import RelayTargetSpec
from agent.relay.targets import RelayTarget

pytestmark = pytest.mark.kernel

PORT = 8080


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    """The kernel has one port to choose from, and takes each other one once in 28,000 times."""
    made = lab.add_pod("web", 1)
    made.netns.set_sysctl("ipv4/ip_local_port_range", f"{PORT} {PORT}")
    return made


def test_tcp_probe_of_a_closed_port_fails(pod: LabPod) -> None:
    command = [sys.executable, "-m", "agent", "probe", "--netns", pod.netns.path]
    ran = subprocess.run(
        [*command, "--output", "json", "tcp", str(PORT)], capture_output=True, text=True
    )
    assert json.loads(ran.stdout)["result"] == "failure", ran
    assert "connection refused" in ran.stdout


@pytest.mark.parametrize("version", [4, 6])
def test_dial_of_a_closed_port_fails(pod: LabPod, version: int) -> None:
    netns = pod.netns
    address = pod.ipv4 if version == 4 else pod.ipv6
    spec = RelayTargetSpec(
        "web", netns.path, netns.device, netns.inode, address, ((PORT, PORT),), (PORT,)
    )
    for _ in range(3):  # the port is free again after each
        sock, result = dial(RelayTarget(spec, pod.addresses[0]), PORT)
        sock.close()
        assert result == errno.ECONNREFUSED
