"""The specification of the gate: its table, its page, and some of what documents state."""

import dataclasses
import ipaddress

import pytest

from bpf import abi
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames
from tests.model import facts, flows, gate, page
from tests.model.facts import Gate, Kind, Sent, Socket, Stamp, State

NOW_NS = 10**15
HOST, POD = (ipaddress.ip_address(text) for text in ("198.18.0.1", "198.18.1.1"))
ENDS = frames.Ends(HOST, POD, source_port=53, port=20000)
KUBELET, OTHER = Cgroup(7, "/kubelet", (1, 7)), Cgroup(8, "/other", (1, 8))
PROBE = Rule(SourceKind.KUBELET, 6, 20000, 20000)


def state(mode: Mode = Mode.ENFORCE, *rules: Rule) -> State:
    addresses = frozenset({abi.pack_address(POD)})
    return State(
        Gate(mode, addresses, rules),
        NodeFacts(kubelet_cgroup=KUBELET.id),
        own=(abi.pack_address(HOST),),
    )


def counted(sent: Sent, of: State, at_ns: int = NOW_NS) -> tuple[Verdict, Reason] | None:
    return gate.evaluate(sent, of, at_ns).counted


def test_order_of_checks_in_the_documentation_is_current() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.render(text) == text, "run 'make docs' and commit the result"


def test_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page has no table"):
        page.render("# Security\n")


def test_kubelet_reaches_declared_ports_only() -> None:
    syn = Sent(frames.segment(ENDS, frames.SYN), socket=Socket(Kind.TCP, KUBELET))
    other = dataclasses.replace(syn, socket=Socket(Kind.TCP, OTHER))
    assert counted(syn, state(Mode.ENFORCE, PROBE)) == (Verdict.PASS, Reason.PROBE)
    assert counted(other, state(Mode.ENFORCE, PROBE)) == (Verdict.DROP, Reason.NODE)
    assert counted(syn, state(Mode.ENFORCE)) == (Verdict.DROP, Reason.NODE)
    assert counted(syn, state(Mode.AUDIT)) == (Verdict.WOULD_DROP, Reason.NODE)
    assert counted(syn, state(Mode.OFF)) is None


def test_what_came_in_by_an_interface_is_not_counted_without_a_stamp() -> None:
    syn = Sent(frames.segment(ENDS, frames.SYN), ingress=9)
    assert counted(syn, state()) is None
    stamped = dataclasses.replace(syn, stamp=Stamp.HAND_MADE)
    assert counted(stamped, state()) == (Verdict.DROP, Reason.NODE)
    to_group = dataclasses.replace(ENDS, pod=ipaddress.ip_address("239.18.0.1"))
    datagram = Sent(frames.packet(to_group, frames.UDP, frames.udp(to_group)), ingress=9)
    assert counted(datagram, state()) is None
    looped = dataclasses.replace(datagram, is_looped=True)
    assert counted(looped, state()) == (Verdict.DROP, Reason.STRAY)


def test_syn_that_another_machine_sends_back_is_of_who_connects() -> None:
    syn = Sent(frames.segment(ENDS, frames.SYN, sequence=77), ingress=9)
    of = state(Mode.ENFORCE, Rule(SourceKind.CGROUP, 6, 20000, 20000, cgroup=OTHER.id))
    assert counted(syn, of) is None
    for cgroup, at_ns, expected in (
        (KUBELET, NOW_NS, (Verdict.DROP, Reason.HAIRPIN)),
        (None, NOW_NS, (Verdict.DROP, Reason.HAIRPIN)),
        (OTHER, NOW_NS, (Verdict.PASS, Reason.RULE)),
        (KUBELET, NOW_NS - 11 * facts.SECOND, None),
    ):
        of.connects = {(77).to_bytes(4): facts.Connect(cgroup, at_ns)}
        assert counted(syn, of) == expected


def test_answer_to_the_pod_passes_until_its_question_is_forgotten() -> None:
    of = state()
    question = frames.Ends(POD, HOST, source_port=20000, port=53)
    flows.record(frames.packet(question, frames.UDP, frames.udp(question)), of, NOW_NS)
    answer = Sent(frames.packet(ENDS, frames.UDP, frames.udp(ENDS)), socket=Socket(Kind.UDP, OTHER))
    raw = dataclasses.replace(answer, socket=Socket(Kind.RAW, OTHER))
    assert counted(raw, of) == (Verdict.DROP, Reason.NODE)
    assert counted(answer, of) == (Verdict.PASS, Reason.REPLY)
    late = counted(answer, of, NOW_NS + 2 * facts.LIFETIME_NS)
    assert late == (Verdict.DROP, Reason.NODE)


def test_each_reason_of_a_gate_is_in_the_table() -> None:
    of_others = {Reason.TUNNEL, Reason.EVASION, Reason.RELAY, Reason.HOST_EGRESS}
    found = {reason for check in gate.ORDER for reason in check.reasons}
    assert found == set(Reason) - of_others
