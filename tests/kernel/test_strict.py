"""In strict a kubelet's probes have the same results as direct ones, and no packet of the host
reaches a pod.

A stand-in kubelet probes a hundred pods, first in enforce, where its own packets go to the pods,
and then in strict, where a relay proxies each connection. Results and classes of errors must be
equal.
"""

import pathlib
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import Launch, condition_of
from agent.lab.lab import LabPod
from agent.pods.conditions import TRUE
from bpf import pins
from tests.conftest import fresh_lab
from tests.kernel import fleet, links, nodeclient
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import FleetPod, Node, strict_node

pytestmark = pytest.mark.kernel

WHOLE, BARE, BRIDGED = 90, 8, 2
HELD_EACH = 2
USUAL_KINDS = (
    ("http", fleet.HTTP),
    ("https", fleet.HTTPS),
    ("grpc", fleet.GRPC),
    ("tcp", fleet.TCP),
)
# A pod with an http probe admits the kubelet to every port.
WHOLE_PROBES = (fleet.http_probe(fleet.HTTP), fleet.grpc_probe(fleet.GRPC))
BARE_PORTS = (fleet.GRPC, fleet.TCP)
BARE_PROBES = (fleet.grpc_probe(fleet.GRPC), fleet.tcp_probe(fleet.TCP))

# The result of each kind of probe at each port.
AWKWARD = {
    ("http", fleet.REDIRECTS): nodeclient.OK,
    ("http", fleet.ILL): "status 500",
    ("http", fleet.CLOSED): nodeclient.REFUSED,
    ("tcp", fleet.CLOSED): nodeclient.REFUSED,
    ("grpc", fleet.CLOSED): "UNAVAILABLE: ECONNREFUSED",
    ("http", fleet.FULL): nodeclient.UNANSWERED,
    ("tcp", fleet.FULL): nodeclient.UNANSWERED,
    ("grpc", fleet.FULL): "DEADLINE_EXCEEDED",
    ("http", fleet.RESETS): nodeclient.RESET,
    ("tcp", fleet.RESETS): nodeclient.OK,
    ("http", fleet.SILENT): nodeclient.SILENT,
    ("grpc", fleet.SILENT): "DEADLINE_EXCEEDED",
    ("https", fleet.HTTP): nodeclient.SILENT,
    ("https", fleet.RESETS): nodeclient.RESET,
    ("client-ends", fleet.CLIENT_ENDS): nodeclient.OK,
    ("server-ends", fleet.SERVER_ENDS): nodeclient.ENDED,
    ("bulk", fleet.BULK): nodeclient.OK,
}


@pytest.fixture(scope="module")
def node(
    launch: Launch, installed: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """A hundred pods: most with every kind of server, some that declare bare ports, some on a
    bridge; and one with all awkward kinds."""
    folder: pathlib.Path = tmp_path_factory.mktemp("strict")
    with fresh_lab() as lab, strict_node(lab, folder, launch, installed) as made:
        made.add("awkward", 1, ports=(*fleet.USUAL, *fleet.AWKWARD), probes=WHOLE_PROBES)
        for number in range(2, WHOLE + 1):
            made.add(f"whole{number}", number, ports=fleet.USUAL, probes=WHOLE_PROBES)
        for number in range(BARE):
            made.add(f"bare{number}", 100 + number, ports=BARE_PORTS, probes=BARE_PROBES)
        for number in range(BRIDGED):
            made.add(
                f"bridged{number}",
                120 + number,
                ports=fleet.USUAL,
                probes=WHOLE_PROBES,
                bridged=True,
            )
        made.start()
        yield made


@pytest.fixture
def kubelet(node: Node) -> Iterator[NodeClient]:
    with nodeclient.node_client(node.kubelet) as made:
        yield made


def usual_targets(node: Node) -> list[str]:
    found = []
    for pod in node.pods.values():
        is_bare = pod.probes == BARE_PROBES
        for kind, port in USUAL_KINDS:
            if not is_bare or port in BARE_PORTS:
                found += pod.targets(kind, port)
    return found


def awkward_targets(pod: FleetPod) -> dict[str, str]:
    expected = {
        target: result
        for (kind, port), result in AWKWARD.items()
        for target in pod.targets(kind, port)
    }
    # An IPv6 socket that speaks IPv4.
    expected[f"mapped,{pod.pod.ipv4},{fleet.TCP}"] = nodeclient.OK
    expected[f"mapped,{pod.pod.ipv4},{fleet.CLOSED}"] = nodeclient.REFUSED
    return expected


def test_probes_have_the_same_results_as_direct_ones_and_no_host_packet_reaches_a_pod(
    node: Node,
) -> None:
    usual = usual_targets(node)
    awkward = awkward_targets(node.pods["awkward"])
    assert len(usual) == 8 * (WHOLE + BRIDGED) + 4 * BARE

    node.set_mode("enforce")
    with node.watched() as seen, nodeclient.node_client(node.kubelet) as kubelet:
        node.fleet.peers()
        direct = kubelet.probe([*usual, *awkward])
        from_node = seen()
    assert direct == dict.fromkeys(usual, nodeclient.OK) | awkward
    # So the capture and the servers show direct connections.
    for pod in node.pods.values():
        assert any(line.endswith(f" to {pod.pod.name}") for line in from_node)
    own = {str(network.network_address) for network in node.own_networks()}
    assert all(peers <= own for peers in node.fleet.peers().values())

    # Another process: grpcio keeps retrying for a while what does not answer.
    node.set_mode("strict")
    with node.watched() as seen, nodeclient.node_client(node.kubelet) as kubelet:
        proxied = kubelet.probe([*usual, *awkward])
        assert proxied == direct
        assert seen() == []
    assert node.fleet.peers() == {
        pod.pod.name: {pod.pod.ipv4, pod.pod.ipv6} for pod in node.pods.values()
    }


def test_idle_connections_of_the_kubelet_stay_open_and_are_reused(
    node: Node, kubelet: NodeClient
) -> None:
    node.set_mode("strict")
    targets = node.pods["whole2"].targets("http", fleet.HTTP)
    with node.watched() as seen:
        for target in targets:
            assert kubelet.hold(target, HELD_EACH) == [nodeclient.OK] * HELD_EACH
        kept = [nodeclient.OK] * HELD_EACH * len(targets)
        assert kubelet.held() == kept
        assert kubelet.request_again() == kept
        kubelet.let_go()
        assert seen() == []


def test_two_pods_with_one_address_are_both_reached_at_their_declared_ports(
    node: Node, kubelet: NodeClient
) -> None:
    """The host has a route to one of them only. A connect to a port that neither declares goes
    there, and the gate drops it. No hook rejects it, since the pod cannot be determined."""
    node.set_mode("strict")
    first_port, twin_port, undeclared_port = 7001, 7002, 7003
    first = node.lab.add_pod("first", 130)
    twin = node.lab.add_pod("twin", 131)
    links.take_addresses(twin, first)
    with (
        first.listen(first_port),
        first.listen(undeclared_port),
        twin.listen(twin_port),
        twin.listen(undeclared_port),
    ):
        for pod, port in ((first, first_port), (twin, twin_port)):
            # The node has a route to one of them only, which confirms no address of the twin.
            text = fleet.manifest(
                pod, "strict", [fleet.tcp_probe(port)], addresses=(first.ipv4, first.ipv6)
            )
            node.operator.write_file(f"{pod.name}.yaml", text)
        declared, undeclared = (
            [f"tcp,{host},{port}" for host in (first.ipv4, first.ipv6) for port in ports]
            for ports in ((first_port, twin_port), (undeclared_port,))
        )
        node.operator.wait_for(
            "both in strict", lambda report: all(is_strict(report, pod) for pod in (first, twin))
        )
        assert kubelet.probe(declared) == dict.fromkeys(declared, nodeclient.OK)
        assert kubelet.probe(undeclared) == dict.fromkeys(undeclared, nodeclient.UNANSWERED)
    for pod in (first, twin):
        (node.operator.manifests / f"{pod.name}.yaml").unlink()
        node.lab.remove_pod(pod.name)
    node.settle()


def is_strict(report: AgentReport, pod: LabPod) -> bool:
    condition = condition_of(report, pod.name, labels.ISOLATION_READY)
    return condition is not None and (condition.status, condition.reason) == (TRUE, "Strict")
