"""Checks of the node's agent by its own report, and of what its death leaves, by the pins."""

import asyncio
import pathlib
from collections.abc import Iterator

import msgspec

from agent import VERSION
from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin.report import AgentReport, RulesReport
from agent.errors import AgentRequestError, AgentUnreachableError
from agent.operate.doctor.finding import Finding, Severity, ok, problem, warning
from agent.operate.pinned import status as pinned_status
from agent.operate.pinned.exposures import in_words
from agent.operate.pinned.installation import PinsUnreadableError
from agent.pods import off_marks
from agent.policy.default_rules import NODE_DNS
from agent.settings import admin_socket
from bpf import errors, pins
from bpf.verdicts import Mode

_CLOSED = (Mode.ENFORCE.label, Mode.STRICT.label)
_OWN_COMMAND = "Use its own podgate command, or upgrade so that both have one version."


async def check(
    bpffs: pathlib.Path, run_directory: pathlib.Path, *, is_in_cluster: bool
) -> list[Finding]:
    """Without an agent: what is in force, and until when."""
    socket = admin_socket(run_directory)
    off = await asyncio.to_thread(lambda: list(_off(bpffs, run_directory)))
    try:
        content, _ = await admin_client.fetch_with_version(socket, "/status")
        report = decoding.decode(content, AgentReport)
        if report.version != VERSION:
            text = f"The agent has version {report.version or 'unknown'}, this command {VERSION}."
            return [*off, warning("agent", text, _OWN_COMMAND)]
        rules = decoding.decode(await admin_client.fetch(socket, "/rules"), RulesReport)
    except AgentUnreachableError as error:
        rest = await asyncio.to_thread(_without_agent, bpffs, run_directory, str(error))
        return [*off, *rest]
    except AgentRequestError as error:
        return [*off, warning("agent", str(error), "See the agent's log.")]
    except msgspec.DecodeError as error:
        text = f"The agent's answer cannot be read ({error})."
        return [*off, warning("agent", text, _OWN_COMMAND)]
    of_cluster = [dns_rule(report, rules)] if is_in_cluster else []
    return [*off, *of_report(report), *of_cluster]


def of_report(report: AgentReport) -> Iterator[Finding]:
    """Each problem that the agent reports; or that it runs."""
    found = list(_problems(report))
    if not found:
        strictness = "" if report.relay.has_fallback else ", strict without fallback"
        text = f"Agent running, pid {report.pid}, all pods synced{strictness}."
        found.append(ok("agent", text))
    yield from found


def _problems(report: AgentReport) -> Iterator[Finding]:
    for text in report.pod_source.problems:
        yield warning("pods", text, "Solve that: until then pods stay as they were last known.")
    if not report.is_synced:
        yield warning("agent", "Initial pod sync not finished.", "Retry.")
    if report.kubelet is None:
        yield _kubelet_unknown(report)
    if report.kubelet_unfollowed:
        yield warning(
            "kubelet-restarts",
            f"Kernel does not follow the kubelet's restarts: {report.kubelet_unfollowed}",
            "Keep the agent running: it follows them itself.",
        )
    if report.raw_sockets.problem:
        yield warning(
            "raw-sockets",
            f"--raw-sockets={report.raw_sockets.mode}: {report.raw_sockets.problem}",
            "See docs/security.md, raw sockets.",
        )
    if missing := ", ".join(hook.name for hook in report.hooks if hook.problem):
        yield warning(
            "agent-hooks",
            f"Hooks that do not work: {missing}.",
            "See 'podgate status' for the reason.",
        )
    if report.relay.problem:
        text = report.relay.problem_text
        yield warning(
            "relay",
            f"{text[:1].upper()}{text[1:]}",
            "Solve that; 'podgate relay restart' starts the relay again.",
        )


def _kubelet_unknown(report: AgentReport) -> Finding:
    """With gates that drop it opens declared ports, or probes fail."""
    remedy = "Name it: --kubelet=process:NAME, unit:kubelet.service or cgroup:/path."
    if report.open_ports:
        return problem("kubelet-cgroup", report.open_ports, remedy)
    closed = sum(pod.mode in _CLOSED for pod in report.pods)
    text = f"Kubelet not identified: {report.kubelet_problem}"
    if not closed:
        return warning("kubelet-cgroup", text, remedy)
    return problem("kubelet-cgroup", f"{text} {_pods(closed)} in enforce or strict.", remedy)


def dns_rule(report: AgentReport, rules: RulesReport) -> Finding:
    """Whether processes of a cluster's node may reach its DNS once that is enforced."""
    if any(policy.name == NODE_DNS for policy in rules.policies):
        return ok("dns-rule", "Processes of this node may reach CoreDNS.")
    if report.max_mode not in _CLOSED:
        return ok("dns-rule", f"At most mode {report.max_mode}: the cluster's DNS stays open.")
    return warning(
        "dns-rule",
        f"Rule {NODE_DNS} is not in force: once kube-system is enforced, processes of this node "
        "cannot resolve names by CoreDNS.",
        "Remove node-dns from --disable-default-rules, or write a HostAccessPolicy for it.",
    )


def _off(bpffs: pathlib.Path, run_directory: pathlib.Path) -> Iterator[Finding]:
    if off_marks.are_set(run_directory, pins.Pins(bpffs)):
        yield problem(
            "off",
            "This node is switched off by 'podgate off --node': all of its pods are open.",
            "Run 'podgate on --node' once that is not needed any more.",
        )


def _without_agent(
    bpffs: pathlib.Path, run_directory: pathlib.Path, unreachable: str
) -> list[Finding]:
    """unreachable: why the agent does not respond."""
    start = "Start it; its log has the reason why it ended."
    try:
        found = pinned_status.read(pins.Pins(bpffs), run_directory)
    except (PinsUnreadableError, errors.KernelSideError, OSError):
        return [warning("agent", unreachable, start)]
    if not found.gates:
        return [warning("agent", unreachable, start)]
    age = found.heartbeat_age_seconds
    beat = "never written" if age is None else f"{in_words(age)} old"
    text = f"No agent responds, and {_gates(len(found.gates))} in force, heartbeat {beat}."
    exposures = [
        Finding(
            "exposure",
            Severity.PROBLEM if exposure.is_open else Severity.WARNING,
            exposure.text,
            "Start the agent.",
        )
        for exposure in found.exposures
    ]
    return [problem("agent", text, start), *exposures]


def _pods(number: int) -> str:
    return "1 pod is" if number == 1 else f"{number} pods are"


def _gates(number: int) -> str:
    return "1 gate is" if number == 1 else f"{number} gates are"
