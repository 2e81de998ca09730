"""Drop sources: the aggregate of source processes that would need a rule."""

import socket

import pytest

from agent.lab import lab as labs
from bpf import loader
from bpf.drop_sources import DropSource, DropSources
from bpf.gates import GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from tests.kernel import traffic

pytestmark = pytest.mark.kernel

PORT = 8080


@pytest.fixture
def pod(lab: labs.Lab, gates: Gates) -> labs.LabPod:
    return lab.add_pod("called", 1)


def seen(loaded: loader.Loaded, pod: labs.LabPod) -> list[DropSource]:
    return [one for one in DropSources(loaded).read() if one.ifindex == pod.ifindex]


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.ENFORCE])
def test_source_is_recorded_with_its_name_and_port(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded, mode: Mode
) -> None:
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses))
    with pod.listen(PORT):
        traffic.node_is_dropped(pod, 4, PORT)
    (one,) = seen(loaded, pod)
    assert (one.protocol, one.port) == (socket.IPPROTO_TCP, PORT)
    assert one.count >= 1
    assert one.last_ns >= one.first_ns > 0
    assert one.cgroup != 0


def test_each_combination_is_one_entry_with_a_count(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(10):
            sock.sendto(b"", (pod.ipv4, 1))
        sock.sendto(b"", (pod.ipv4, 2))
    found = {one.port: one.count for one in seen(loaded, pod)}
    assert found == {1: 10, 2: 1}


def test_admitted_source_is_not_recorded(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    rule = Rule(SourceKind.ANY, socket.IPPROTO_TCP, PORT, PORT)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (rule,)))
    with pod.listen(PORT):
        assert traffic.node_reaches(pod, 4, PORT)
    assert seen(loaded, pod) == []


def test_sources_of_deleted_interfaces_are_deleted(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    assert traffic.node_is_dropped(pod, 4, PORT)
    callers = DropSources(loaded)
    callers.prune({pod.ifindex})
    assert seen(loaded, pod)
    callers.prune(())
    assert seen(loaded, pod) == []


def test_the_cgroups_of_sources_are_read_without_the_rest(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    assert traffic.node_is_dropped(pod, 4, PORT)
    callers = DropSources(loaded)
    assert callers.cgroups() == {one.cgroup for one in callers.read()} != set()


def test_only_the_sources_of_one_interface_are_deleted_with_it(
    gates: Gates, pod: labs.LabPod, lab: labs.Lab, loaded: loader.Loaded
) -> None:
    other = lab.add_pod("other", 2)
    for one in (pod, other):
        gates.install(one.ifindex, GateConfig(Mode.ENFORCE, one.addresses))
        assert traffic.node_is_dropped(one, 4, PORT)
    DropSources(loaded).forget(pod.ifindex)
    assert seen(loaded, pod) == []
    assert seen(loaded, other)
