"""Packets that Open vSwitch injects have no socket and no input interface."""

from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, loader, map_specs, pins, program_specs
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, links, skb, syns, traffic
from tests.kernel.counting import Counting
from tests.kernel.test_bypass_reentry import programs

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    yield NodeConfig(loaded)
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def pods(lab: labs.Lab) -> list[labs.LabPod]:
    """On a bridge, whose flooded copies have no socket either."""
    return [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]


@VERSIONS
@pytest.mark.parametrize(
    ("has_switch", "seen"),
    [(True, (Verdict.PASS, Reason.SWITCH)), (False, (Verdict.DROP, Reason.KERNEL))],
)
def test_packets_without_a_socket_pass_only_on_a_switch(
    gates: Gates,
    pods: list[labs.LabPod],
    config: NodeConfig,
    version: int,
    has_switch: bool,
    seen: tuple[Verdict, Reason],
) -> None:
    before, target, after = pods  # the original leaves by the last port
    with target.listen(80):
        assert traffic.node_reaches(target, version)
        traffic.forget_ports(labs.BRIDGE, pods)
        for pod in pods:
            gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        countings = [Counting(gates, pod.ifindex) for pod in pods]
        config.set_ovs(is_there=has_switch)
        assert traffic.node_is_dropped(target, version) is not has_switch
    moved = [counting.moved() for counting in countings]
    assert moved[1][seen] == 1
    for pod in (before, after):
        assert moved[pods.index(pod)][Verdict.DROP, Reason.STRAY] >= 1


@VERSIONS
def test_host_processes_are_still_dropped(
    gates: Gates, pods: list[labs.LabPod], config: NodeConfig, version: int
) -> None:
    target = pods[0]
    with target.listen(80):
        assert traffic.node_reaches(target, version)
        gates.install(target.ifindex, GateConfig(Mode.ENFORCE, target.addresses))
        counting = Counting(gates, target.ifindex)
        config.set_ovs(is_there=True)
        assert traffic.node_is_dropped(target, version)
    assert counting.moved()[Verdict.DROP, Reason.NODE] >= 1


@VERSIONS
def test_what_the_host_sent_before_it_lost_its_socket_is_dropped(
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    pods: list[labs.LabPod],
    config: NodeConfig,
    version: int,
) -> None:
    """Only packets without a stamp pass as the switch's. Its internal ports stamp: untried."""
    target = pods[1]
    with target.listen(80), programs(loaded, installation) as devices:
        assert traffic.node_reaches(target, version)
        traffic.forget_ports(labs.BRIDGE, pods)
        for pod in pods:
            gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        devices.ensure_hand_made({links.index_of(labs.BRIDGE)})
        counting = Counting(gates, target.ifindex)
        config.set_ovs(is_there=True)
        assert traffic.node_is_dropped(target, version)
    moved = counting.moved()
    assert (Verdict.PASS, Reason.SWITCH) not in moved
    assert moved[Verdict.DROP, Reason.NODE] >= 1


# The upper half of a priority: a stamp at a switch's internal port, or the major number of a class.
HAND_MADE_CLASS = 0x7040_0006


@VERSIONS
@pytest.mark.parametrize(("has_switch", "left"), [(True, 0x6), (False, HAND_MADE_CLASS)])
def test_uplink_takes_a_priority_for_a_stamp_only_on_a_switch(
    loaded: loader.Loaded, config: NodeConfig, version: int, has_switch: bool, left: int
) -> None:
    """Elsewhere an HTB class may have this number, and a packet keeps its class."""
    ends = frames.Ends(
        frames.address(traffic.NODE[version]), frames.address(syns.STRANGER[version])
    )
    frame = frames.segment(ends, frames.SYN)
    config.set_ovs(is_there=has_switch)
    uplink = loaded.programs[program_specs.UPLINK_GATE]
    assert skb.priority_after(uplink, frame, HAND_MADE_CLASS) == left
    assert skb.priority_after(uplink, frame, 0x0001_0006) == 0x0001_0006
