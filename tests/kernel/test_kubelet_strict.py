"""In strict the kubelet restarts while the agent is killed or stopped: each probe succeeds, and no
other host process reaches a pod, however old the heartbeat is."""

import os
import signal
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import Launch
from bpf import pins
from tests.conftest import fresh_lab
from tests.kernel import cgroups, fleet, nodeclient, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import Node, strict_node
from tests.kernel.test_standin import beat_long_ago

pytestmark = pytest.mark.kernel

PROBES = (fleet.http_probe(fleet.HTTP), fleet.tcp_probe(fleet.TCP))
RESTARTS = 5


@pytest.fixture
def node(
    launch: Launch, installed: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    offers.need_netns_cookie()
    with (
        fresh_lab() as lab,
        strict_node(lab, tmp_path_factory.mktemp("strict"), launch, installed) as made,
    ):
        for number, bridged in enumerate((False, True), 1):
            name = "bridged" if bridged else "routed"
            ports = (fleet.HTTP, fleet.TCP)
            made.add(name, number, ports=ports, probes=PROBES, mode="strict", bridged=bridged)
        made.start()
        yield made


@pytest.fixture
def targets(node: Node) -> list[str]:
    kinds = (("http", fleet.HTTP), ("tcp", fleet.TCP))
    return [
        t for pod in node.pods.values() for kind, port in kinds for t in pod.targets(kind, port)
    ]


@pytest.fixture
def intruder(node: Node) -> Iterator[NodeClient]:
    with cgroups.cgroup() as group, nodeclient.node_client(group) as made:
        yield made


def make_again(group: Cgroup) -> None:
    before = group.id
    cgroups.remove(group)
    group.directory.mkdir()
    assert group.id != before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_every_probe_succeeds_and_no_other_process_reaches_a_pod(
    node: Node, targets: list[str], intruder: NodeClient, number: signal.Signals
) -> None:
    healthy = dict.fromkeys(targets, nodeclient.OK)
    with nodeclient.node_client(node.kubelet) as kubelet:
        assert kubelet.probe(targets) == healthy
    if number is signal.SIGKILL:
        node.operator.stop(number)
    else:
        os.kill(node.operator.pid, number)
    try:
        for _ in range(RESTARTS):
            make_again(node.kubelet)
            with nodeclient.node_client(node.kubelet) as kubelet:
                assert kubelet.probe(targets) == healthy
                beat_long_ago(node.operator.bpffs)
                with node.watched() as seen:
                    assert kubelet.probe(targets) == healthy
                    if number is signal.SIGSTOP:
                        # The relay outlives the agent's hang, so strict does.
                        assert seen() == []
                assert nodeclient.OK not in intruder.probe(targets).values()
    finally:
        if number is signal.SIGSTOP:
            os.kill(node.operator.pid, signal.SIGCONT)
    if number is signal.SIGKILL:
        node.start()
    node.settle()
    with nodeclient.node_client(node.kubelet) as kubelet:
        assert kubelet.probe(targets) == healthy
