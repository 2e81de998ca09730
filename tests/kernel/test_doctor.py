"""Findings of `podgate doctor` on machines that lack something."""

import json
import pathlib
import subprocess
import sys

import pytest

from agent.cli import doctor
from agent.cli.doctor import Finding, Severity
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.linux.nft import NftMissingError
from bpf import abi, artefacts, pins, syscalls
from tests.kernel import foreign

pytestmark = pytest.mark.kernel


async def examine(bpffs: pathlib.Path, run_directory: pathlib.Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in await doctor.run_checks(bpffs, run_directory)}


async def test_on_a_good_machine_only_the_agent_is_missing(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    findings = await examine(fresh_pins.bpffs, tmp_path)
    agent = findings.pop("agent")
    # Features that an older kernel lacks are warnings.
    for check in ("attachment", "names", "kubelet", "packet-sockets"):
        assert findings.pop(check).severity is not Severity.PROBLEM
    assert {finding.severity for finding in findings.values()} == {Severity.OK}
    assert agent.severity is Severity.WARNING
    assert "is 'podgate run' running" in agent.text


async def test_directory_without_bpffs_is_a_problem(tmp_path: pathlib.Path) -> None:
    finding = (await examine(tmp_path, tmp_path))["bpffs"]
    assert finding.severity is Severity.PROBLEM
    assert f"mount one with 'mount -t bpf bpf {tmp_path}'" in finding.text


async def test_pin_of_another_layout_is_a_problem(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    fresh_pins.prepare()
    stranger = foreign.create_map(4, 8, 16)
    syscalls.pin(stranger, fresh_pins.map(abi.GATES))
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
    monkeypatch.setattr("agent.pinned.bpftool.shutil.which", lambda *_, **__: None)
    finding = (await examine(fresh_pins.bpffs, tmp_path))["bpftool"]
    assert finding.severity is Severity.WARNING
    assert finding.text.startswith("bpftool is not installed; install the distribution's package")


async def test_program_that_excludes_hooks_is_named(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exclusive(cgroup_fd: int, hook: abi.HookSpec) -> str | None:
        return "program 7 is attached" if hook.name == "hook_connect4" else None

    monkeypatch.setattr("bpf.hooks.describe_exclusive", exclusive)
    findings = await examine(fresh_pins.bpffs, tmp_path)
    assert findings["hook_connect4"] == Finding(
        "hook_connect4", Severity.WARNING, "program 7 is attached."
    )
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
    assert findings["agent"]["severity"] == "warning"
    assert "Kubelet not identified" in findings["agent"]["text"]
