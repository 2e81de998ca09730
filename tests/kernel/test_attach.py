"""Gates are attached, survive restarts, are replaced without a gap, and are removed completely."""

import contextlib
import json
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator

import pyroute2
import pytest

from agent.lab import lab as labs
from bpf import cleanup, errors, loader, map_specs, pins, program_specs, syscalls, tcx
from bpf.gates import Attachment, GateConfig
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, offers, traffic, versions, wire
from tests.kernel.conftest import MakeGates

pytestmark = pytest.mark.kernel

BOTH_KINDS = pytest.mark.parametrize("kind", list(Attachment))


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(80):
        yield made


def enforcing(pod: labs.LabPod) -> GateConfig:
    return GateConfig(Mode.ENFORCE, pod.addresses)


def tc(*arguments: str) -> list[dict[str, object]]:
    output = subprocess.run(["tc", "-j", *arguments], check=True, capture_output=True).stdout
    found: list[dict[str, object]] = json.loads(output or b"[]")
    return found


def qdiscs(pod: labs.LabPod) -> list[object]:
    return [qdisc["kind"] for qdisc in tc("qdisc", "show", "dev", pod.interface)]


def filters(pod: labs.LabPod, side: str = "egress") -> list[dict[str, object]]:
    """Without the heads of chains."""
    shown = tc("filter", "show", "dev", pod.interface, side)
    return [entry for entry in shown if "options" in entry and "handle" in str(entry)]


def links(installation: pins.Pins) -> list[str]:
    return sorted(os.listdir(installation.links))


def test_link_without_a_pin_is_detached_with_all_others(
    loaded: loader.Loaded, installation: pins.Pins, pod: labs.LabPod
) -> None:
    """An agent that hangs may have stopped between link and pin."""
    offers.need_tcx()
    before = syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS)
    program = loaded.copies(program_specs.GATE_EGRESS)[0]
    link = syscalls.link_create_tcx(program, pod.ifindex, syscalls.BPF_TCX_EGRESS, 0)
    try:
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) != before
        cleanup.detach_everything(installation)
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) == before
    finally:
        os.close(link)


@BOTH_KINDS
def test_gate_closes_and_opens_again(
    make_gates: MakeGates, installation: pins.Pins, pod: labs.LabPod, kind: Attachment
) -> None:
    gates = make_gates(kind)
    gates.install(pod.ifindex, enforcing(pod))
    assert traffic.node_is_dropped(pod, 4)
    assert gates.installed() == {pod.ifindex: enforcing(pod)}

    gates.remove(pod.ifindex)
    assert traffic.node_reaches(pod, 4)
    assert gates.installed() == {}
    assert gates.counts() == {}
    assert links(installation) == []
    assert filters(pod) == filters(pod, "ingress") == []
    if tcx.TcxLinks.is_supported():
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) == []


def test_all_gates_open_before_they_are_detached_and_close_again(
    make_gates: MakeGates, lab: labs.Lab
) -> None:
    gates = make_gates(None)
    pods = [lab.add_pod(f"pod{number}", number) for number in range(3)]
    with contextlib.ExitStack() as listeners:
        for pod in pods:
            listeners.enter_context(pod.listen(80))
            gates.install(pod.ifindex, enforcing(pod))
        assert all(traffic.node_is_dropped(pod, 6) for pod in pods)

        gates.open([pod.ifindex for pod in pods])
        assert all(traffic.node_reaches(pod, family) for pod in pods for family in (4, 6))
        assert gates.installed().keys() == {pod.ifindex for pod in pods}

        for pod in pods:
            gates.install(pod.ifindex, enforcing(pod))
        assert all(traffic.node_is_dropped(pod, 4) for pod in pods)


def test_gate_without_its_qdisc_s_place_is_an_error_and_not_open(
    make_gates: MakeGates, pod: labs.LabPod
) -> None:
    """The CNI plugin bandwidth adds an ingress qdisc, whose egress filters would see nothing."""
    with pyroute2.IPRoute() as netlink:
        netlink.tc("add", "ingress", pod.ifindex)
    gates = make_gates(Attachment.CLSACT)
    with pytest.raises(errors.AttachError, match="has a qdisc ingress where clsact is needed"):
        gates.install(pod.ifindex, enforcing(pod))
    assert gates.installed() == {}


@BOTH_KINDS
def test_removing_twice_or_what_never_was_does_nothing(
    make_gates: MakeGates, pod: labs.LabPod, kind: Attachment
) -> None:
    gates = make_gates(kind)
    gates.install(pod.ifindex, enforcing(pod))
    gates.remove(pod.ifindex)
    gates.remove(pod.ifindex)
    gates.remove(4095)


@BOTH_KINDS
def test_interface_that_is_gone_leaves_nothing(
    lab: labs.Lab,
    make_gates: MakeGates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    kind: Attachment,
) -> None:
    gates = make_gates(kind)
    first, second = lab.add_pod("a", 1), lab.add_pod("b", 2)
    gates.install(first.ifindex, enforcing(first))
    gates.install(second.ifindex, enforcing(second))
    lab.remove_pod("a")
    assert gates.installed() == {second.ifindex: enforcing(second)}
    assert len(list(loaded.map(map_specs.GATE_SLOTS).items())) == 1
    assert gates.counts().keys() == {second.ifindex}
    assert len(links(installation)) == (kind is Attachment.TCX)


@BOTH_KINDS
def test_no_such_interface_is_one_sentence_and_leaves_nothing(
    make_gates: MakeGates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    lab: labs.Lab,
    kind: Attachment,
) -> None:
    gates = make_gates(kind)
    with pytest.raises(errors.AttachError, match=r"interface 4095: .*No such device") as caught:
        gates.install(4095, GateConfig(Mode.ENFORCE, ()))
    assert "\n" not in str(caught.value)
    assert list(loaded.map(map_specs.GATE_SLOTS).items()) == []
    assert gates.counts() == {}
    assert links(installation) == []


@BOTH_KINDS
def test_pod_with_many_addresses_is_gated_at_each_of_them(
    make_gates: MakeGates, pod: labs.LabPod, kind: Attachment
) -> None:
    gates = make_gates(kind)
    many = tuple(frames.address(f"198.18.3.{number}") for number in range(1, 18))
    config = GateConfig(Mode.ENFORCE, (*many, *pod.addresses))
    assert gates.install(pod.ifindex, config) == ""
    assert gates.installed() == {pod.ifindex: config}
    for version in (4, 6):
        assert traffic.node_is_dropped(pod, version)


def identity(pod: labs.LabPod, installation: pins.Pins, kind: Attachment) -> object:
    """Identity of the attachment, which a new attach would change: the link's id, or the filter."""
    if kind is Attachment.CLSACT:
        return filters(pod)
    (name,) = links(installation)
    fd = syscalls.open_pin(str(installation.links / name))
    with contextlib.closing(os.fdopen(fd, "rb")):
        return syscalls.object_info(fd, 24)


@BOTH_KINDS
def test_restart_finds_its_gates_and_uses_them_again(
    make_gates: MakeGates, installation: pins.Pins, pod: labs.LabPod, kind: Attachment
) -> None:
    make_gates(kind).install(pod.ifindex, enforcing(pod))
    assert traffic.node_is_dropped(pod, 4)
    before = identity(pod, installation, kind)
    again = make_gates(kind)
    assert again.installed() == {pod.ifindex: enforcing(pod)}
    again.install(pod.ifindex, enforcing(pod))
    assert identity(pod, installation, kind) == before
    assert again.counts()[pod.ifindex][Verdict.DROP, Reason.NODE] == 1  # counters continue


@contextlib.contextmanager
def attacked(pod: labs.LabPod) -> Iterator[Callable[[], int]]:
    """A thread that sends SYNs to the pod all the time; how many have been sent so far."""
    sent = 0
    stopping = threading.Event()
    with wire.Wire(pod) as line:
        line.warm_up()
        frame = frames.segment(line.ends(4), frames.SYN)

        def send() -> None:
            nonlocal sent
            while not stopping.is_set():
                wire.send(line.node, frame)
                sent += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield lambda: sent
        finally:
            stopping.set()
            thread.join()
        assert frame not in line.flush().arrived


@BOTH_KINDS
def test_new_version_takes_over_without_a_gap(
    tmp_path: pathlib.Path,
    make_gates: MakeGates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    pod: labs.LabPod,
    kind: Attachment,
) -> None:
    with versions.other_version(tmp_path, installation, loaded) as other:
        ours = syscalls.program_id(loaded.programs["gate_egress"])
        theirs = syscalls.program_id(other.programs["gate_egress"])
        assert ours != theirs
        old, new = make_gates(kind), make_gates(kind, other)
        old.install(pod.ifindex, enforcing(pod))
        with attacked(pod) as sent:
            for _ in range(20):
                before = sent()
                new.install(pod.ifindex, enforcing(pod))
                if kind is Attachment.TCX:
                    chain = syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS)
                    assert chain == [theirs]
                else:
                    assert len(filters(pod)) == 1
                old.install(pod.ifindex, enforcing(pod))
                while sent() == before:  # ends with the thread, which always sends
                    pass


@pytest.mark.parametrize(
    ("before", "after"),
    [(Attachment.TCX, Attachment.CLSACT), (Attachment.CLSACT, Attachment.TCX)],
)
def test_other_kind_of_attachment_takes_over_without_a_gap(
    make_gates: MakeGates,
    installation: pins.Pins,
    pod: labs.LabPod,
    before: Attachment,
    after: Attachment,
) -> None:
    first = make_gates(before)
    first.install(pod.ifindex, enforcing(pod))
    with attacked(pod):
        second = make_gates(after)
        second.install(pod.ifindex, enforcing(pod))
    is_tcx = after is Attachment.TCX
    assert len(links(installation)) == is_tcx
    assert len(filters(pod)) == (not is_tcx)
    assert second.installed() == {pod.ifindex: enforcing(pod)}
    assert traffic.node_is_dropped(pod, 4)


def test_start_beside_a_process_that_removes_pins_finds_no_gate_there(
    make_gates: MakeGates,
    installation: pins.Pins,
    pod: labs.LabPod,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`podgate off --node` may remove each between its name and its opening."""
    make_gates(Attachment.TCX).install(pod.ifindex, enforcing(pod))
    find = pins.Pins.find_links

    def find_and_remove(found_in: pins.Pins, name: str) -> list[pathlib.Path]:
        found = find(found_in, name)
        for path in found:
            path.unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(pins.Pins, "find_links", find_and_remove)
        started = make_gates(Attachment.TCX)
        assert not started.is_attached(pod.ifindex)
    started.install(pod.ifindex, enforcing(pod))
    assert traffic.node_is_dropped(pod, 4)
