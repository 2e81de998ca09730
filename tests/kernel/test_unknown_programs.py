"""An agent that takes the node over detaches podgate's programs that its version does not have: of
schemas that are gone, and of this one, where names of programs have changed. Others' stay."""

import contextlib
import os
import pathlib
import struct
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import LabPod
from agent.logs import Event
from bpf import clsact, pins, program_specs, syscalls
from bpf.gates import Attachment
from tests import polling
from tests.kernel import cgroups, foreign, links, offers, traffic
from tests.kernel.test_agent import LISTENING, PORT, isolated_as, web
from tests.kernel.test_attach import tc

pytestmark = pytest.mark.kernel

__all__ = ["web"]

OLDER = 2
DIRECTIONS = (clsact.EGRESS, clsact.INGRESS)
ATTACHMENTS = pytest.mark.parametrize("attachment", list(Attachment), ids=str)
(CONNECT,) = (hook for hook in program_specs.HOOKS if hook.name == "hook_connect4")
# r0 = 1; exit: every connect is admitted.
ADMIT = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)


@pytest.fixture
def bridge() -> Iterator[str]:
    with links.made("pg-bridge", "link add pg-bridge type bridge"):
        yield "pg-bridge"


def start(operator: AgentProcess, pod: LabPod, attachment: Attachment) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.start("--attach", attachment.value)
    operator.wait_for("the gate", isolated_as(pod.name, "Enforced"))


def detached(operator: AgentProcess) -> list[str]:
    """Names of the programs that the agent has detached because it does not have them."""
    (line,) = polling.wait_until(
        "unknown programs are detached",
        lambda: list(operator.log_lines(Event.UNKNOWN_PROGRAMS_DETACHED)),
    )
    found: list[str] = line["programs"]
    return found


@ATTACHMENTS
def test_filters_are_removed_and_those_of_others_stay(
    operator: AgentProcess, web: LabPod, bridge: str, attachment: Attachment
) -> None:
    ours, older = pins.Pins(operator.bpffs), pins.Pins(operator.bpffs, OLDER)
    with links.made("idle0", "link add idle0 type veth peer name idle1"):
        attach_filter(older, "guard_tunnels", bridge, clsact.INGRESS)
        attach_filter(older, "judge_on_bridge", bridge, clsact.EGRESS)
        foreign.add_filter(links.index_of(bridge), foreign.TC_ACT_UNSPEC)
        foreign.add_clsact(links.index_of("idle0"))
        attach_filter(ours, "stamp", "idle0", clsact.EGRESS)
        attach_filter(ours, "stamp", "idle1", clsact.EGRESS)
        attach_filter(older, "judge_egress", web.interface, clsact.EGRESS)
        start(operator, web, attachment)
        names = ["guard_tunnels", "judge_egress", "judge_on_bridge", "stamp"]
        assert detached(operator) == names
        for interface in (bridge, "idle0", "idle1", web.interface):
            assert not filters_of(interface) & set(names)
        assert "foreign" in filters_of(bridge)
        assert all(map(has_clsact, (bridge, "idle0", "idle1", web.interface)))
        assert traffic.is_dropped(web.ipv4, PORT)


def test_links_are_removed(operator: AgentProcess, web: LabPod, bridge: str) -> None:
    offers.need_tcx()
    ours, older = pins.Pins(operator.bpffs), pins.Pins(operator.bpffs, OLDER)
    for installation in (ours, older):
        installation.prepare()
    ifindex = links.index_of(bridge)
    with (
        cgroups.cgroup() as group,
        foreign.attached_by_tcx(ifindex, foreign.TC_ACT_UNSPEC) as another,
    ):
        attach_link(ours.link("judge_on_bridge", ifindex), ifindex)
        attach_link(ours.link("judge_egress", ifindex) + pins.MOVING, ifindex)
        attach_link(older.link("judge_on_bridge", ifindex), ifindex)
        attach_hook(ours.links / "hook_bind4", group)
        start(operator, web, Attachment.TCX)
        assert detached(operator) == ["hook_bind4", "judge_egress", "judge_on_bridge"]
        polling.wait_until(
            "the other project's program follows the one of this version",
            lambda: syscalls.query_programs(ifindex, syscalls.BPF_TCX_EGRESS)[1:] == [another],
        )
        assert hooks_of(group) == []
        assert not older.schema.exists()
        assert traffic.is_dropped(web.ipv4, PORT)


def attach_filter(installation: pins.Pins, program: str, interface: str, parent: int) -> None:
    """As a version with a program of this name does; this one drops everything."""
    program_fd = foreign.load_program(foreign.TC_ACT_SHOT)
    filters = clsact.ClsactFilters(installation, program, program_fd, parent)
    with contextlib.closing(filters):
        filters.attach(links.index_of(interface))
    os.close(program_fd)


def filters_of(interface: str) -> set[str]:
    """Of podgate's programs in both directions; names of other projects' filters as they are."""
    found = set()
    for parent in DIRECTIONS:
        with contextlib.closing(clsact.ClsactFilters(pins.Pins(), "", -1, parent)) as filters:
            found |= {one.program for one in filters.chain(links.index_of(interface))}
    return found


def has_clsact(interface: str) -> bool:
    return any(qdisc["kind"] == "clsact" for qdisc in tc("qdisc", "show", "dev", interface))


def attach_link(path: str, ifindex: int) -> None:
    program_fd = foreign.load_program(foreign.TC_ACT_UNSPEC)
    link_fd = syscalls.link_create_tcx(program_fd, ifindex, syscalls.BPF_TCX_EGRESS, 0)
    syscalls.pin(link_fd, path)
    for descriptor in (link_fd, program_fd):
        os.close(descriptor)


def attach_hook(path: pathlib.Path, group: cgroups.Cgroup) -> None:
    program_fd = syscalls.program_load(CONNECT.type, ADMIT, attach_type=CONNECT.attach_type)
    with opened(group) as cgroup_fd:
        link_fd = syscalls.link_create_cgroup(program_fd, cgroup_fd, CONNECT.attach_type)
    syscalls.pin(link_fd, str(path))
    for descriptor in (link_fd, program_fd):
        os.close(descriptor)


def hooks_of(group: cgroups.Cgroup) -> list[int]:
    with opened(group) as cgroup_fd:
        return syscalls.query_cgroup_programs(cgroup_fd, CONNECT.attach_type)[0]


@contextlib.contextmanager
def opened(group: cgroups.Cgroup) -> Iterator[int]:
    descriptor = os.open(group.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
