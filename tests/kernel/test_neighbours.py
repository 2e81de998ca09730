"""Gates with foreign programs, filters and qdiscs on the same interface."""

import re
import subprocess

import pytest

from agent.lab import lab as labs
from bpf import abi, loader, syscalls
from bpf.gates import Attachment, GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import foreign, frames, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.test_attach import qdiscs
from tests.kernel.wire import Wire

pytestmark = pytest.mark.kernel


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


def enforcing(pod: labs.LabPod) -> GateConfig:
    return GateConfig(Mode.ENFORCE, pod.addresses)


def names(pod: labs.LabPod, side: str = "egress") -> list[str]:
    """Names of the filters of one side, in their order."""
    command = ["tc", "filter", "show", "dev", pod.interface, side]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(r"handle 0x\w+ (\S+) direct-action", shown)


def test_gate_runs_before_a_program_that_ends_the_chain(
    make_gates: MakeGates, loaded: loader.Loaded, pod: labs.LabPod
) -> None:
    gates = make_gates(Attachment.TCX)
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK) as other:
        gates.install(pod.ifindex, enforcing(pod))
        ours = syscalls.program_id(loaded.programs["gate_egress"])
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) == [ours, other]
        with pod.listen(80):
            assert traffic.node_is_dropped(pod, 4)
        gates.remove(pod.ifindex)
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) == [other]


@pytest.mark.parametrize("kind", list(Attachment))
def test_what_passes_the_gate_is_still_seen_by_the_program_behind_it(
    make_gates: MakeGates, pod: labs.LabPod, kind: Attachment
) -> None:
    """A pass must not end the chain: here the CNI's filter drops all that is left."""
    foreign.add_clsact(pod.ifindex)
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_SHOT)
    gates = make_gates(kind)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (Rule(SourceKind.ANY),)))
    with Wire(pod) as line, pytest.raises(OSError, match="No buffer space"):
        line.node.send(frames.packet(line.ends(4), frames.UDP, frames.udp(line.ends(4), b"passes")))
    assert gates.counts()[pod.ifindex][Verdict.PASS, Reason.RULE] == 1
    gates.remove(pod.ifindex)
    assert names(pod) == ["foreign"]


def test_foreign_qdisc_stays(make_gates: MakeGates, pod: labs.LabPod) -> None:
    foreign.add_clsact(pod.ifindex)
    gates = make_gates(Attachment.CLSACT)
    gates.install(pod.ifindex, enforcing(pod))
    gates.remove(pod.ifindex)
    assert "clsact" in qdiscs(pod)
    assert names(pod) == []


@pytest.mark.parametrize("priority", [1, 2])
def test_filter_runs_before_existing_ones(
    make_gates: MakeGates, pod: labs.LabPod, priority: int
) -> None:
    """A filter that accepts ends the chain, as an accepting program does."""
    foreign.add_clsact(pod.ifindex)
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=priority)
    make_gates(Attachment.CLSACT).install(pod.ifindex, enforcing(pod))
    assert names(pod) == [f"podgate/v{abi.SCHEMA}/gate_egress", "foreign"]
    with pod.listen(80):
        assert traffic.node_is_dropped(pod, 4)
