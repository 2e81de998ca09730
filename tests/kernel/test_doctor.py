"""Findings of `podgate doctor` on machines that lack something."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Kind, Severity
from agent.default_deny import ruleset
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.linux import nft
from agent.linux.nft import NftMissingError
from agent.linux.procfs import Procfs
from agent.operate.doctor import agent as agent_checks
from agent.operate.doctor import capabilities, checks, host_network, packet_sockets, programs
from agent.operate.doctor.results import Passed, Result
from bpf import artefacts, loader, map_specs, neighbours, pins, program_specs, syscalls
from bpf.attachment import Attachment
from bpf.attachments import Direction
from bpf.host_devices import HostDevicePrograms
from tests.agent.operate.page import reports
from tests.kernel import cgroups, foreign, offers
from tests.kernel.conftest import MakeGates
from tests.kernel.test_attach import enforcing

pytestmark = pytest.mark.kernel


async def finding_of(kind: Kind, bpffs: pathlib.Path, run_directory: pathlib.Path) -> Finding:
    report = await checks.run(bpffs, run_directory)
    (found,) = (one for one in report.findings if one.kind == kind.name)
    return found


async def test_on_a_good_machine_only_the_agent_is_missing(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    report = await checks.run(fresh_pins.bpffs, tmp_path)
    found = {finding.kind: finding for finding in report.findings}
    agent = found.pop(kinds.AGENT_MISSING.name)
    assert "is 'podgate run' running" in agent.sentence
    # Features that an older kernel lacks, and a tool.
    for kind in (
        *(kinds.TCX_MISSING, kinds.PROCESS_NAMES_MISSING, kinds.KUBELET_UNFOLLOWABLE),
        *(kinds.PACKET_SOCKETS_UNREJECTABLE, kinds.BPFTOOL_MISSING),
    ):
        found.pop(kind.name, None)
    assert not report.has_problem
    offers.need_netns_cookie()
    offers.need_default_deny()
    assert found == {}


async def test_directory_without_bpffs_is_a_problem(tmp_path: pathlib.Path) -> None:
    finding = await finding_of(kinds.BPFFS_UNUSABLE, tmp_path, tmp_path)
    assert f"Mount one with 'mount -t bpf bpf {tmp_path}'" in finding.remedy


async def test_pin_of_another_layout_is_a_problem(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    fresh_pins.prepare()
    stranger = foreign.create_map(4, 8, 16)
    syscalls.pin(stranger, fresh_pins.map(map_specs.GATES))
    os.close(stranger)
    finding = await finding_of(kinds.BPFFS_UNUSABLE, fresh_pins.bpffs, tmp_path)
    assert "is not the map that this version uses" in finding.sentence


async def test_pins_of_another_version_are_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    pins.Pins(fresh_pins.bpffs, schema=99).prepare()
    finding = await finding_of(kinds.OTHER_PINS, fresh_pins.bpffs, tmp_path)
    assert "another version (v99)" in finding.sentence


async def test_missing_nft_is_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(script: str, *, only_check: bool = False) -> None:
        raise NftMissingError("there is no nft command")

    monkeypatch.setattr("agent.linux.nft.apply", missing)
    finding = await finding_of(kinds.NFTABLES_MISSING, fresh_pins.bpffs, tmp_path)
    assert (
        "(there is no nft command): new pods are open until their gate is attached"
        in finding.sentence
    )


async def test_missing_bpftool_is_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operate.pinned.bpftool.shutil.which", lambda *_, **__: None)
    finding = await finding_of(kinds.BPFTOOL_MISSING, fresh_pins.bpffs, tmp_path)
    assert finding.sentence.startswith("bpftool is not installed")


async def test_program_that_excludes_hooks_is_named(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers.need_netns_cookie()

    def exclusive(cgroup_fd: int, hook: program_specs.HookSpec) -> str | None:
        found = "program 7 is attached; have it attach with that flag"
        return found if hook.name == "hook_connect4" else None

    monkeypatch.setattr("bpf.hooks.describe_exclusive", exclusive)
    finding = await finding_of(kinds.HOOK_TAKEN, fresh_pins.bpffs, tmp_path)
    assert finding.sentence == "Hook hook_connect4: program 7 is attached."
    assert finding.remedy == "Have it attach with that flag."


async def test_another_package_named_bcc_is_a_problem(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(artefacts.DIRECTORY_VARIABLE)
    (tmp_path / "bcc.py").touch()
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    finding = await finding_of(kinds.PROGRAMS_MISSING, fresh_pins.bpffs, tmp_path)
    assert "is not the BPF compiler collection" in finding.sentence


async def test_programs_that_fit_need_no_compiler(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def programs_passed() -> str:
        report = await checks.run(fresh_pins.bpffs, tmp_path)
        (text,) = (one.text for one in report.passed if one.check == "programs")
        return text

    assert (await programs_passed()).startswith("Prebuilt programs fit this kernel")
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    start = "bcc compiles the programs at start: there are no compiled "
    assert (await programs_passed()).startswith(start)


@pytest.fixture
def running(operator: AgentProcess, lab: labs.Lab) -> AgentProcess:
    operator.kubelet = ()
    operator.start()
    operator.wait_for("the initial sync", lambda report: report.is_synced)
    return operator


def test_running_agent_is_checked(running: AgentProcess) -> None:
    where = ("--run-directory", str(running.run_directory), "--bpffs", str(running.bpffs))
    done = running.run("doctor", "--output", "json", *where)
    assert done.returncode == 0, done.stdout
    findings = {one["kind"]: one for one in json.loads(done.stdout)["findings"]}
    # Nothing of that name runs here.
    unknown = findings[kinds.KUBELET_UNKNOWN.name]
    assert unknown["severity"] == "degraded"
    assert "Kubelet not identified" in unknown["sentence"]


def test_dead_agent_is_a_problem_that_names_what_is_in_force(
    operator: AgentProcess, lab: labs.Lab
) -> None:
    operator.write_manifest(lab.add_pod("web", 1), mode="enforce", container={})
    operator.kubelet = ()
    operator.start("--mode", "enforce")
    operator.wait_for("the gate", lambda report: bool(report.pods and report.pods[0].gates))
    operator.stop(signal.SIGKILL)

    async def check() -> list[Result]:
        directory = operator.run_directory
        return await agent_checks.check(operator.bpffs, directory, is_in_cluster=False)

    found = {one.kind: one for one in asyncio.run(check()) if isinstance(one, Finding)}
    dead = found[kinds.AGENT_DEAD.name]
    assert dead.severity == Severity.BROKEN
    assert "No agent responds, and 1 gate is in force, heartbeat " in dead.sentence
    assert found[kinds.GATES_OPEN_SOON.name].sentence.startswith("All gates open in ")


def test_program_before_a_gate_is_a_problem_and_one_after_it_is_named(
    make_gates: MakeGates, installation: pins.Pins, lab: labs.Lab
) -> None:
    offers.need_tcx()
    pod = lab.add_pod("web", 1)
    make_gates(Attachment.TCX).install(pod.ifindex, enforcing(pod))

    def chain_order() -> str:
        results = programs.check(installation.bpffs)
        (text,) = (
            one.sentence if isinstance(one, Finding) else one.text
            for one in results
            if isinstance(one, Finding) or one.check == "chain-order"
        )
        return text

    assert chain_order() == "Each attached gate (1 interfaces) is first in its chain."
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_UNSPEC) as program:
        assert f"; Program id {program} after it." in chain_order()
        with foreign.attached_by_tcx(
            pod.ifindex, foreign.TC_ACT_OK, syscalls.BPF_F_BEFORE
        ) as other:
            before = f"Program id {other} runs before the gate on {pod.interface}"
            assert before in chain_order()


def test_podgates_own_program_before_a_gate_is_no_problem(
    make_gates: MakeGates, installation: pins.Pins, loaded: loader.Loaded, lab: labs.Lab
) -> None:
    """As at the host's end of the relay's pair."""
    offers.need_tcx()
    pod = lab.add_pod("web", 1)
    make_gates(Attachment.TCX).install(pod.ifindex, enforcing(pod))
    devices = HostDevicePrograms(loaded, installation, Attachment.TCX)
    try:
        devices.ensure_pairs({pod.ifindex})
        (chain,) = neighbours.chains(installation, Direction.EGRESS)
        assert (chain.before, chain.after) == ((), ())
    finally:
        devices.ensure_pairs(set())
        devices.close()


def test_filter_before_a_gate_that_is_a_filter_is_found(
    make_gates: MakeGates, installation: pins.Pins, lab: labs.Lab
) -> None:
    pod = lab.add_pod("web", 1)
    foreign.add_clsact(pod.ifindex)
    make_gates(Attachment.CLSACT).install(pod.ifindex, enforcing(pod))
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=2)
    (chain,) = neighbours.chains(installation, Direction.EGRESS)
    assert (len(chain.before), len(chain.after)) == (0, 1)
    # Other programs can remove it, which a link's owner alone can.
    assert not chain.is_linked
    assert (
        "(1 interfaces, 1 of them by a filter)"
        in {
            one.check: one.text
            for one in programs.check(installation.bpffs)
            if isinstance(one, Passed)
        }["chain-order"]
    )
    # At the head of the list of the gate's own priority.
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=1)
    (chain,) = neighbours.chains(installation, Direction.EGRESS)
    assert (len(chain.before), len(chain.after)) == (1, 1)


def test_programs_beside_a_hook_are_named_in_their_order(
    loaded: loader.Loaded, fresh_pins: pins.Pins, isolated: None
) -> None:
    """On a cgroup of the test's own. Where a load balancer in connect(2) is decides how a process
    of the host learns that it may not connect to a service's address."""
    (hook,) = (one for one in program_specs.HOOKS if one.name == "hook_connect4")
    with cgroups.cgroup() as group, contextlib.ExitStack() as undo:
        cgroup_fd = os.open(group.directory, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, cgroup_fd)

        def attach(name: str) -> None:
            undo.enter_context(foreign.attached_to_cgroup(cgroup_fd, hook.attach_type, name))

        attach("earlier")
        # The relay's, and another node's of the same kernel.
        attach("relay_connect4")
        attach("hook_connect4")
        link_fd = syscalls.link_create_cgroup(
            loaded.programs[hook.name], cgroup_fd, hook.attach_type
        )
        undo.callback(os.close, link_fd)
        attach("calico_connect_v4"[:15])
        fresh_pins.prepare()
        syscalls.pin(link_fd, str(fresh_pins.links / hook.name))
        beside = neighbours.beside_hook(cgroup_fd, fresh_pins, hook)
        assert [name.partition(" ")[0] for name in beside.before] == ["earlier"]
        assert [name.partition(" ")[0] for name in beside.after] == ["calico_connect_"]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (neighbours.BesideHook(), ["No program of others is on podgate's hooks"]),
        (
            neighbours.BesideHook(before=("cali (id 7)",)),
            ["Program cali (id 7) at the root cgroup", "rejected at once (EPERM)"],
        ),
        (neighbours.BesideHook(after=("cali (id 7)",)), ["dropped by the gate and times out"]),
    ],
)
def test_order_of_connect_hooks_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    installation: pins.Pins,
    isolated: None,
    beside: neighbours.BesideHook,
    expected: list[str],
) -> None:
    def found(_: int, __: pins.Pins, hook: program_specs.HookSpec) -> neighbours.BesideHook:
        return beside if hook.name == "hook_connect4" else neighbours.BesideHook()

    monkeypatch.setattr(neighbours, "beside_hook", found)
    (text,) = (
        one.text
        for one in programs.check(installation.bpffs)
        if isinstance(one, Passed) and one.check == "hooks-beside"
    )
    assert all(part in text for part in expected)
    assert text.count("connect hook") == (1 if beside.before or beside.after else 0)


async def test_nodes_without_a_default_deny_table_have_open_new_pods(
    isolated: None, lab: labs.Lab
) -> None:
    offers.need_default_deny()
    without = await host_network._nftables()
    assert isinstance(without, Passed)
    assert "new pods are open until their gate is attached" in without.text
    await nft.apply(f"add table inet {ruleset.TABLE}")
    try:
        beside = await host_network._nftables()
    finally:
        await nft.apply(f"delete table inet {ruleset.TABLE}")
    assert isinstance(beside, Passed)
    assert beside.text == "nftables works: new pods are blocked until their gate is attached."


def test_packet_socket_from_before_podgate_is_a_warning(isolated: None, lab: labs.Lab) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0):
        older = packet_sockets.of_processes_before(-1.0, Procfs())
        assert isinstance(older, Finding)
        assert f"({os.getpid()})" in older.sentence
        # podgate is older than each process.
        assert isinstance(packet_sockets.of_processes_before(1e9, Procfs()), Passed)
    assert isinstance(packet_sockets.of_processes_before(-1.0, Procfs()), Passed)


@pytest.mark.parametrize(
    ("wrapper", "has_right"),
    [
        ((), True),
        (("setpriv", "--inh-caps=-net_admin", "--bounding-set=-net_admin"), False),
        (("unshare", "--user", "--map-root-user"), False),
    ],
    ids=["root", "without the capability", "hostUsers: false"],
)
def test_pod_that_may_change_the_nodes_interfaces_is_named(
    isolated: None, lab: labs.Lab, wrapper: tuple[str, ...], has_right: bool
) -> None:
    pod = lab.add_pod("web", 1)
    report = reports.report(reports.pod("web", netns=pod.netns.path), pid=os.getpid())
    enter = ["nsenter", f"--net={pod.netns.path}", *wrapper, "sh", "-c", "echo ready; exec cat"]
    with cgroups.cgroup() as group:
        process = group.popen(enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (result,) = capabilities.check(report)
        (of_agent,) = capabilities.check(msgspec.structs.replace(report, pid=process.pid))
        process.communicate()
    assert isinstance(of_agent, Passed), "processes of the agent itself, such as its probes"
    assert isinstance(result, Finding) == has_right
    if isinstance(result, Finding):
        assert result.sentence.endswith("interfaces of the node and of other pods: shop/web.")
