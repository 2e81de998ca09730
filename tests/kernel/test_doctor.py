"""Findings of `podgate doctor` on machines that lack something."""

import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.linux.nft import NftMissingError
from agent.linux.procfs import Procfs
from agent.operate.doctor import agent as agent_checks
from agent.operate.doctor import checks, packet_sockets, programs
from agent.operate.doctor.finding import Finding, Severity
from bpf import abi, artefacts, loader, neighbours, pins, syscalls
from bpf.attachment import Attachment
from bpf.attachments import Direction
from bpf.host_devices import HostDevicePrograms
from tests.kernel import cgroups, foreign, offers
from tests.kernel.conftest import MakeGates
from tests.kernel.test_attach import enforcing

pytestmark = pytest.mark.kernel


async def examine(bpffs: pathlib.Path, run_directory: pathlib.Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in await checks.run(bpffs, run_directory)}


async def test_on_a_good_machine_only_the_agent_is_missing(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    findings = await examine(fresh_pins.bpffs, tmp_path)
    agent = findings.pop("agent")
    # Features that an older kernel lacks are warnings, and so is a tool.
    for check in ("attachment", "names", "kubelet", "packet-sockets", "bpftool"):
        assert findings.pop(check).severity is not Severity.PROBLEM
    assert agent.severity is Severity.WARNING
    assert "is 'podgate run' running" in agent.text
    assert Severity.PROBLEM not in {finding.severity for finding in findings.values()}
    offers.need_netns_cookie()
    offers.need_default_deny()
    assert {finding.severity for finding in findings.values()} == {Severity.OK}


async def test_directory_without_bpffs_is_a_problem(tmp_path: pathlib.Path) -> None:
    finding = (await examine(tmp_path, tmp_path))["bpffs"]
    assert finding.severity is Severity.PROBLEM
    assert f"Mount one with 'mount -t bpf bpf {tmp_path}'" in finding.remedy


async def test_pin_of_another_layout_is_a_problem(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    fresh_pins.prepare()
    stranger = foreign.create_map(4, 8, 16)
    syscalls.pin(stranger, fresh_pins.map(abi.GATES))
    os.close(stranger)
    finding = (await examine(fresh_pins.bpffs, tmp_path))["bpffs"]
    assert finding.severity is Severity.PROBLEM
    assert "is not the map that this version uses" in finding.text


async def test_pins_of_another_version_are_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    pins.Pins(fresh_pins.bpffs, schema=99).prepare()
    finding = (await examine(fresh_pins.bpffs, tmp_path))["bpffs"]
    assert finding.severity is Severity.WARNING
    assert "another version (v99)" in finding.text


async def test_missing_nft_is_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(script: str, *, only_check: bool = False) -> None:
        raise NftMissingError("there is no nft command")

    monkeypatch.setattr("agent.linux.nft.apply", missing)
    finding = (await examine(fresh_pins.bpffs, tmp_path))["nftables"]
    assert finding.severity is Severity.WARNING
    assert (
        "(there is no nft command): new pods are open until their gate is attached" in finding.text
    )


async def test_missing_bpftool_is_a_warning(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operate.pinned.bpftool.shutil.which", lambda *_, **__: None)
    finding = (await examine(fresh_pins.bpffs, tmp_path))["bpftool"]
    assert finding.severity is Severity.WARNING
    assert finding.text.startswith("bpftool is not installed")


async def test_program_that_excludes_hooks_is_named(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers.need_netns_cookie()

    def exclusive(cgroup_fd: int, hook: abi.HookSpec) -> str | None:
        found = "program 7 is attached; have it attach with that flag"
        return found if hook.name == "hook_connect4" else None

    monkeypatch.setattr("bpf.hooks.describe_exclusive", exclusive)
    findings = await examine(fresh_pins.bpffs, tmp_path)
    found = findings["hook_connect4"]
    assert (found.severity, found.text) == (Severity.WARNING, "program 7 is attached.")
    assert found.remedy == "Have it attach with that flag."
    assert "hooks" not in findings


async def test_another_package_named_bcc_is_a_problem(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(artefacts.DIRECTORY_VARIABLE)
    (tmp_path / "bcc.py").touch()
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    finding = (await examine(fresh_pins.bpffs, tmp_path))["programs"]
    assert finding.severity is Severity.PROBLEM
    assert "is not the BPF compiler collection" in finding.text


async def test_programs_that_fit_need_no_compiler(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = (await examine(fresh_pins.bpffs, tmp_path))["programs"]
    assert finding.text.startswith("Prebuilt programs fit this kernel")
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    finding = (await examine(fresh_pins.bpffs, tmp_path))["programs"]
    assert finding.severity is Severity.OK
    assert finding.text.startswith("bcc compiles the programs at start: there are no compiled ")


@pytest.fixture
def running(operator: AgentProcess, lab: labs.Lab) -> AgentProcess:
    operator.kubelet = ()
    operator.start()
    operator.wait_for("the initial sync", lambda report: report.is_synced)
    return operator


def test_running_agent_is_checked(running: AgentProcess) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agent", "doctor", "--output", "json"),
            *("--run-directory", str(running.run_directory), "--bpffs", str(running.bpffs)),
        ],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    # Nothing of that name runs here.
    assert findings["kubelet-cgroup"]["severity"] == "warning"
    assert "Kubelet not identified" in findings["kubelet-cgroup"]["text"]


def test_dead_agent_is_a_problem_that_names_what_is_in_force(
    operator: AgentProcess, lab: labs.Lab
) -> None:
    operator.write_manifest(lab.add_pod("web", 1), mode="enforce", container={})
    operator.kubelet = ()
    operator.start("--mode", "enforce")
    operator.wait_for("the gate", lambda report: bool(report.pods and report.pods[0].gates))
    operator.stop(signal.SIGKILL)

    async def check() -> list[Finding]:
        directory = operator.run_directory
        return await agent_checks.check(operator.bpffs, directory, is_in_cluster=False)

    dead, *exposures = asyncio.run(check())
    assert (dead.check, dead.severity) == ("agent", Severity.PROBLEM)
    assert "No agent responds, and 1 gate is in force, heartbeat " in dead.text
    (later,) = (one for one in exposures if one.text.startswith("All gates open in "))
    assert later.severity is Severity.WARNING


def test_program_before_a_gate_is_a_problem_and_one_after_it_is_named(
    make_gates: MakeGates, installation: pins.Pins, lab: labs.Lab
) -> None:
    offers.need_tcx()
    pod = lab.add_pod("web", 1)
    make_gates(Attachment.TCX).install(pod.ifindex, enforcing(pod))

    def chain_order() -> Finding:
        (found,) = (one for one in programs.check(installation.bpffs) if one.check == "chain-order")
        return found

    assert chain_order().text == "Each gate (1 interfaces) is first in its chain."
    with foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_UNSPEC) as program:
        after = chain_order()
        assert after.severity is Severity.OK
        assert f"; Program id {program} after it." in after.text
        with foreign.attached_by_tcx(
            pod.ifindex, foreign.TC_ACT_OK, syscalls.BPF_F_BEFORE
        ) as other:
            before = chain_order()
            assert before.severity is Severity.PROBLEM
            assert f"Program id {other} runs before the gate on {pod.interface}" in before.text


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
    # At the head of the list of the gate's own priority.
    foreign.add_filter(pod.ifindex, foreign.TC_ACT_OK, priority=1)
    (chain,) = neighbours.chains(installation, Direction.EGRESS)
    assert (len(chain.before), len(chain.after)) == (1, 1)


def test_program_beside_a_hook_is_named(
    loaded: loader.Loaded, fresh_pins: pins.Pins, isolated: None
) -> None:
    """On a cgroup of the test's own."""
    (hook,) = (one for one in abi.HOOKS if one.name == "hook_connect4")
    with cgroups.cgroup() as group:
        cgroup_fd = os.open(group.directory, os.O_RDONLY | os.O_DIRECTORY)
        link_fd = syscalls.link_create_cgroup(
            loaded.programs[hook.name], cgroup_fd, hook.attach_type
        )
        try:
            (name,) = neighbours.beside_hook(cgroup_fd, fresh_pins, hook)
            assert name.startswith("hook_connect4 (id ")
            fresh_pins.prepare()
            syscalls.pin(link_fd, str(fresh_pins.links / hook.name))
            assert neighbours.beside_hook(cgroup_fd, fresh_pins, hook) == []
        finally:
            os.close(link_fd)
            os.close(cgroup_fd)


def test_packet_socket_from_before_podgate_is_a_warning(isolated: None, lab: labs.Lab) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0):
        older = packet_sockets.of_processes_before(-1.0, Procfs())
        assert older.severity is Severity.WARNING
        assert f"({os.getpid()})" in older.text
        # podgate is older than each process.
        assert packet_sockets.of_processes_before(1e9, Procfs()).severity is Severity.OK
    assert packet_sockets.of_processes_before(-1.0, Procfs()).severity is Severity.OK
