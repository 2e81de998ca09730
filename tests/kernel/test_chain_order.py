"""Gates are moved first again after another program was attached before them."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.logs import Event
from bpf import abi, clsact, loader, pins, program_specs, syscalls
from bpf.gates import Attachment, Gates
from tests.kernel import foreign, offers, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_attach import attacked, enforcing, links
from tests.kernel.test_neighbours import names

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("moving_copies")]

BEFORE = syscalls.BPF_F_BEFORE
SIDES = {"egress": syscalls.BPF_TCX_EGRESS, "ingress": syscalls.BPF_TCX_INGRESS}


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(80):
        yield made


def attached_gates(make_gates: MakeGates, pod: labs.LabPod, kind: Attachment) -> Gates:
    gates = make_gates(kind)
    gates.install(pod.ifindex, enforcing(pod))
    start_reply_table(gates, pod.ifindex)
    return gates


@pytest.mark.parametrize("side", SIDES)
def test_gate_is_moved_before_a_program_that_was_attached_first(
    make_gates: MakeGates,
    installation: pins.Pins,
    loaded: loader.Loaded,
    pod: labs.LabPod,
    side: str,
) -> None:
    gates = attached_gates(make_gates, pod, Attachment.TCX)
    ours = [syscalls.program_id(fd) for fd in loaded.copies(f"gate_{side}")]
    assert gates.displaced() == set()
    for expected in (ours[1], ours[0]):  # there and back: the copies take turns
        with foreign.attached_by_tcx(
            pod.ifindex, foreign.TC_ACT_OK, BEFORE, where=SIDES[side]
        ) as other:
            assert traffic.node_reaches(pod, 4) == (side == "egress")
            assert gates.displaced() == {pod.ifindex}
            assert not gates.is_first(pod.ifindex)
            gates.move_first(pod.ifindex)
            assert gates.is_first(pod.ifindex)
            assert gates.displaced() == set()
            assert syscalls.query_programs(pod.ifindex, SIDES[side]) == [expected, other]
            assert traffic.node_is_dropped(pod, 4)
    assert len(links(installation)) == 2


def test_moved_gate_is_first_for_the_next_agent_as_well(
    make_gates: MakeGates, installation: pins.Pins, pod: labs.LabPod
) -> None:
    gates = attached_gates(make_gates, pod, Attachment.TCX)
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK, BEFORE):
        gates.move_first(pod.ifindex)
        chain = syscalls.query_programs(pod.ifindex, SIDES["egress"])
        with (
            contextlib.closing(asyncio.run(loader.load(installation))) as loaded,
            contextlib.closing(Gates(loaded, installation, Attachment.TCX)) as again,
        ):
            assert again.is_first(pod.ifindex)
            again.install(pod.ifindex, enforcing(pod))
            assert syscalls.query_programs(pod.ifindex, SIDES["egress"]) == chain


def test_gate_is_moved_without_a_gap(make_gates: MakeGates, pod: labs.LabPod) -> None:
    gates = attached_gates(make_gates, pod, Attachment.TCX)
    with attacked(pod):
        for _ in range(5):
            with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_UNSPEC, BEFORE):
                gates.move_first(pod.ifindex)
                assert gates.is_first(pod.ifindex)


@pytest.mark.parametrize("is_newer_alive", [True, False])
def test_interrupted_move_is_completed(
    make_gates: MakeGates,
    installation: pins.Pins,
    loaded: loader.Loaded,
    pod: labs.LabPod,
    is_newer_alive: bool,
) -> None:
    attached_gates(make_gates, pod, Attachment.TCX)
    front = syscalls.link_create_tcx(
        loaded.programs[program_specs.moving_copy("gate_egress")],
        pod.ifindex,
        SIDES["egress"],
        BEFORE,
    )
    syscalls.pin(front, installation.link("gate_egress", pod.ifindex) + pins.MOVING)
    if not is_newer_alive:
        syscalls.link_detach(front)
    os.close(front)
    with attacked(pod):
        again = attached_gates(make_gates, pod, Attachment.TCX)
    assert len(syscalls.query_programs(pod.ifindex, SIDES["egress"])) == 1
    assert len(links(installation)) == 2
    assert again.installed() == {pod.ifindex: enforcing(pod)}


@pytest.mark.parametrize("side", SIDES)
def test_filter_is_moved_before_one_that_was_attached_first(
    make_gates: MakeGates, pod: labs.LabPod, side: str
) -> None:
    gates = attached_gates(make_gates, pod, Attachment.CLSACT)
    parent = foreign.EGRESS if side == "egress" else foreign.INGRESS
    ours = f"podgate/v{abi.SCHEMA}/gate_{side}"
    for turn in range(1, 4):
        foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, parent=parent, priority=1)
        assert names(pod, side) == ["foreign", ours, *["foreign"] * (turn - 1)]
        assert gates.displaced() == {pod.ifindex}
        gates.move_first(pod.ifindex)
        assert gates.displaced() == set()
        assert names(pod, side) == [ours, *["foreign"] * turn]
    assert traffic.node_is_dropped(pod, 4)
    gates.remove(pod.ifindex)
    assert names(pod, side) == ["foreign"] * 3


def test_filter_is_moved_without_a_gap(make_gates: MakeGates, pod: labs.LabPod) -> None:
    gates = attached_gates(make_gates, pod, Attachment.CLSACT)
    with attacked(pod):
        for _ in range(10):
            foreign.add_filter(pod.ifindex, foreign.TC_ACT_UNSPEC, priority=1)
            gates.move_first(pod.ifindex)
            assert gates.is_first(pod.ifindex)


def test_interrupted_move_of_a_filter_is_completed(
    make_gates: MakeGates, monkeypatch: pytest.MonkeyPatch, pod: labs.LabPod
) -> None:
    class Killed(Exception):
        pass

    def be_killed(*arguments: object) -> NoReturn:
        raise Killed

    gates = attached_gates(make_gates, pod, Attachment.CLSACT)
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_UNSPEC, priority=1)
    with monkeypatch.context() as context:
        context.setattr(clsact.ClsactFilters, "_delete", be_killed)
        with pytest.raises(Killed):
            gates.move_first(pod.ifindex)
    assert len(names(pod)) == 3
    with attacked(pod):
        again = attached_gates(make_gates, pod, Attachment.CLSACT)
    assert names(pod) == [f"podgate/v{abi.SCHEMA}/gate_egress", "foreign"]
    assert again.is_first(pod.ifindex)


def test_filter_behind_a_program_of_tcx_stays_behind(
    make_gates: MakeGates, pod: labs.LabPod
) -> None:
    """tcx runs before clsact: only a gate attached by tcx could be first."""
    offers.need_tcx()
    gates = attached_gates(make_gates, pod, Attachment.CLSACT)
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK):
        gates.move_first(pod.ifindex)
        assert gates.displaced() == {pod.ifindex}
        assert len(names(pod)) == 1


def test_deleted_interface_is_not_displaced(lab: labs.Lab, make_gates: MakeGates) -> None:
    pod = lab.add_pod("gone", 2)
    gates = attached_gates(make_gates, pod, Attachment.TCX)
    lab.remove_pod("gone")
    assert gates.displaced() == set()
    assert gates.is_first(pod.ifindex)


def test_agent_moves_the_gate_first_by_itself(
    lab: labs.Lab, operator: AgentProcess, pod: labs.LabPod
) -> None:
    offers.need_tcx()
    operator.write_manifest(pod, mode="enforce", container={})
    operator.start("--attach", "tcx")
    operator.wait_for("the gate", lambda _: any(operator.log_lines(Event.INTERFACE_GATED)))
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_OK, BEFORE) as other:
        moved = Event.GATE_MOVED_FIRST
        operator.wait_for("the move", lambda _: any(operator.log_lines(moved)))
        assert syscalls.query_programs(pod.ifindex, SIDES["egress"])[-1] == other
