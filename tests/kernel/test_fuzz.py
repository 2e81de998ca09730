"""Random frames: those that open a TCP connection in the pod, or inject into one, are dropped."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bpf import errors, loader, pins
from bpf.gate_config import GateConfig
from bpf.gate_table import GateTable
from bpf.verdicts import Mode, Verdict
from tests.kernel import cases, frames, model, offers, skb

pytestmark = pytest.mark.kernel

ENDS = {
    4: frames.Ends(frames.address("198.18.0.1"), frames.address("198.18.1.1")),
    6: frames.Ends(frames.address("fd00:18::1"), frames.address("fd00:18:0:1::1")),
}
OWN = {ends.pod.packed for ends in ENDS.values()}
IFINDEX = 1
FOREIGN_IFINDEX = 4242
HEADERS = 14 + 40 + 20
SEEDS = [frame for case in cases.CASES for frame in case.frames(ENDS[case.family])]


@pytest.fixture(scope="module", autouse=True)
def gate(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[None]:
    addresses = [ends.pod for ends in ENDS.values()]
    table = GateTable(loaded, installation.maps)
    table.set(IFINDEX, GateConfig(Mode.ENFORCE, tuple(addresses)), 0)
    yield
    table.delete(IFINDEX)
    table.close()


@st.composite
def chains(draw: st.DrawFn) -> bytes:
    """TCP behind any headers, tags, options and flags that exist."""
    ends = ENDS[draw(st.sampled_from((4, 6)))]
    flags = draw(st.integers(0, 255))
    options = bytes((1,)) * (4 * draw(st.integers(0, 10)))
    payload = frames.tcp(ends, flags, options=options, data=draw(st.binary(max_size=16)))
    tags = draw(
        st.lists(
            st.sampled_from((frames.ETHERTYPE_VLAN, frames.ETHERTYPE_SERVICE_VLAN)), max_size=2
        )
    )
    if ends.family == 4:
        padding = bytes((1,)) * (4 * draw(st.integers(0, 10)))
        bits = draw(st.sampled_from((0, 0x4000, 0x8000, 0x2000, 1, 0x2001)))
        packet = frames.ipv4(ends, frames.TCP, payload, options=padding, fragment=bits)
        return frames.ethernet(ends, frames.ETHERTYPE_IPV4, packet, tags=tuple(tags))
    following = frames.TCP
    kinds = (frames.HOPOPTS, frames.DSTOPTS, frames.ROUTING, frames.FRAGMENT, frames.AH)
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=12)):
        if kind == frames.ROUTING:
            header = frames.routing(following, draw(st.integers(0, 2)))
        elif kind == frames.FRAGMENT:
            offset, more = 8 * draw(st.integers(0, 2)), draw(st.booleans())
            header = frames.fragment_header(following, offset, more=more, identification=1)
        elif kind == frames.AH:
            header = frames.authentication(following)
        else:
            header = frames.extension(following, words=draw(st.integers(0, 3)))
        payload, following = header + payload, kind
    packet = frames.ipv6(ends, following, payload)
    return frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet, tags=tuple(tags))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A frame of the table with some of its header bytes changed, cut or made longer."""
    frame = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        index = draw(st.integers(12, min(len(frame), HEADERS) - 1))
        frame[index] = draw(st.integers(0, 255))
    length = draw(st.integers(34, len(frame) + 8))
    return bytes(frame[:length]) + bytes(max(0, length - len(frame)))


def run_gate(loaded: loader.Loaded, frame: bytes, ingress_ifindex: int = 0) -> int:
    try:
        return skb.run_gate(loaded, frame, IFINDEX, ingress_ifindex)
    except errors.BpfError:
        assume(False)  # too short for a test run
        raise


@settings(max_examples=1500, deadline=None)
@given(frame=st.one_of(chains(), mutations()))
@example(frame=frames.segment(ENDS[4], frames.SYN))
@example(frame=frames.segment(ENDS[6], frames.SYN | frames.URG))
def test_no_syn_and_no_data_of_the_host_passes(loaded: loader.Loaded, frame: bytes) -> None:
    answer = run_gate(loaded, frame)
    if model.effect(frame, OWN) is not model.Effect.NONE:
        assert answer == skb.TCX_DROP


@pytest.fixture
def test_runs_with_ingress(isolated: None) -> None:
    offers.need_ingress_in_test_runs()


@pytest.mark.usefixtures("test_runs_with_ingress")
@settings(max_examples=300, deadline=None)
@given(frame=st.one_of(chains(), mutations()))
def test_every_forwarded_frame_passes(loaded: loader.Loaded, frame: bytes) -> None:
    assert run_gate(loaded, frame, FOREIGN_IFINDEX) == skb.TCX_NEXT


def test_no_value_of_two_header_bytes_opens_the_gate(loaded: loader.Loaded) -> None:
    """All single bytes and many pairs, faster than a search finds them."""
    chosen = random.Random(18)
    for ends in ENDS.values():
        plain = frames.segment(ends, frames.SYN)
        for index in range(12, len(plain)):
            for value in range(256):
                frame = bytearray(plain)
                frame[index] = value
                if chosen.random() < 0.5:
                    frame[chosen.randrange(12, len(plain))] = chosen.randrange(256)
                if model.effect(bytes(frame), OWN) is not model.Effect.NONE:
                    assert skb.run_gate(loaded, bytes(frame), IFINDEX) == skb.TCX_DROP


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_model_covers_the_dangerous_frames_of_the_table(case: cases.Case) -> None:
    """The table is checked on a real kernel, so the model is checked with the table."""
    built = case.frames(ENDS[case.family])
    effects = [model.effect(frame, OWN) for frame in built]
    if case.opens and len(built) == 1 and case.name != "header-in-fragment":
        assert effects == [model.Effect.OPENS]
    if case.verdict is Verdict.PASS:
        assert effects == [model.Effect.NONE]
