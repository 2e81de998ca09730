"""Gates that another program removes: back at once, and the conditions follow the facts."""

import contextlib
import functools
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.gates.gate_watch import QUIET_SECONDS, REPEAT_SECONDS
from agent.lab.agent_process import AgentProcess, condition_of, log_time
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE, Condition
from bpf import syscalls
from bpf.gates import Attachment, GateCheck
from tests import polling
from tests.kernel import default_deny, foreign, offers, removals, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.removals import EGRESS, delete_qdisc
from tests.kernel.test_attach import enforcing
from tests.nodes import node

pytestmark = pytest.mark.kernel

CROWD = 10

UNPROMPTED_SECONDS = QUIET_SECONDS / 2
"""What takes less was not found by chance. How fast gates are back is bench `back`."""
REMOVALS = 5
MOVES = 2
"""A gate is moved first so often at once."""
RIGHT_SECONDS = 1.0 * polling.PATIENCE**2
"""In which the condition is right again."""


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


def start(operator: AgentProcess, *pods: LabPod, attach: str) -> None:
    for pod in pods:
        operator.write_manifest(pod, mode="enforce", container={})
    operator.start("--attach", attach)
    for pod in pods:
        operator.event(Event.PATH_TESTED, pod=f"demo/{pod.name}", result="confirmed")
        # Now both of its programs are attached.
        operator.event(Event.REPLY_TABLE_READY, pod=f"demo/{pod.name}")


def filter_order(pod: LabPod) -> list[bool]:
    return removals.filter_order(node.SHARED, pod)


def has_filter(pod: LabPod) -> bool:
    return any(filter_order(pod))


def has_gate(pod: LabPod) -> bool:
    return bool(syscalls.query_programs(pod.ifindex, EGRESS)) or has_filter(pod)


def seconds_until(holds: Callable[[], bool]) -> float:
    began = time.monotonic()
    polling.wait_until("the gate is back", holds)
    return time.monotonic() - began


def is_back_by_events(
    remove: Callable[[], object], is_back: Callable[[], bool], times: int
) -> bool:
    """Whether what was removed some times is back before a check without a change would find it."""
    began = time.monotonic()
    for _ in range(times):
        remove()
        polling.wait_until("the gate is back", is_back)
    return time.monotonic() - began < UNPROMPTED_SECONDS


def isolation(report: AgentReport) -> Condition | None:
    return condition_of(report, "web", labels.ISOLATION_READY)


def is_isolated(status: str, reason: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = isolation(report)
        return condition is not None and (condition.status, condition.reason) == (status, reason)

    return holds


@pytest.mark.parametrize("attachment", [Attachment.TCX, Attachment.CLSACT])
def test_check_finds_a_filter_whose_qdisc_is_gone(
    make_gates: MakeGates, pod: LabPod, attachment: Attachment
) -> None:
    gates = make_gates(attachment)
    gates.install(pod.ifindex, enforcing(pod), quickly=True)
    gates.start_reply_tables([pod.ifindex], quickly=True)
    assert gates.check(None) == GateCheck(frozenset(), frozenset())
    assert delete_qdisc(pod)
    assert not gates.is_first(pod.ifindex)
    assert gates.check(set()).lost == set()
    assert gates.check({pod.ifindex}).lost == gates.lost([pod.ifindex]) == {pod.ifindex}
    assert gates.put_back([pod.ifindex]) == {pod.ifindex: True}
    assert gates.check(None) == GateCheck(frozenset(), frozenset())
    assert traffic.node_is_dropped(pod, 4)


@pytest.mark.parametrize("parent", [foreign.EGRESS, foreign.INGRESS])
@pytest.mark.parametrize("attachment", [Attachment.TCX, Attachment.CLSACT])
def test_check_finds_a_filter_that_runs_behind_another_one(
    make_gates: MakeGates, pod: LabPod, attachment: Attachment, parent: str
) -> None:
    """AWS' network policy agent attaches its filters later than the gate, with the same priority:
    the kernel runs the newest one first."""
    gates = make_gates(attachment)
    gates.install(pod.ifindex, enforcing(pod), quickly=True)
    gates.start_reply_tables([pod.ifindex], quickly=True)
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, parent=parent, priority=1)
    assert gates.check(set()) == GateCheck(frozenset(), frozenset())
    assert gates.check({pod.ifindex}) == GateCheck(frozenset(), frozenset({pod.ifindex}))
    gates.move_first(pod.ifindex)
    assert gates.check(None) == GateCheck(frozenset(), frozenset())
    assert traffic.node_is_dropped(pod, 4)


@pytest.mark.parametrize("attachment", [Attachment.TCX, Attachment.CLSACT])
def test_gate_whose_qdisc_was_deleted_is_put_back_side_by_side(
    make_gates: MakeGates, pod: LabPod, attachment: Attachment
) -> None:
    gates = make_gates(attachment)
    gates.install(pod.ifindex, enforcing(pod), quickly=True)
    gates.start_reply_tables([pod.ifindex], quickly=True)
    assert pod.ifindex in gates.filtered
    assert delete_qdisc(pod)
    assert gates.put_back_after_qdisc(pod.ifindex, is_enforcing=True) is True
    assert traffic.node_is_dropped(pod, 4)
    assert gates.put_back_after_qdisc(pod.ifindex, is_enforcing=False) is True
    assert gates.check(None) == GateCheck(frozenset(), frozenset())
    is_linked = attachment is Attachment.TCX
    assert (pod.ifindex in gates.filtered) is not is_linked
    assert has_filter(pod) is not is_linked


def test_filter_that_was_attached_before_the_repair_does_not_stay_beside_the_link(
    make_gates: MakeGates, pod: LabPod
) -> None:
    """The message about the qdisc is older than it."""
    offers.need_tcx()
    gates = make_gates(Attachment.TCX)
    gates.install(pod.ifindex, enforcing(pod), quickly=True)
    for is_enforcing in (True, False):
        assert gates.put_back_after_qdisc(pod.ifindex, is_enforcing=is_enforcing) is True
    assert syscalls.query_programs(pod.ifindex, EGRESS)
    assert not has_filter(pod)


def test_repair_attaches_no_gate_that_podgate_cni_has_removed(
    make_gates: MakeGates, pod: LabPod
) -> None:
    gates = make_gates(Attachment.TCX)
    gates.install(pod.ifindex, enforcing(pod), quickly=True)
    assert delete_qdisc(pod)
    make_gates(Attachment.TCX).remove(pod.ifindex)
    assert gates.put_back_after_qdisc(pod.ifindex, is_enforcing=True) is False
    assert not has_gate(pod)


def test_gate_that_is_removed_before_a_list_of_all_gates_keeps_its_configuration(
    make_gates: MakeGates, pod: LabPod
) -> None:
    gates = make_gates(Attachment.CLSACT)
    gates.install(pod.ifindex, enforcing(pod))
    assert delete_qdisc(pod)
    assert gates.installed() == {}
    assert gates.check(None).lost == {pod.ifindex}
    assert gates.put_back([pod.ifindex]) == {pod.ifindex: True}
    assert gates.installed() == {pod.ifindex: enforcing(pod)}


def test_gate_whose_entries_podgate_cni_has_deleted_is_not_put_back(
    make_gates: MakeGates, pod: LabPod
) -> None:
    gates = make_gates(Attachment.CLSACT)
    gates.install(pod.ifindex, enforcing(pod))
    assert delete_qdisc(pod)
    make_gates(Attachment.CLSACT).remove(pod.ifindex)
    assert gates.put_back([pod.ifindex]) == {pod.ifindex: False}
    assert not has_gate(pod)


def test_filter_whose_qdisc_is_deleted_is_back_at_once(operator: AgentProcess, pod: LabPod) -> None:
    start(operator, pod, attach="clsact")
    assert is_back_by_events(lambda: delete_qdisc(pod), lambda: has_filter(pod), REMOVALS)


def test_filter_that_is_deleted_alone_is_back_at_once(operator: AgentProcess, pod: LabPod) -> None:
    start(operator, pod, attach="clsact")
    assert is_back_by_events(
        lambda: removals.delete_filters(pod), lambda: has_filter(pod), REMOVALS
    )


def test_filter_is_first_again_at_once_after_another_one_was_attached(
    operator: AgentProcess, pod: LabPod
) -> None:
    start(operator, pod, attach="clsact")

    # Each comes right after the last move, before the agent has found the gate first.
    for _ in range(MOVES):
        began = time.monotonic()
        foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=1)
        polling.wait_until("the gate is first", lambda: filter_order(pod)[0])
        # What was displaced before is marked again after `REPEAT_SECONDS`.
        assert time.monotonic() - began < REPEAT_SECONDS / 2


@pytest.mark.parametrize("program", ["gate_egress", "gate_ingress"])
def test_link_that_is_detached_is_back_at_once(
    operator: AgentProcess, pod: LabPod, program: str
) -> None:
    offers.need_tcx()
    start(operator, pod, attach="tcx")
    side = EGRESS if program == "gate_egress" else syscalls.BPF_TCX_INGRESS
    (ours,) = syscalls.query_programs(pod.ifindex, side)
    assert is_back_by_events(
        lambda: removals.detach_link(operator.bpffs, pod, program),
        lambda: syscalls.query_programs(pod.ifindex, side) == [ours],
        1,
    )


def test_gates_of_a_crowd_are_back_at_once_when_another_program_deletes_their_qdiscs(
    operator: AgentProcess, lab: Lab
) -> None:
    """felix, while it attaches its own programs to all new pods of a burst."""
    offers.need_tcx()
    pods = [lab.add_pod(f"web{number}", number) for number in range(1, CROWD + 1)]
    start(operator, *pods, attach="tcx")
    for pod in pods[: CROWD // 2]:
        assert is_back_by_events(
            functools.partial(delete_qdisc, pod), functools.partial(has_gate, pod), 1
        )
    assert is_back_by_events(
        lambda: [delete_qdisc(pod) for pod in pods], lambda: all(map(has_gate, pods)), 1
    )


def test_gate_of_a_crowd_is_first_again_after_a_program_attached_before_it_by_tcx(
    operator: AgentProcess, lab: Lab
) -> None:
    offers.need_tcx()
    pods = [lab.add_pod(f"web{number}", number) for number in range(1, CROWD + 1)]
    start(operator, *pods, attach="tcx")

    def is_first(pod: LabPod, other: int) -> bool:
        return syscalls.query_programs(pod.ifindex, EGRESS)[0] != other

    for pod in pods[: CROWD // 2]:
        with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK) as other:
            delete = functools.partial(delete_qdisc, pod)
            assert is_back_by_events(delete, functools.partial(is_first, pod, other), 1)


def test_bypass_that_ends_with_the_gates_return_leaves_the_condition_within_a_second(
    operator: AgentProcess, pod: LabPod
) -> None:
    """A program that accepts runs before the gate's filter while the first path test runs."""
    offers.need_tcx()
    with bypassed(pod):
        operator.write_manifest(pod, mode="enforce", container={})
        operator.start("--attach", "clsact")
        operator.wait_for("the bypass", is_isolated(FALSE, "GateBypassed"))
    ended = time.monotonic()
    operator.wait_for("the gate", is_isolated(TRUE, "Enforced"))
    assert time.monotonic() - ended < RIGHT_SECONDS


@contextlib.contextmanager
def bypassed(pod: LabPod) -> Iterator[None]:
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK):
        yield


def test_path_is_tested_at_once_when_a_gate_was_put_back(
    operator: AgentProcess, pod: LabPod
) -> None:
    start(operator, pod, attach="clsact")
    assert delete_qdisc(pod)
    line = operator.event(Event.GATE_PUT_BACK, pod="demo/web")
    assert line["ifindex"] == pod.ifindex
    assert log_time(line)


def test_default_deny_table_that_a_firewall_flushes_is_back_within_a_second(
    operator: AgentProcess, pod: LabPod
) -> None:
    operator.write_manifest(pod, mode="enforce", container={})
    operator.start("--mode", "enforce")
    operator.event(Event.DEFAULT_DENY_READY)
    operator.event(Event.REPLY_TABLE_READY, pod="demo/web")
    operator.event(Event.AGENT_STARTED)
    for _ in range(3):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        assert seconds_until(lambda: default_deny.tables() == default_deny.OURS) < RIGHT_SECONDS
