"""Sources on the host that gates admit: by rules, as the kubelet, and without a heartbeat."""

import socket
import time
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, loader, map_specs
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT, OTHER_PORT = 8080, 8081
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP

# Connects once to a port within a limit in seconds; the exit code is the result.
CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.settimeout(float(sys.argv[3]))
sys.exit(1 if sock.connect_ex((sys.argv[1], int(sys.argv[2]))) else 0)
"""


def connects(
    sender: Cgroup, address: str, port: int, seconds: float = traffic.LIMIT_SECONDS
) -> bool:
    """Whether a process created in this cgroup reaches a server."""
    command = [*BARE_PYTHON, "-c", CONNECT, address, str(port), str(seconds)]
    return sender.run(command).returncode == 0


def is_dropped(sender: Cgroup, address: str, port: int) -> bool:
    """Whether a process created in this cgroup gets no answer to one SYN, or a rejection."""
    return not connects(sender, address, port, traffic.DROPPED_AFTER_SECONDS)


@pytest.fixture
def kubelet(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def stranger(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    """The node's config, as it was afterwards."""
    made = NodeConfig(loaded)
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("guarded", 1)
    with made.listen(PORT), made.listen(OTHER_PORT):
        yield made


def guard(gates: Gates, pod: labs.LabPod, *rules: Rule) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, rules))


PROBE = Rule(SourceKind.KUBELET, TCP, PORT, PORT)


def passed(gates: Gates, pod: labs.LabPod, reason: Reason) -> int:
    return gates.counts()[pod.ifindex].get((Verdict.PASS, reason), 0)


@pytest.mark.parametrize("version", [4, 6])
def test_the_kubelet_reaches_what_is_declared_and_nothing_else(
    gates: Gates, pod: labs.LabPod, config: NodeConfig, kubelet: Cgroup, version: int
) -> None:
    config.set_kubelet(kubelet.id)
    guard(gates, pod, PROBE)
    assert connects(kubelet, traffic.address(pod, version), PORT)
    assert is_dropped(kubelet, traffic.address(pod, version), OTHER_PORT)
    assert passed(gates, pod, Reason.PROBE) == 1


def test_no_other_process_counts_as_the_kubelet(
    gates: Gates, pod: labs.LabPod, config: NodeConfig, kubelet: Cgroup, stranger: Cgroup
) -> None:
    config.set_kubelet(kubelet.id)
    guard(gates, pod, PROBE)
    assert is_dropped(stranger, pod.ipv4, PORT)
    with cgroups.cgroup("below", below=kubelet) as pods:
        # kind keeps pods below the kubelet's cgroup: never an ancestor match.
        assert is_dropped(pods, pod.ipv4, PORT)
    assert passed(gates, pod, Reason.PROBE) == 0


def test_a_kubelet_in_a_new_cgroup_is_followed_at_once(
    gates: Gates, pod: labs.LabPod, config: NodeConfig, kubelet: Cgroup, stranger: Cgroup
) -> None:
    config.set_kubelet(kubelet.id)
    guard(gates, pod, PROBE)
    config.set_kubelet(stranger.id)
    assert connects(stranger, pod.ipv4, PORT)
    assert is_dropped(kubelet, pod.ipv4, PORT)


@pytest.mark.parametrize("version", [4, 6])
def test_while_the_kubelet_is_unknown_declared_ports_are_open_to_host_processes_outside_pods(
    gates: Gates,
    pod: labs.LabPod,
    config: NodeConfig,
    kubelet: Cgroup,
    stranger: Cgroup,
    version: int,
) -> None:
    address = traffic.address(pod, version)
    with cgroups.cgroup() as pods, cgroups.cgroup("container", below=pods) as container:
        config.set_kubelet(None)
        config.set_pods(pods.id, pods.level)
        config.beat()
        guard(gates, pod, PROBE)
        for process in (kubelet, stranger):
            assert connects(process, address, PORT)
            assert is_dropped(process, address, OTHER_PORT)
        for process in (pods, container):
            assert is_dropped(process, address, PORT)
        assert passed(gates, pod, Reason.UNIDENTIFIED) == 2
        assert passed(gates, pod, Reason.PROBE) == 0

        config.set_kubelet(kubelet.id)
        assert connects(kubelet, address, PORT)
        for process in (stranger, pods, container):
            assert is_dropped(process, address, PORT)


@pytest.mark.parametrize("age_seconds", [0, 600])
def test_heartbeat_changes_nothing_while_the_kubelet_is_unknown(
    gates: Gates,
    pod: labs.LabPod,
    loaded: loader.Loaded,
    config: NodeConfig,
    stranger: Cgroup,
    age_seconds: int,
) -> None:
    config.set_limits(stale_after_seconds=15, dead_man_seconds=0)
    NodeConfig(loaded, now_ns=lambda: max(1, time.monotonic_ns() - age_seconds * 10**9)).beat()
    guard(gates, pod, PROBE)
    assert connects(stranger, pod.ipv4, PORT)
    assert is_dropped(stranger, pod.ipv4, OTHER_PORT)


def test_a_rule_for_a_cgroup_is_exact_and_one_for_an_ancestor_is_not(
    gates: Gates, pod: labs.LabPod, kubelet: Cgroup, stranger: Cgroup
) -> None:
    with cgroups.cgroup("below", below=kubelet) as below:
        guard(gates, pod, Rule(SourceKind.CGROUP, TCP, PORT, PORT, cgroup=kubelet.id))
        assert connects(kubelet, pod.ipv4, PORT)
        assert is_dropped(below, pod.ipv4, PORT)
        ancestor = Rule(
            SourceKind.ANCESTOR, TCP, PORT, PORT, cgroup=kubelet.id, level=kubelet.level
        )
        guard(gates, pod, ancestor)
        assert connects(kubelet, pod.ipv4, PORT)
        assert connects(below, pod.ipv4, PORT)
        assert is_dropped(stranger, pod.ipv4, PORT)
    assert passed(gates, pod, Reason.RULE) == 3


@pytest.mark.parametrize(
    ("first", "last", "is_let_in"),
    [
        (PORT, PORT, True),
        (0, 65535, True),
        (PORT - 5, PORT + 5, True),
        (PORT + 1, PORT + 5, False),
        (PORT - 5, PORT - 1, False),
        (PORT + 1, PORT - 1, False),
    ],
)
def test_a_range_of_ports_has_both_its_ends(
    gates: Gates, pod: labs.LabPod, first: int, last: int, is_let_in: bool
) -> None:
    guard(gates, pod, Rule(SourceKind.ANY, TCP, first, last))
    assert traffic.node_is_dropped(pod, 4, PORT) is not is_let_in


def test_rule_for_another_protocol_admits_no_process(gates: Gates, pod: labs.LabPod) -> None:
    guard(gates, pod, Rule(SourceKind.ANY, UDP))
    assert traffic.node_is_dropped(pod, 4, PORT)
    guard(gates, pod, Rule(SourceKind.ANY, 0))
    assert traffic.node_reaches(pod, 4, PORT)


def test_the_last_of_many_rules_counts(gates: Gates, pod: labs.LabPod) -> None:
    others = [Rule(SourceKind.ANY, TCP, port, port) for port in range(1, abi.GATE_RULES)]
    guard(gates, pod, *others, Rule(SourceKind.ANY, TCP, PORT, PORT))
    assert traffic.node_reaches(pod, 4, PORT)


def test_rule_for_the_kernel_admits_no_process(gates: Gates, pod: labs.LabPod) -> None:
    guard(gates, pod, Rule(SourceKind.KERNEL))
    assert traffic.node_is_dropped(pod, 4, PORT)


def test_the_rule_that_matched_first_is_the_one_counted(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    hits = loaded.map(map_specs.RULE_HITS)
    ids = (7, 8)
    for number in ids:
        hits.set(number.to_bytes(4, "little"), bytes(hits.value_size))
    try:
        guard(
            gates,
            pod,
            Rule(SourceKind.ANY, TCP, OTHER_PORT, OTHER_PORT, id=7),
            Rule(SourceKind.ANY, TCP, PORT, PORT, id=8),
            Rule(SourceKind.ANY, TCP, PORT, PORT, id=7),
        )
        assert traffic.node_reaches(pod, 4, PORT)
        counted = [any(hits.get(number.to_bytes(4, "little")) or b"") for number in ids]
        assert counted == [False, True]
    finally:
        for number in ids:
            hits.delete(number.to_bytes(4, "little"))


def test_rules_are_replaced_for_the_next_packet(gates: Gates, pod: labs.LabPod) -> None:
    guard(gates, pod, Rule(SourceKind.ANY, TCP, PORT, PORT))
    assert traffic.node_reaches(pod, 4, PORT)
    guard(gates, pod)
    assert traffic.node_is_dropped(pod, 4, PORT)


def test_without_heartbeat_the_node_reaches_what_is_declared_but_pods_do_not(
    gates: Gates,
    pod: labs.LabPod,
    loaded: loader.Loaded,
    config: NodeConfig,
    kubelet: Cgroup,
    stranger: Cgroup,
) -> None:
    long_ago = NodeConfig(loaded, now_ns=lambda: time.monotonic_ns() - int(60e9))
    config.set_kubelet(kubelet.id)
    config.set_limits(stale_after_seconds=30, dead_man_seconds=0)
    guard(gates, pod, PROBE)
    config.beat()
    assert is_dropped(stranger, pod.ipv4, PORT)
    long_ago.beat()
    assert connects(stranger, pod.ipv4, PORT)
    assert is_dropped(stranger, pod.ipv4, OTHER_PORT)
    config.set_pods(stranger.id, stranger.level)
    assert is_dropped(stranger, pod.ipv4, PORT)
    with cgroups.cgroup("pod", below=stranger) as below:
        assert is_dropped(below, pod.ipv4, PORT)
    assert connects(kubelet, pod.ipv4, PORT)


def test_after_the_dead_mans_time_everything_passes_and_is_counted(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded, config: NodeConfig
) -> None:
    long_ago = NodeConfig(loaded, now_ns=lambda: time.monotonic_ns() - int(20e9))
    config.set_limits(stale_after_seconds=0, dead_man_seconds=10)
    guard(gates, pod)
    long_ago.beat()
    assert traffic.node_reaches(pod, 4, OTHER_PORT)
    assert passed(gates, pod, Reason.DEAD_MAN) == 1
    config.beat()
    assert traffic.node_is_dropped(pod, 4, OTHER_PORT)
