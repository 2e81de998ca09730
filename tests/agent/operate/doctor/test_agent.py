"""Findings about the agent, by its report."""

import pathlib
from typing import Any

import msgspec
import pytest

from agent import VERSION
from agent.admin.report import (
    HookStatus,
    PodSourceStatus,
    PolicyStatus,
    RawSocketStatus,
    RulesReport,
)
from agent.operate.doctor import agent
from agent.operate.doctor.finding import Finding, Severity
from agent.operate.pinned import status as pinned_status
from agent.pods import off_marks
from agent.policy import host_agents
from agent.policy.default_rules import NODE_DNS
from tests.agent.operate.cli.reports import PINNED
from tests.agent.operate.cli.stub_agent import StubAgent
from tests.agent.operate.kubectl.reporting import REPORT, pod

RULES = RulesReport(sources=[], policies=[], problems=[])
DNS_RULES = RulesReport(
    sources=[], policies=[PolicyStatus(name=NODE_DNS, source="", pods=[], rules=[])], problems=[]
)


def of(**changes: Any) -> list[Finding]:
    return list(agent.of_report(msgspec.structs.replace(REPORT, **changes)))


def test_agent_without_a_problem_is_one_line() -> None:
    (finding,) = of()
    assert (finding.check, finding.severity) == ("agent", Severity.OK)
    assert finding.text == "Agent running, pid 1, all pods synced."


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"is_synced": False}, "agent", "Initial pod sync not finished."),
        (
            {"pod_source": PodSourceStatus(pods_from="", problems=["The watch fails."])},
            "pods",
            "The watch fails.",
        ),
        ({"kubelet_unfollowed": "no BTF."}, "kubelet-restarts", "no BTF."),
        (
            {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="Not all.", sources=[])},
            "raw-sockets",
            "--raw-sockets=deny-pods: Not all.",
        ),
        (
            {"hooks": [HookStatus(name="hook_connect4", problem="no room")]},
            "agent-hooks",
            "Hooks that do not work: hook_connect4.",
        ),
        (
            {"relay": msgspec.structs.replace(REPORT.relay, problem="nftables is missing.")},
            "relay",
            "Strict unavailable, falling back to enforce: nftables is missing.",
        ),
    ],
)
def test_each_problem_of_the_agent_is_a_warning(
    changes: dict[str, Any], check: str, text: str
) -> None:
    (finding,) = of(**changes)
    assert (finding.check, finding.severity) == (check, Severity.WARNING)
    assert text in finding.text
    assert finding.remedy


@pytest.mark.parametrize(
    ("mode", "severity"),
    [
        ("audit", Severity.WARNING),
        ("enforce", Severity.PROBLEM),
        ("strict", Severity.PROBLEM),
    ],
)
def test_unknown_kubelet_is_a_problem_once_a_pod_is_closed(mode: str, severity: Severity) -> None:
    unknown = {"kubelet": None, "kubelet_problem": "no such process."}
    (finding,) = of(**unknown, pods=[pod("web", mode, "Enforced")])
    assert (finding.check, finding.severity) == ("kubelet-cgroup", severity)
    assert "Kubelet not identified: no such process." in finding.text
    assert ("1 pod is in enforce or strict." in finding.text) == (severity is Severity.PROBLEM)
    assert "--kubelet" in finding.remedy


def test_dns_rule_is_needed_where_something_may_be_enforced() -> None:
    limited = msgspec.structs.replace(REPORT, max_mode="audit")
    assert agent.dns_rule(REPORT, RULES).severity is Severity.WARNING
    assert agent.dns_rule(REPORT, DNS_RULES).severity is Severity.OK
    assert agent.dns_rule(limited, RULES).severity is Severity.OK


def test_dns_rule_is_named_as_the_default_rules_name_it() -> None:
    names = {f"podgate:{one.group}/{one.name}" for one in host_agents.TABLE}
    assert NODE_DNS in names


async def test_node_that_is_switched_off_is_a_problem(tmp_path: pathlib.Path) -> None:
    findings = await agent.check(tmp_path, tmp_path, is_in_cluster=False)
    assert [finding.check for finding in findings] == ["agent"]
    off_marks.file(tmp_path).touch()
    off, silent = await agent.check(tmp_path, tmp_path, is_in_cluster=False)
    assert (off.check, off.severity) == ("off", Severity.PROBLEM)
    assert "all of its pods are open" in off.text
    assert silent.severity is Severity.WARNING


async def checked(
    directory: pathlib.Path, answers: dict[str, bytes], *, is_in_cluster: bool = False
) -> list[Finding]:
    """What doctor finds with an agent that answers."""
    with StubAgent(directory, {"/version": VERSION.encode(), **answers}):
        return await agent.check(directory, directory, is_in_cluster=is_in_cluster)


async def test_agent_of_another_version_is_named_and_its_report_is_not_used(
    tmp_path: pathlib.Path,
) -> None:
    other = msgspec.structs.replace(REPORT, version="9.0.0", is_synced=False)
    (finding,) = await checked(tmp_path, {"/status": msgspec.json.encode(other)})
    assert (finding.check, finding.severity) == ("agent", Severity.WARNING)
    assert finding.text == f"The agent has version 9.0.0, this command {VERSION}."
    assert "upgrade" in finding.remedy


async def test_answer_that_is_no_report_is_another_versions(tmp_path: pathlib.Path) -> None:
    (finding,) = await checked(tmp_path, {"/status": b"no JSON"})
    assert (finding.check, finding.severity) == ("agent", Severity.WARNING)
    assert "cannot be read" in finding.text
    assert "upgrade" in finding.remedy


async def test_agent_that_does_not_serve_its_report_is_a_warning(tmp_path: pathlib.Path) -> None:
    (finding,) = await checked(tmp_path, {})
    assert (finding.check, finding.severity) == ("agent", Severity.WARNING)
    assert "does not serve /status" in finding.text


@pytest.mark.parametrize("is_in_cluster", [False, True])
async def test_dns_rule_is_checked_in_a_cluster(
    tmp_path: pathlib.Path, *, is_in_cluster: bool
) -> None:
    answers = {"/status": msgspec.json.encode(REPORT), "/rules": msgspec.json.encode(RULES)}
    found = await checked(tmp_path, answers, is_in_cluster=is_in_cluster)
    assert [finding.check for finding in found] == ["agent"] + ["dns-rule"] * is_in_cluster


async def without_agent(
    monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path, **pinned: Any
) -> list[Finding]:
    """What doctor finds where gates are in force, and no agent runs."""
    found = msgspec.structs.replace(PINNED, **pinned)
    monkeypatch.setattr(pinned_status, "read", lambda *_: found)
    return await agent.check(directory, directory, is_in_cluster=True)


async def test_gates_without_an_agent_are_a_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_agent, exposure = await without_agent(monkeypatch, tmp_path)
    assert (of_agent.check, of_agent.severity) == ("agent", Severity.PROBLEM)
    assert of_agent.text.startswith("No agent responds, and 2 gates are in force, heartbeat 40 s")
    assert (exposure.check, exposure.severity) == ("exposure", Severity.WARNING)
    assert "All gates open in 23 h 59 min" in exposure.text
    opened = msgspec.structs.replace(PINNED.exposures[0], is_open=True)
    alone = {"gates": PINNED.gates[:1], "exposures": [opened], "heartbeat_age_seconds": None}
    of_agent, exposure = await without_agent(monkeypatch, tmp_path, **alone)
    assert "and 1 gate is in force, heartbeat never written." in of_agent.text
    assert exposure.severity is Severity.PROBLEM


async def test_no_agent_and_no_gate_is_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = await without_agent(monkeypatch, tmp_path, gates=[])
    assert (finding.check, finding.severity) == ("agent", Severity.WARNING)
    assert "no agent responds" in finding.text
