"""The gate's program agrees with its specification (tests/model/gate.py) on made frames, sockets
and states: 10,000 here, and a million in `make fuzz`.

`make fuzz` has new ones each time, and prints their seed, with which PODGATE_TEST_SEED repeats it.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator

import pytest

from bpf import abi, loader, pins
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, gate_comparison, offers
from tests.kernel.gate_runs import Found, GateRuns
from tests.model import flows, generator, seeds
from tests.model.facts import Gate, Sent, Stamp, State
from tests.model.generator import NODES, PODS, Way

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

FRAMES = int(os.environ.get("PODGATE_TEST_FRAMES", "10000"))
SEED = seeds.seed()


@pytest.fixture(scope="module")
def runs(loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup) -> Iterator[GateRuns]:
    offers.need_tcx()
    offers.need_ingress_in_test_runs()
    with GateRuns(loaded, installation, cgroup) as made:
        yield made


def test_program_agrees_with_the_specification(runs: GateRuns, cgroup: Cgroup) -> None:
    report = gate_comparison.compare(runs, cgroup, SEED, FRAMES)
    sys.stdout.write(f"{report}\n")
    assert not report.disagreements, "\n".join(map(str, (report, *report.disagreements)))
    assert not report.missing, report


def enforced(*rules: Rule) -> State:
    addresses = frozenset({PODS[4][0], PODS[6][0]})
    return State(Gate(Mode.ENFORCE, addresses, rules), own=tuple(NODES.values()), node=NodeFacts())


CONTROL = Verdict.PASS, Reason.CONTROL


def agree(runs: GateRuns, way: Way, sent: Sent, state: State) -> Found:
    """What both have found."""
    found = runs.run(way, sent)
    assert found == gate_comparison.specify(way, sent, state, time.monotonic_ns())
    return found


# Disagreements that were found, with the frames that showed them.


def test_answers_to_what_a_pod_sends_to_no_address_are_those_of_a_group(runs: GateRuns) -> None:
    state = enforced()
    runs.apply(state)
    pod, nowhere = abi.unpack_address(PODS[6][0]), frames.address("::")
    first = frames.packet(frames.Ends(pod, nowhere), 89, bytes(20))
    runs.record(first)
    flows.record(first, state, time.monotonic_ns())
    anyone = frames.Ends(abi.unpack_address(NODES[6]), pod)
    answer = Sent(frames.packet(anyone, 89, bytes(20)), stamp=Stamp.UNPROVEN)
    for age_seconds, expected in ((0, Reason.REPLY), (20, Reason.NODE)):
        gate_comparison.age(runs, state, age_seconds * 10**9)
        found = agree(runs, Way(generator.LOST), answer, state)
        assert found.verdict is not None
        assert found.verdict[1] is expected


def test_process_adds_no_fragment_to_the_kernels_igmp(runs: GateRuns) -> None:
    state = enforced()
    runs.apply(state)
    ends = frames.Ends(abi.unpack_address(NODES[4]), abi.unpack_address(PODS[4][0]))
    first, later = (
        frames.ethernet(
            ends,
            frames.ETHERTYPE_IPV4,
            frames.ipv4(ends, frames.IGMP, bytes(16), fragment=place),
        )
        for place in (frames.MORE_FRAGMENTS, 2)
    )
    way = Way(generator.LOST)
    assert agree(runs, way, Sent(first, stamp=Stamp.UNPROVEN), state).verdict == CONTROL
    assert agree(runs, way, Sent(later, stamp=Stamp.UNPROVEN), state).verdict == CONTROL
    by_hand = agree(runs, way, Sent(later, stamp=Stamp.HAND_MADE), state)
    assert by_hand.verdict == (Verdict.DROP, Reason.FRAGMENT)


def test_fragments_without_their_number_are_of_no_datagram(runs: GateRuns) -> None:
    """A header of IPv6 that the frame's end cuts off: it shows whether it is the first one, not
    which datagram's."""
    state = enforced()
    assert state.gate is not None
    until_ns = time.monotonic_ns() + 10**12
    state.gate = dataclasses.replace(state.gate, grace_until_ns=until_ns)
    runs.apply(state)
    ends = frames.Ends(abi.unpack_address(NODES[6]), abi.unpack_address(PODS[6][0]))
    for place in (0, 8):
        header = frames.fragment_header(frames.ICMPV6, place, more=place == 0, identification=0)
        packet = frames.ipv6(ends, frames.FRAGMENT, header + bytes(12))[: 40 + len(header) - 1]
        sent = Sent(frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet), stamp=Stamp.UNPROVEN)
        found = agree(runs, Way(generator.LOST), sent, state)
        assert found.verdict == (Verdict.PASS, Reason.GRACE)


def test_packet_from_no_address_is_no_answer_to_a_question_to_a_group(runs: GateRuns) -> None:
    """The address `::` in a flow stands for a group: such an answer passed for 120 s, not for ten,
    and renewed its flow."""
    state = enforced()
    runs.apply(state)
    pod, group = (abi.unpack_address(each) for each in (PODS[6][0], generator.GROUPS[6][0]))
    question = frames.Ends(pod, group, source_port=5353, port=53)
    first = frames.packet(question, frames.UDP, frames.udp(question))
    runs.record(first)
    flows.record(first, state, time.monotonic_ns())
    gate_comparison.age(runs, state, 20 * 10**9)
    answer = frames.Ends(frames.address("::"), pod, source_port=53, port=5353)
    late = Sent(frames.packet(answer, frames.UDP, frames.udp(answer)), stamp=Stamp.UNPROVEN)
    found = agree(runs, Way(generator.LOST), late, state)
    assert found.verdict == (Verdict.DROP, Reason.NODE)
