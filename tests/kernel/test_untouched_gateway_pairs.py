"""Pods whose gateway is a veth pair in the node: one end is a port of their bridge.

As with the CNI bridge plugin's `vlan`, and Weave's bridge.
"""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from agent.gates.host_devices import programs_for
from agent.lab import lab as labs
from agent.linux import rtnetlink
from bpf import loader, pins
from bpf.gates import GateConfig, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, conversations, links, traffic
from tests.kernel.counting import Counting
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_bypass_flood import TALK, answer, server
from tests.kernel.test_bypass_reentry import programs
from tests.kernel.test_untouched import expect_nothing_counted
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
GATEWAY = {4: "198.18.2.1/24", 6: "fd00:18:0:2::1/64"}
PORT = 8080
NODE_DROPPED = (Verdict.DROP, Reason.NODE)


@pytest.fixture
def pods(lab: labs.Lab) -> Iterator[tuple[labs.LabPod, labs.LabPod]]:
    """One behind the pair, one routed."""
    inside, outside = lab.add_pod("inside", 1, bridged=True), lab.add_pod("outside", 2)
    with links.pair() as (one, other):
        links.ip(f"link set {other} master {labs.BRIDGE}")
        for address in GATEWAY.values():
            links.ip(f"addr del {address} dev {labs.BRIDGE}", f"addr add {address} dev {one}")
        for port in (other, inside.interface):
            links.wait_for_port(port)
        for version in (4, 6):  # neighbours are resolved
            conversations.ping(inside, GATEWAY[version].partition("/")[0])
        yield inside, outside
        for address in GATEWAY.values():
            links.ip(f"addr del {address} dev {one}", f"addr add {address} dev {labs.BRIDGE}")


@contextlib.contextmanager
def as_the_agent_does(
    loaded: loader.Loaded, installation: pins.Pins, *pods: labs.LabPod
) -> Iterator[HostDevicePrograms]:
    with programs(loaded, installation) as devices:
        found = asyncio.run(rtnetlink.read())
        own = {pod.ifindex for pod in pods}
        needed = programs_for(found, gated=own, enforced=own)
        assert {links.index_of("inner0"), links.index_of("inner1")} <= needed.devices
        devices.ensure_hand_made(set(needed.hand_made))
        devices.ensure_devices(set(needed.devices))
        devices.ensure_bridges(set(needed.bridges))
        yield devices


def enforce(gates: Gates, pod: labs.LabPod, *rules: Rule) -> Counting:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, rules))
    start_reply_table(gates, pod.ifindex)
    return Counting(gates, pod.ifindex)


@VERSIONS
def test_forwarded_traffic_passes(
    pods: tuple[labs.LabPod, labs.LabPod],
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    with as_the_agent_does(loaded, installation, *pods):
        countings = [enforce(gates, pod) for pod in pods]
        for client, target in (pods, pods[::-1]):
            with conversations.served_by(target.open_socket) as serving:
                conversations.exchange_all(client, serving, traffic.address(target, version))
        expect_nothing_counted(countings)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@VERSIONS
def test_admitted_source_talks_through_the_pair(
    pods: tuple[labs.LabPod, labs.LabPod],
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
    kind: str,
) -> None:
    """Its packets lose their socket on the way, so they are evaluated before."""
    pod = pods[0]
    with (
        as_the_agent_does(loaded, installation, *pods),
        cgroups.cgroup() as group,
        server(pod, version, kind) as sock,
    ):
        counting = enforce(gates, pod, Rule(SourceKind.CGROUP, cgroup=group.id))
        process = group.popen(
            [*BARE_PYTHON, "-c", TALK, kind, traffic.address(pod, version), str(PORT)]
        )
        answer(sock, kind)
        assert process.wait(10) == 0
    moved = counting.moved()
    assert moved[Verdict.PASS, Reason.RULE] == 1
    assert not {reason for verdict, reason in moved if verdict is Verdict.DROP}


@VERSIONS
def test_other_sources_are_dropped_and_named(
    pods: tuple[labs.LabPod, labs.LabPod],
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    pod = pods[0]
    with as_the_agent_does(loaded, installation, *pods), pod.listen(PORT):
        assert traffic.node_reaches(pod, version, PORT)
        counting = enforce(gates, pod)
        assert traffic.node_is_dropped(pod, version, PORT)
        assert counting.moved()[NODE_DROPPED] == 1


@VERSIONS
def test_replies_of_the_host_pass(
    pods: tuple[labs.LabPod, labs.LabPod],
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    pod = pods[0]
    gateway = GATEWAY[version].partition("/")[0]
    with as_the_agent_does(loaded, installation, *pods):
        counting = enforce(gates, pod)
        with conversations.served_by() as serving:
            conversations.exchange_all(pod, serving, gateway)
    assert not {reason for verdict, reason in counting.moved() if verdict is Verdict.DROP}
