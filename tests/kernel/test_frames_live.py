"""Every frame of the table, sent by a packet socket to a pod with a real server behind the gate.

First with the gate off, where the frames marked as dangerous must open a connection; then in
enforce, where none may.
"""

import itertools
from collections.abc import Iterator

import pytest

from bpf import loader, pins
from bpf.gates import Attachment, GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.conftest import fresh_lab
from tests.kernel import cases, frames
from tests.kernel.counting import Counting
from tests.kernel.wire import Wire

pytestmark = pytest.mark.kernel

_ports = itertools.count(20000)


class Gated:
    """One pod with a server, its wire, and its gate."""

    def __init__(self, wire: Wire, gates: Gates) -> None:
        self.wire = wire
        self._gates = gates

    def set_mode(self, mode: Mode) -> Counting:
        pod = self.wire.pod
        self._gates.configure(pod.ifindex, GateConfig(mode, pod.addresses))
        self.wire.flush()
        return Counting(self._gates, pod.ifindex)

    def ends(self, family: int) -> frames.Ends:
        return self.wire.ends(family, source_port=next(_ports))


@pytest.fixture(scope="module")
def gated(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Gated]:
    with fresh_lab() as lab:
        pod = lab.add_pod("web", 1)
        gates = Gates(loaded, installation, Attachment.CLSACT)
        with pod.listen(80), Wire(pod) as wire:
            wire.warm_up()
            gates.install(pod.ifindex, GateConfig(Mode.OFF, pod.addresses))
            yield Gated(wire, gates)
        gates.remove(pod.ifindex)
        gates.close()


def verdicts(counting: Counting) -> dict[tuple[Verdict, Reason], int]:
    """Without the sentinels and the kernel's own packets (ARP, neighbour discovery, RST)."""
    own = (Reason.ARP, Reason.CONTROL, Reason.ESTABLISHED)
    return {key: count for key, count in counting.moved().items() if key[1] not in own}


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.opens], ids=str)
def test_dangerous_frame_opens_a_connection_unless_gated(gated: Gated, case: cases.Case) -> None:
    ends = gated.ends(case.family)
    gated.set_mode(Mode.OFF)
    assert gated.wire.inject(case.frames(ends)).opened(ends)

    ends = gated.ends(case.family)
    counting = gated.set_mode(Mode.ENFORCE)
    built = case.frames(ends)
    seen = gated.wire.inject(built)
    assert not seen.opened(ends)
    assert seen.arrived == ()
    assert verdicts(counting) == {(Verdict.DROP, case.reason): len(built)}


@pytest.mark.parametrize("case", [case for case in cases.CASES if not case.opens], ids=str)
def test_no_other_frame_arrives_either(gated: Gated, case: cases.Case) -> None:
    """Also if it would pass as the kernel's, which a test run of the same table shows."""
    ends = gated.ends(case.family)
    gated.set_mode(Mode.OFF)
    assert not gated.wire.inject(case.frames(ends)).opened(ends)

    ends = gated.ends(case.family)
    gated.set_mode(Mode.ENFORCE)
    built = case.frames(ends)
    seen = gated.wire.inject(built)
    assert seen.arrived == ()


@pytest.mark.parametrize("family", [4, 6])
def test_frame_cut_at_any_length_never_passes_as_tcp(gated: Gated, family: int) -> None:
    whole = frames.segment(gated.ends(family), frames.SYN, options=bytes((1,)) * 8)
    cut = [whole[:length] for length in range(14, len(whole))]
    counting = gated.set_mode(Mode.ENFORCE)
    assert gated.wire.inject(cut).arrived == ()
    moved = verdicts(counting)
    headers = 14 + (20 if family == 4 else 40)
    readable = headers + 14  # up to the TCP flags
    assert moved == {
        (Verdict.DROP, Reason.UNPARSABLE): readable - 14,
        (Verdict.DROP, Reason.NODE): len(whole) - readable,
    }


@pytest.mark.parametrize("lie", [0x0000, 0x0001, frames.ETHERTYPE_ARP, 0x88CC, 0x86DD, 0x0800])
@pytest.mark.parametrize("family", [4, 6])
def test_gate_reads_the_frame_and_not_the_socket_s_protocol(
    gated: Gated, family: int, lie: int
) -> None:
    ends = gated.ends(family)
    counting = gated.set_mode(Mode.ENFORCE)
    assert gated.wire.inject([frames.segment(ends, frames.SYN)], lie).arrived == ()
    assert verdicts(counting) == {(Verdict.DROP, Reason.NODE): 1}
