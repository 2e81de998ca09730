"""Drop sources: the aggregate of source processes that would need a rule."""

import functools
import socket
import time

import pytest

from agent.drops.admitted_sources import AdmittedSources
from agent.lab import lab as labs
from bpf import abi, loader, map_specs, program_specs, syscalls
from bpf.drop_sources import DropSource, DropSources
from bpf.gates import GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from tests import polling
from tests.kernel import cgroups, frames, skb, traffic
from tests.processes import BARE_PYTHON

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


def test_packets_are_counted_by_the_mode_of_their_time(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """Those that passed in audit are apart from dropped ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for mode, packets in ((Mode.AUDIT, 5), (Mode.ENFORCE, 1), (Mode.STRICT, 2)):
            gates.install(pod.ifindex, GateConfig(mode, pod.addresses))
            for _ in range(packets):
                sock.sendto(b"", (pod.ipv4, 1))
    found = {one.mode: one.count for one in seen(loaded, pod)}
    assert found == {Mode.AUDIT: 5, Mode.ENFORCE: 1, Mode.STRICT: 2}


def test_rejected_call_is_counted_by_the_mode_of_its_time(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.STRICT, pod.addresses))
    assert traffic.node_is_dropped(pod, 4, PORT)
    assert {one.mode for one in seen(loaded, pod)} == {Mode.STRICT}


def test_admitted_source_is_not_recorded(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    rule = Rule(SourceKind.ANY, socket.IPPROTO_TCP, PORT, PORT)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (rule,)))
    with pod.listen(PORT):
        assert traffic.node_reaches(pod, 4, PORT)
    assert seen(loaded, pod) == []


DIAL = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(int(sys.argv[2]), int(sys.argv[3])):
    sock.sendto(b"", (sys.argv[1], port))
"""


def dial(caller: cgroups.Cgroup, pod: labs.LabPod, first: int, last: int) -> None:
    arguments = (*BARE_PYTHON, "-c", DIAL, pod.ipv4, str(first), str(last + 1))
    caller.run(arguments).check_returncode()


def test_source_that_dials_many_ports_hides_no_other(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    with cgroups.cgroup() as scanner, cgroups.cgroup() as honest:
        dial(scanner, pod, 1, 17_000)
        dial(honest, pod, 7, 7)
        found = seen(loaded, pod)
        (named,) = (one for one in found if one.cgroup == honest.id)
        assert (named.port, named.count, named.has_many_ports) == (7, 1, False)
        scanned = [one for one in found if one.cgroup == scanner.id]
        assert len(scanned) == abi.CGROUP_SOURCES + 1
        assert sum(one.count for one in scanned) == 17_000
        (many,) = (one for one in scanned if one.has_many_ports)
        assert many.count == 17_000 - abi.CGROUP_SOURCES
        assert {scanner.id, honest.id} <= DropSources(loaded).cgroups()


def test_deleted_sources_return_their_cgroup_s_share(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    sources = DropSources(loaded)
    with cgroups.cgroup() as caller:
        for _ in range(2):
            dial(caller, pod, 1, abi.CGROUP_SOURCES)
            assert not any(one.has_many_ports for one in seen(loaded, pod))
            sources.forget(pod.ifindex)
            assert caller.id not in sources.cgroups()


def test_full_table_forgets_the_oldest_sources(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """Not the newest one: many cgroups may have used up their shares."""
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    table = loaded.map(map_specs.DROP_SOURCES)
    value = bytes(abi.CDropSource(count=1))
    for number in range(abi.MAX_DROP_SOURCES):
        key = abi.CDropSourceKey(cgroup=1 << 40 | number, ifindex=pod.ifindex, port=1, protocol=17)
        table.set(bytes(key), value)
    with cgroups.cgroup() as caller:
        dial(caller, pod, 7, 7)
        assert [one.port for one in seen(loaded, pod) if one.cgroup == caller.id] == [7]
    DropSources(loaded).forget(pod.ifindex)


def test_packets_of_a_flood_are_all_counted(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """They are added to the table from time to time, and the rest when it is read."""
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address(pod.ipv4))
    flood = frames.segment(ends, frames.SYN)
    context = skb.context(pod.ifindex, 0)
    for repeat in (1, 100_000, 3):
        syscalls.run_program(loaded.programs[program_specs.GATE_EGRESS], flood, context, repeat)
    (one,) = seen(loaded, pod)
    assert (one.port, one.count) == (ends.port, 100_004)
    assert one.last_ns >= one.first_ns > 0


def test_packet_times_follow_the_clock(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """Although a CPU reads the clock only once for a tick."""
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address(pod.ipv4))
    packet = frames.segment(ends, frames.SYN)

    def is_recorded_after(began_ns: int) -> bool:
        context = skb.context(pod.ifindex, 0)
        syscalls.run_program(loaded.programs[program_specs.GATE_EGRESS], packet, context)
        (one,) = seen(loaded, pod)
        assert one.last_ns <= time.monotonic_ns()
        return one.last_ns >= began_ns

    for _ in range(2):
        check = functools.partial(is_recorded_after, time.monotonic_ns())
        polling.wait_until("a packet with a later time", check)


def test_source_is_admitted_by_now_once_the_gate_has_a_rule_for_it(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    with cgroups.cgroup() as caller:
        dial(caller, pod, 7, 7)
        (one,) = seen(loaded, pod)
        assert not AdmittedSources(loaded).has(one, caller.path)
        rule = Rule(SourceKind.CGROUP, socket.IPPROTO_UDP, 7, 7, cgroup=caller.id)
        gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (rule,)))
        assert AdmittedSources(loaded).has(one, caller.path)
        other = Rule(SourceKind.CGROUP, socket.IPPROTO_UDP, 8, 8, cgroup=caller.id)
        gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (other,)))
        assert not AdmittedSources(loaded).has(one, caller.path)


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
