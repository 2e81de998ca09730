"""Beside AWS' network policy agent: the order of programs on its host interfaces, its update, its
removal. It attaches clsact filters, one of each direction, whose TC_ACT_OK ends a chain."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab.lab import NODE_IPV4
from bpf import syscalls
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane import PORT as API_PORT
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import ISOLATION_READY, WEB, Workloads
from tests.networks import traffic, workload
from tests.networks.network import Network
from tests.networks.test_bursts import OPEN_SECONDS, PODS
from tests.networks.test_uninstall import interfaces
from tests.networks.traffic import Path, Watch

pytestmark = pytest.mark.kernel

FILTERS = ["handle_ingress", "handle_egress"]
"""On each interface, at its egress and its ingress: the agent names them as the pod sees them."""
_SETTLED_SECONDS = 5.0


@pytest.fixture(params=["enforce", "strict"])
def users(request: pytest.FixtureRequest, namespaces: Namespaces) -> Workloads:
    return namespaces(request.param)


def first_program(interface: str) -> str:
    """The name of the program that an interface runs first for what goes to the pod."""
    programs = syscalls.query_programs(socket.if_nametoindex(interface), syscalls.BPF_TCX_EGRESS)
    return syscalls.program_name(programs[0])


def reaches_node(pod: Json) -> bool:
    """Whether the pod's connection to its node gets replies: its gate has recorded the flow."""
    return traffic.dial(str(NODE_IPV4), API_PORT, traffic.netns_of(pod)) == ""


def displaced(podgate: Deployment, users: Workloads) -> dict[str, str]:
    """Pods whose gate is not the first program, or not in force, with the condition's message."""
    report = podgate.report()
    return {
        pod.name: one.message
        for pod in (report.pods if report else ())
        if pod.namespace == users.namespace
        for one in pod.conditions
        if one.type == ISOLATION_READY
        if one.status != "True" or "runs before the gate" in one.message
    }


def test_gates_run_first_and_the_agents_filters_stay(podgate: Deployment, users: Workloads) -> None:
    pods = workload.run(users)
    for interface in interfaces(podgate, users):
        assert traffic.filters(interface) == FILTERS, interface
        assert first_program(interface).startswith("gate_"), interface
    assert displaced(podgate, users) == {}
    assert reaches_node(pods["client"])


def test_update_of_the_agents_programs_opens_no_gate(
    network: Network,
    podgate: Deployment,
    users: Workloads,
    record_property: Callable[[str, object], None],
) -> None:
    """It removes its filters of all pods, and attaches the new ones; so does each restart after
    the node's copy of its programs was lost."""
    pods = workload.run(users)
    addresses = [one for name in ("web", "tcp") for one in traffic.addresses(pods[name])]
    watch = Watch(
        Path("node", False, addresses),
        Path("pod", True, addresses, traffic.netns_of(pods["client"])),
    )
    with watch.running():
        network.flush()
        network.restart(signal.SIGKILL)
    record_property("figures", watch.summary)
    assert watch.wrong == {"node": [], "pod": []}
    for interface in interfaces(podgate, users):
        assert traffic.filters(interface) == FILTERS, interface
    assert displaced(podgate, users) == {}
    assert workload.harm(users) == ""


def test_removed_agent_leaves_gates_closed(
    network: Network, podgate: Deployment, users: Workloads
) -> None:
    """Its filters are removed as its own removal of them does."""
    pods = workload.run(users)
    network.engine.stop()
    try:
        for interface in interfaces(podgate, users):
            for parent in ("egress", "ingress"):
                command = ["tc", "filter", "del", "dev", interface, parent, "pref", "1"]
                identity = ["handle", "0x1", "protocol", "all", "bpf"]
                subprocess.run([*command, *identity], check=True, capture_output=True, timeout=30)
            assert traffic.filters(interface) == []
        addresses = [one for name in ("web", "tcp") for one in traffic.addresses(pods[name])]
        client = traffic.netns_of(pods["client"])
        assert all(traffic.dial(one) for one in addresses)
        assert [traffic.dial(one, netns=client) for one in addresses] == [""] * len(addresses)
        assert workload.harm(users) == ""
    finally:
        network.engine.start()
        network.wait_until_ready()


@pytest.fixture
def filtering_node(enforcing_node: OneNode, podgate: Deployment) -> Iterator[OneNode]:
    """Gates are filters too, as before Linux 6.6, which most nodes of EKS have."""
    podgate.set_arguments(["--attach", "clsact"])
    yield enforcing_node
    podgate.set_arguments([])


def test_gates_that_are_filters_move_before_the_agents(
    network: Network,
    filtering_node: OneNode,
    podgate: Deployment,
    namespaces: Namespaces,
    record_property: Callable[[str, object], None],
) -> None:
    """The kernel runs the newest filter of a priority first: those of the agent, which it attaches
    when a pod starts, and again when its programs change."""
    users = namespaces("enforce")
    names = [f"web-{number}" for number in range(PODS)]
    with traffic.syns(network) as syns:
        for name in names:
            users.run(name, WEB, gates=(ISOLATION_READY,))
        users.until_isolated(*names)
        network.flush()
        network.restart()
        time.sleep(_SETTLED_SECONDS)
    record_property("figures", syns.summary)
    assert len(syns.targets) >= PODS
    assert syns.open_seconds < OPEN_SECONDS, syns.summary
    assert displaced(podgate, users) == {}
    assert reaches_node(users.pod(names[0]))
    for interface in interfaces(podgate, users):
        assert traffic.filters(interface) == FILTERS, interface
    assert users.restarts() == {}
