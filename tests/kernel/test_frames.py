"""Every frame of the table gets its verdict and its reason, by BPF_PROG_TEST_RUN."""

from collections.abc import Iterator

import pytest

from bpf import abi, injectable, loader, pins
from bpf.gate_table import GateTable
from bpf.gates import Attachment, GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cases, frames, skb
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

POD = {4: frames.address("198.18.1.1"), 6: frames.address("fd00:18:0:1::1")}
NODE = {4: frames.address("198.18.0.1"), 6: frames.address("fd00:18::1")}
FOREIGN_IFINDEX = 4242
LOOPBACK_IFINDEX = 1


@pytest.fixture(scope="module")
def gate(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[int]:
    """A gate's configuration without an interface: a test run may use the loopback's number."""
    ifindex = LOOPBACK_IFINDEX
    table = GateTable(loaded, installation.maps)
    table.set(ifindex, GateConfig(Mode.ENFORCE, tuple(POD.values())), 0)
    yield ifindex
    table.delete(ifindex)
    table.close()


def ends(family: int) -> frames.Ends:
    return frames.Ends(NODE[family], POD[family])


@pytest.fixture
def gates(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Gates]:
    made = Gates(loaded, installation, Attachment.CLSACT)
    yield made
    made.close()


def returned(verdict: Verdict) -> int:
    return skb.TCX_DROP if verdict is Verdict.DROP else skb.TCX_NEXT


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_verdict_and_reason(
    loaded: loader.Loaded, gates: Gates, gate: int, case: cases.Case
) -> None:
    built = case.frames(ends(case.family))
    counting = Counting(gates, gate)
    answers = {skb.run_gate(loaded, frame, gate) for frame in built}
    assert answers == {returned(case.verdict)}
    assert counting.moved() == {(case.verdict, case.reason): len(built)}


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_audit_passes_everything_and_counts_what_enforce_would_drop(
    loaded: loader.Loaded, gates: Gates, gate: int, case: cases.Case
) -> None:
    built = case.frames(ends(case.family))
    counting = Counting(gates, gate)
    gates.configure(gate, GateConfig(Mode.AUDIT, tuple(POD.values())))
    try:
        answers = {skb.run_gate(loaded, frame, gate) for frame in built}
    finally:
        gates.configure(gate, GateConfig(Mode.ENFORCE, tuple(POD.values())))
    assert answers == {skb.TCX_NEXT}
    expected = Verdict.WOULD_DROP if case.verdict is Verdict.DROP else Verdict.PASS
    assert counting.moved() == {(expected, case.reason): len(built)}


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_forwarded_frames_pass_untouched_and_uncounted(
    loaded: loader.Loaded, gates: Gates, gate: int, case: cases.Case
) -> None:
    counting = Counting(gates, gate)
    built = case.frames(ends(case.family))
    answers = {skb.run_gate(loaded, frame, gate, FOREIGN_IFINDEX) for frame in built}
    assert answers == {skb.TCX_NEXT}
    assert counting.moved() == {}


@pytest.mark.parametrize("family", [4, 6])
def test_frame_that_came_in_by_the_loopback_is_dropped(
    loaded: loader.Loaded, gates: Gates, gate: int, family: int
) -> None:
    counting = Counting(gates, gate)
    frame = frames.segment(ends(family), frames.SYN)
    assert skb.run_gate(loaded, frame, gate, LOOPBACK_IFINDEX) == skb.TCX_DROP
    assert counting.moved() == {(Verdict.DROP, Reason.NODE): 1}


@pytest.mark.parametrize("family", [4, 6])
def test_frame_that_came_in_by_a_marked_interface_is_dropped(
    loaded: loader.Loaded, gates: Gates, gate: int, family: int
) -> None:
    marks = injectable.InjectableMap(loaded)
    frame = frames.segment(ends(family), frames.SYN)
    marks.mark(FOREIGN_IFINDEX, is_node_sent=True)
    try:
        assert skb.run_gate(loaded, frame, gate, FOREIGN_IFINDEX) == skb.TCX_DROP
        assert skb.run_gate(loaded, frame, gate, FOREIGN_IFINDEX + 1) == skb.TCX_NEXT
        assert skb.run_gate(loaded, frame, gate, FOREIGN_IFINDEX + 64) == skb.TCX_NEXT
    finally:
        marks.mark(FOREIGN_IFINDEX, is_node_sent=False)
    assert skb.run_gate(loaded, frame, gate, FOREIGN_IFINDEX) == skb.TCX_NEXT


@pytest.mark.parametrize("ingress", [abi.INJECTABLE_IFINDEXES, (1 << 31) - 1])
def test_frame_of_an_interface_beyond_the_injectable_map_counts_as_of_the_host(
    loaded: loader.Loaded, gate: int, ingress: int
) -> None:
    frame = frames.segment(ends(4), frames.SYN)
    assert skb.run_gate(loaded, frame, gate, ingress) == skb.TCX_DROP


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT])
def test_enforce_and_strict_both_close_the_gate(
    loaded: loader.Loaded, gates: Gates, gate: int, mode: Mode
) -> None:
    gates.configure(gate, GateConfig(mode, tuple(POD.values())))
    try:
        answer = skb.run_gate(loaded, frames.segment(ends(4), frames.SYN), gate)
    finally:
        gates.configure(gate, GateConfig(Mode.ENFORCE, tuple(POD.values())))
    assert answer == skb.TCX_DROP


def test_off_passes_and_counts_nothing(loaded: loader.Loaded, gates: Gates, gate: int) -> None:
    counting = Counting(gates, gate)
    gates.configure(gate, GateConfig(Mode.OFF, tuple(POD.values())))
    try:
        answer = skb.run_gate(loaded, frames.segment(ends(4), frames.SYN), gate)
    finally:
        gates.configure(gate, GateConfig(Mode.ENFORCE, tuple(POD.values())))
    assert answer == skb.TCX_NEXT
    assert counting.moved() == {}


@pytest.mark.parametrize("count", [17, 200])
def test_every_one_of_many_addresses_is_the_pods(
    loaded: loader.Loaded, gates: Gates, gate: int, count: int
) -> None:
    many = tuple(frames.address(f"198.18.3.{number}") for number in range(1, 1 + count))
    gates.configure(gate, GateConfig(Mode.ENFORCE, many))
    counting = Counting(gates, gate)
    try:
        for own in many:
            skb.run_gate(loaded, frames.segment(frames.Ends(NODE[4], own), frames.SYN), gate)
    finally:
        gates.configure(gate, GateConfig(Mode.ENFORCE, tuple(POD.values())))
    assert counting.moved() == {(Verdict.DROP, Reason.NODE): count}
