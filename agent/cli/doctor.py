"""Checks of `podgate doctor`: kernel, configuration and agent, with what to do about each problem.

Each check tries the feature itself; none reads the kernel's version. Nothing is changed.
"""

import asyncio
import enum
import importlib.util
import os
import pathlib
from collections.abc import Iterator

import msgspec
import pyroute2

from agent import VERSION
from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin.report import AgentReport
from agent.app import preflight
from agent.errors import AgentRequestError, AgentUnreachableError, PreflightError
from agent.gates import tun_interfaces
from agent.gates.worker import netns_cookie
from agent.linux import nft, rtnetlink
from agent.linux.cgroups import cgroup2_mount
from agent.linux.node_routes import NodeRoutes
from agent.pinned import bpftool
from agent.pinned import status as pinned_status
from agent.pinned.exposures import in_words
from agent.pinned.installation import PinsUnreadableError
from agent.settings import DEFAULT_RELAY_RANGES, RelayRanges, admin_socket
from agent.strict import check as strict_check
from bpf import (
    abi,
    artefacts,
    errors,
    features,
    hooks,
    kubelet_unit,
    loader,
    maps,
    pins,
    raw_socket_policy,
)
from bpf.attachment import Attachment

_TIMEOUT_SECONDS = 30


class Severity(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """podgate works, with a feature less."""
    PROBLEM = "problem"
    """podgate does not work, or does not protect pods."""


class Finding(msgspec.Struct, frozen=True):
    """Result of one check; `text` is one sentence."""

    check: str
    severity: Severity
    text: str


async def run_checks(
    bpffs: pathlib.Path,
    run_directory: pathlib.Path,
    relay_ranges: RelayRanges = DEFAULT_RELAY_RANGES,
) -> list[Finding]:
    """Run all checks, in the order of their dependencies; without privileges, only the first."""
    try:
        preflight.check()
    except PreflightError as error:
        return [Finding("privileges", Severity.PROBLEM, str(error))]
    findings = [Finding("privileges", Severity.OK, "bpf(2) is allowed and cgroup v2 is mounted.")]
    findings += _programs()
    findings += _kernel()
    findings += _hooks()
    findings += [_kubelet(), _packet_sockets()]
    findings += _bpffs(bpffs)
    findings.append(_bpftool())
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        checks = (
            *(_nftables(), _tun_interfaces()),
            *(_strict(bpffs, relay_ranges), _agent(bpffs, run_directory)),
        )
        findings += [await check for check in checks]
    return findings


def _programs() -> Iterator[Finding]:
    programs = loader.PROGRAM_SET
    try:
        artefact = artefacts.find(programs, features.offered(programs.features))
    except artefacts.ArtefactError as error:
        yield _compiler(str(error))
    else:
        using = f" ({', '.join(artefact.macros)})" if artefact.macros else ""
        text = f"Prebuilt programs fit this kernel{using}; no compiler is needed."
        yield Finding("programs", Severity.OK, text)


def _compiler(missing: str) -> Finding:
    """missing: why there is nothing prebuilt."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or spec.origin is None:
        return Finding(
            "programs",
            Severity.PROBLEM,
            f"No prebuilt programs ({missing}), and bcc is not installed for this Python; use "
            "podgate's image, or install the distribution's python3-bpfcc and use a virtual "
            "environment made with --system-site-packages.",
        )
    if not (pathlib.Path(spec.origin).parent / "libbcc.py").exists():
        return Finding(
            "programs",
            Severity.PROBLEM,
            f"{spec.origin} is not the BPF compiler collection but another package of that name; "
            "remove it and install the distribution's python3-bpfcc.",
        )
    return Finding("programs", Severity.OK, f"bcc compiles the programs at start: {missing}.")


def _kernel() -> Iterator[Finding]:
    attachment = Attachment.best()
    if attachment is Attachment.TCX:
        yield Finding("attachment", Severity.OK, "Gates are attached by tcx links.")
    else:
        yield Finding(
            "attachment",
            Severity.WARNING,
            "Kernel has no tcx (Linux 6.6): gates are clsact filters, which run after tcx programs "
            "and can be removed by any process with CAP_NET_ADMIN.",
        )
    if features.reports_task_name():
        yield Finding("names", Severity.OK, "Process names are available for drops.")
    else:
        yield Finding(
            "names",
            Severity.WARNING,
            "Kernel reports no process names to gates (Linux 6.16): 'podgate drops' shows cgroups, "
            "and processes only for hooks.",
        )


def _hooks() -> Iterator[Finding]:
    if netns_cookie() is None:
        yield Finding(
            "hooks",
            Severity.WARNING,
            "Kernel has no netns cookies (Linux 5.14): gates drop, but without EPERM for the "
            "process, and the node's tunnels can be used to bypass gates.",
        )
        return
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        problems = [
            (hook.name, problem)
            for hook in abi.HOOKS
            if (problem := hooks.describe_exclusive(root_fd, hook))
        ]
    finally:
        os.close(root_fd)
    for name, problem in problems:
        yield Finding(name, Severity.WARNING, f"{problem}.")
    if not problems:
        yield Finding("hooks", Severity.OK, f"cgroup hooks can be attached at {root}.")


def _kubelet() -> Finding:
    try:
        kubelet_unit.try_to_follow()
    except errors.BpfError as error:
        return Finding(
            "kubelet",
            Severity.WARNING,
            f"Kernel cannot follow the kubelet's restarts ({error.strerror or error}): while the "
            "agent is missing for more than 15 s, host processes outside pods reach declared "
            "ports.",
        )
    return Finding(
        "kubelet", Severity.OK, "Kernel can follow the kubelet's restarts without the agent."
    )


def _packet_sockets() -> Finding:
    try:
        raw_socket_policy.try_to_reject()
    except errors.BpfError as error:
        return Finding(
            "packet-sockets",
            Severity.WARNING,
            f"Kernel cannot reject packet sockets ({error.strerror or error}): "
            "--raw-sockets=deny-pods rejects raw sockets of containers and only counts their "
            "packet sockets.",
        )
    return Finding("packet-sockets", Severity.OK, "Kernel can reject packet sockets of containers.")


def _bpffs(bpffs: pathlib.Path) -> Iterator[Finding]:
    installation = pins.Pins(bpffs)
    if not pins.is_bpffs(bpffs):
        yield Finding(
            "bpffs",
            Severity.PROBLEM,
            f"{bpffs} is not a BPF file system; mount one with 'mount -t bpf bpf {bpffs}' or name "
            "another with --bpffs.",
        )
        return
    if not os.access(bpffs, os.W_OK):
        yield Finding(
            "bpffs",
            Severity.PROBLEM,
            f"{bpffs} is mounted read-only; mount it read-write.",
        )
        return
    try:
        maps.check_pinned(installation)
    except (errors.PinError, errors.BpfError) as error:
        yield Finding("bpffs", Severity.PROBLEM, f"{error}.")
        return
    others = [schema.name for schema in installation.other_schemas()]
    if others:
        yield Finding(
            "bpffs",
            Severity.WARNING,
            f"Pins of another version ({', '.join(others)}) exist below {installation.root}; the "
            "agent removes them after the first sync.",
        )
    else:
        yield Finding("bpffs", Severity.OK, f"{bpffs} is writable.")


async def _nftables() -> Finding:
    try:
        await nft.apply("add table inet podgate-doctor", only_check=True)
    except (nft.NftError, TimeoutError) as error:
        return Finding(
            "nftables",
            Severity.WARNING,
            f"nft does not work ({error}): new pods are open until their gate is attached; install "
            "nftables.",
        )
    return Finding(
        "nftables",
        Severity.OK,
        "nftables works: new pods are blocked until their gate is attached.",
    )


async def _tun_interfaces() -> Finding:
    """A host process writes what comes from a tun interface, and may write its own packets."""
    routes = NodeRoutes()
    carrying = []
    try:
        async with pyroute2.AsyncIPRoute() as netlink:
            for link in tun_interfaces.find_tuns(await rtnetlink.read(netlink)):
                found = tun_interfaces.forwarding_routes(await routes.routes_by(link.index))
                if found:
                    networks = ", ".join(str(route.network) for route in found[:3])
                    carrying.append(f"{link.name} (routes to {networks})")
    except (OSError, pyroute2.NetlinkError) as error:
        return Finding("tun", Severity.WARNING, f"Cannot read tun interfaces and routes: {error}.")
    finally:
        routes.close()
    if carrying:
        return Finding(
            "tun",
            Severity.WARNING,
            f"Packets from {', '.join(carrying)} count as forwarded: a process that may write to "
            "such an interface reaches pods past their gates.",
        )
    return Finding("tun", Severity.OK, "No tun interface carries traffic of other networks.")


def _bpftool() -> Finding:
    try:
        path = bpftool.find()
    except bpftool.BpftoolError as error:
        return Finding("bpftool", Severity.WARNING, str(error))
    return Finding("bpftool", Severity.OK, f"{path} is there for 'podgate programs'.")


async def _strict(bpffs: pathlib.Path, ranges: RelayRanges) -> Finding:
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    if problem := await strict_check.find_problem(ranges, root, pins.Pins(bpffs)):
        return Finding(
            "strict",
            Severity.WARNING,
            f"strict unavailable, falling back to enforce: {problem}",
        )
    return Finding(
        "strict", Severity.OK, f"Relay ranges {' and '.join(map(str, ranges.networks))} are free."
    )


async def _agent(bpffs: pathlib.Path, run_directory: pathlib.Path) -> Finding:
    try:
        content, _ = await admin_client.fetch_with_version(admin_socket(run_directory), "/status")
        report = decoding.decode(content, AgentReport)
    except AgentUnreachableError as error:
        return await asyncio.to_thread(_without_agent, bpffs, run_directory, str(error))
    except AgentRequestError as error:
        return Finding("agent", Severity.WARNING, str(error))
    except msgspec.DecodeError as error:
        return Finding(
            "agent",
            Severity.WARNING,
            f"The agent's answer cannot be read ({error}); use its own podgate command.",
        )
    if report.version != VERSION:
        return Finding(
            "agent",
            Severity.WARNING,
            f"The agent has version {report.version or 'unknown'}, this command {VERSION}; use its "
            "own podgate command.",
        )
    if report.open_ports:
        return Finding("agent", Severity.PROBLEM, report.open_ports)
    for has_problem, text in _agent_problems(report):
        if has_problem:
            return Finding("agent", Severity.WARNING, text)
    strictness = "" if report.relay.has_fallback else ", strict without fallback"
    text = f"Agent running, pid {report.pid}, all pods synced{strictness}."
    return Finding("agent", Severity.OK, text)


def _without_agent(bpffs: pathlib.Path, run_directory: pathlib.Path, why: str) -> Finding:
    """What works without the agent, and what is open."""
    try:
        found = pinned_status.read(pins.Pins(bpffs), run_directory)
    except PinsUnreadableError:
        return Finding("agent", Severity.WARNING, why)
    age = found.heartbeat_age_seconds
    sentences = [
        f"{why} {len(found.gates)} gates work without it"
        + ("." if age is None else f"; its last heartbeat was {in_words(age)} ago."),
        *(each.text for each in found.exposures),
    ]
    is_open = any(each.is_open for each in found.exposures)
    severity = Severity.PROBLEM if is_open else Severity.WARNING
    return Finding("agent", severity, " ".join(sentences))


def _agent_problems(report: AgentReport) -> Iterator[tuple[bool, str]]:
    yield bool(report.pod_source.problems), " ".join(report.pod_source.problems)
    missing = ", ".join(hook.name for hook in report.hooks if hook.problem)
    yield not report.is_synced, "Initial pod sync not finished; retry."
    yield report.kubelet is None, f"Kubelet not identified: {report.kubelet_problem}"
    yield (
        bool(report.kubelet_unfollowed),
        f"Kernel does not follow the kubelet's restarts: {report.kubelet_unfollowed}",
    )
    yield (
        bool(report.raw_sockets.problem),
        f"--raw-sockets={report.raw_sockets.mode}: {report.raw_sockets.problem}",
    )
    yield bool(missing), f"Hooks not attached: {missing}; see 'podgate status'."
    relay = report.relay.problem_text
    yield bool(report.relay.problem), f"{relay[:1].upper()}{relay[1:]}"
