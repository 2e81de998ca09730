"""Live connections: which ones the gate blocks, and which ones it must not affect."""

import socket

import pytest

from agent.lab import lab as labs
from bpf.gates import Attachment, GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

NODE_DROPPED = (Verdict.DROP, Reason.NODE)
NODE_WOULD_DROP = (Verdict.WOULD_DROP, Reason.NODE)
VERSIONS = pytest.mark.parametrize("version", [4, 6])
PATHS = pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])


@pytest.fixture(params=list(Attachment))
def any_gates(request: pytest.FixtureRequest, make_gates: MakeGates) -> Gates:
    return make_gates(request.param)


@pytest.fixture
def pods(lab: labs.Lab) -> dict[str, labs.LabPod]:
    """Two routed and two bridged pods."""
    return {
        "routed": lab.add_pod("routed", 1),
        "bridged": lab.add_pod("bridged", 2, bridged=True),
        "routed2": lab.add_pod("routed2", 3),
        "bridged2": lab.add_pod("bridged2", 4, bridged=True),
    }


def install(gates: Gates, pod: labs.LabPod, mode: Mode) -> Counting:
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses))
    return Counting(gates, pod.ifindex)


@PATHS
@VERSIONS
def test_node_to_pod_follows_the_mode(
    lab: labs.Lab, any_gates: Gates, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with pod.listen(80):
        assert traffic.node_reaches(pod, version)  # before the gate

        counting = install(any_gates, pod, Mode.AUDIT)
        assert traffic.node_reaches(pod, version)
        moved = counting.moved()
        assert moved[NODE_WOULD_DROP] == 1
        assert NODE_DROPPED not in moved

        any_gates.configure(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        assert traffic.node_is_dropped(pod, version)
        moved = counting.moved()
        assert moved[NODE_DROPPED] == 1
        assert NODE_WOULD_DROP not in moved

        any_gates.configure(pod.ifindex, GateConfig(Mode.OFF, pod.addresses))
        assert traffic.node_reaches(pod, version)
        assert not counting.moved().keys() & {NODE_DROPPED, NODE_WOULD_DROP}


@VERSIONS
def test_pods_reach_each_other_and_move_no_counter_of_tcp(
    gates: Gates, pods: dict[str, labs.LabPod], version: int
) -> None:
    countings = [install(gates, pod, Mode.ENFORCE) for pod in pods.values()]
    for server in pods.values():
        with server.listen(80) as listening:
            for client in pods.values():
                if client is not server:
                    target = traffic.address(server, version)
                    traffic.pod_connects(client, target, version, listening)
    for counting in countings:
        assert counting.moved_but_control() == {}


@VERSIONS
def test_pods_reach_the_node(gates: Gates, pods: dict[str, labs.LabPod], version: int) -> None:
    with traffic.listen_on_node(81) as listening:
        for pod in pods.values():
            counting = install(gates, pod, Mode.ENFORCE)
            traffic.pod_connects(pod, traffic.NODE[version], version, listening)
            moved = counting.moved()
            assert moved[Verdict.PASS, Reason.ESTABLISHED] > 1
            assert not [key for key in moved if key[0] is not Verdict.PASS]


@VERSIONS
def test_connect_of_a_pod_to_a_closed_host_port_fails_at_once(
    gates: Gates, pods: dict[str, labs.LabPod], version: int
) -> None:
    for name in ("routed", "bridged"):
        install(gates, pods[name], Mode.ENFORCE)
        kind = socket.SOCK_STREAM
        with (
            pods[name].open_socket(traffic.family(version), kind) as sock,
            pytest.raises(ConnectionRefusedError),
        ):
            sock.connect((traffic.NODE[version], 9))


@VERSIONS
def test_existing_connection_stays_open_until_it_is_closed(
    lab: labs.Lab, gates: Gates, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    with pod.listen(80) as listening, socket.socket(traffic.family(version)) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((traffic.address(pod, version), 80))
        peer, _ = listening.accept()
        with peer:
            install(gates, pod, Mode.ENFORCE)
            sock.sendall(b"still here")
            peer.settimeout(traffic.LIMIT_SECONDS)
            assert peer.recv(100) == b"still here"


@PATHS
@VERSIONS
def test_only_the_gate_of_the_pod_that_was_tried_counts(
    gates: Gates, pods: dict[str, labs.LabPod], bridged: bool, version: int
) -> None:
    tried = pods["bridged" if bridged else "routed"]
    countings = {name: install(gates, pod, Mode.ENFORCE) for name, pod in pods.items()}
    assert traffic.node_is_dropped(tried, version)
    for name, counting in countings.items():
        dropped = {key: n for key, n in counting.moved().items() if key[0] is Verdict.DROP}
        assert dropped == ({NODE_DROPPED: 1} if pods[name] is tried else {})


@VERSIONS
def test_flooded_copies_are_strays_and_open_nothing(
    lab: labs.Lab, gates: Gates, version: int
) -> None:
    """A bridge that has forgotten a pod's port sends the node's packet to every port."""
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    with pods[0].listen(80):
        assert traffic.node_reaches(pods[0], version)  # the pod's MAC is resolved now
        traffic.forget_ports(labs.BRIDGE, pods)
        countings = [install(gates, pod, Mode.ENFORCE) for pod in pods]
        assert traffic.node_is_dropped(pods[0], version)
    own, *others = (counting.moved() for counting in countings)
    assert own[NODE_DROPPED] + own.get((Verdict.DROP, Reason.KERNEL), 0) == 1
    for moved in others:
        assert moved[Verdict.DROP, Reason.STRAY] == 1
        assert NODE_DROPPED not in moved
