"""Findings of the node's agent, by its own report; without one, by the pins."""

import asyncio
import pathlib
from collections.abc import Iterator

import msgspec

from agent import VERSION
from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding, found
from agent.admin.report import AgentReport, RulesReport
from agent.errors import AgentRequestError, AgentUnreachableError
from agent.operate.doctor import capabilities, meshes
from agent.operate.doctor.results import Passed, Result
from agent.operate.pinned import findings as pinned_findings
from agent.operate.pinned import status as pinned_status
from agent.operate.pinned.installation import PinsUnreadableError
from agent.policy.default_rules import NODE_DNS
from agent.settings import admin_socket
from bpf import errors, pins
from bpf.verdicts import Mode

_CLOSED = (Mode.ENFORCE.label, Mode.STRICT.label)


async def check(
    bpffs: pathlib.Path, run_directory: pathlib.Path, *, is_in_cluster: bool
) -> list[Result]:
    """Without an agent: what is in force, and until when."""
    socket = admin_socket(run_directory)
    try:
        content, _ = await admin_client.fetch_with_version(socket, "/status")
        report = decoding.decode(content, AgentReport)
        if report.version != VERSION:
            text = f"The agent has version {report.version or 'unknown'}, this command {VERSION}"
            return [found(kinds.AGENT_UNREADABLE, text)]
        rules = decoding.decode(await admin_client.fetch(socket, "/rules"), RulesReport)
    except AgentUnreachableError as error:
        return [*await asyncio.to_thread(_without_agent, bpffs, run_directory, str(error))]
    except AgentRequestError as error:
        return [found(kinds.AGENT_UNREADABLE, str(error))]
    except msgspec.DecodeError as error:
        return [found(kinds.AGENT_UNREADABLE, f"The agent's answer cannot be read ({error})")]
    of_cluster = [dns_rule(report, rules), *nri(report)] if is_in_cluster else []
    of_pods = await asyncio.to_thread(_of_pods, report)
    return [*of_report(report), *of_pods, *of_cluster]


def _of_pods(report: AgentReport) -> list[Result]:
    return [*meshes.check(report), *capabilities.check(report)]


def of_report(report: AgentReport) -> Iterator[Result]:
    """The agent's findings, or that it has none."""
    yield from report.findings
    if not report.findings:
        strictness = "" if report.relay.has_fallback else ", strict without fallback"
        yield Passed("agent", f"Agent running, pid {report.pid}, all pods synced{strictness}.")


def dns_rule(report: AgentReport, rules: RulesReport) -> Result:
    """Whether processes of a cluster's node may reach its DNS once that is enforced."""
    if any(policy.name == NODE_DNS for policy in rules.policies):
        return Passed("dns-rule", "Processes of this node may reach CoreDNS.")
    if report.max_mode not in _CLOSED:
        text = f"At most mode {report.max_mode}: the cluster's DNS stays open."
        return Passed("dns-rule", text)
    return found(
        kinds.DNS_RULE_MISSING,
        f"Rule {NODE_DNS} is not in force: once kube-system is enforced, processes of this node "
        "cannot resolve names by CoreDNS",
    )


def nri(report: AgentReport) -> Iterator[Result]:
    """Whether the runtime calls the agent for new pods. Why not is in the agent's findings."""
    is_connected = report.components.get("nri")
    if is_connected:
        yield Passed(
            "nri",
            "The container runtime calls podgate for each new pod (NRI), so gates precede the "
            "first container; podgate-cni is not needed.",
        )
    elif is_connected is None:
        yield Passed(
            "nri",
            "NRI is not used: containerd before 2.0 lacks it or has it switched off, or "
            "podgate does (--no-nri); podgate-cni is the other way to gates before a pod starts.",
        )


def _without_agent(
    bpffs: pathlib.Path, run_directory: pathlib.Path, unreachable: str
) -> list[Finding]:
    """unreachable: why the agent does not respond."""
    installation = pins.Pins(bpffs)
    try:
        return pinned_status.read(installation, run_directory, agent=unreachable).findings
    except (PinsUnreadableError, errors.KernelSideError, OSError):
        return pinned_findings.without_pins(installation, run_directory, unreachable)
