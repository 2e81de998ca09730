"""What is wrong on a node: findings, by the agent's report. Pure functions.

Nothing else in podgate judges a report. A sentence that is also in a pod's condition comes from the
condition or from `agent.pods.isolation`.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.finding import NODE, Finding, found, ordered
from agent.admin.finding_kinds import Kind
from agent.admin.report import AgentReport, HookStatus, PodStatus, ProbeStatus, RelayStatus
from agent.pods import isolation, modes
from agent.pods.conditions import TRUE, TYPES, Condition
from agent.pods.pod import Problem
from bpf import program_specs

# Younger ones wait for their turn: writes are rate limited.
_PENDING_SECONDS = 30.0

SOURCE_PARTS: Mapping[str, Kind] = {
    "watch": kinds.WATCH_BROKEN,
    "conditions": kinds.CONDITIONS_NOT_WRITTEN,
    "runtime": kinds.RUNTIME_UNREACHABLE,
    "kubelet": kinds.KUBELET_UNREACHABLE,
    "nri": kinds.NRI_NOT_CONNECTED,
    "services": kinds.SERVICES_OLD,
    "definition": kinds.DEFINITION_MISSING,
}
"""What each part of the source of pods is if it does not respond."""

POD_PARTS: Mapping[str, Kind] = {
    "gate-lost": kinds.GATE_FAILED,
    "gate": kinds.GATE_NOT_UPDATED,
    "rules": kinds.GATE_NOT_UPDATED,
    "chain": kinds.GATE_NOT_FIRST,
    "addresses": kinds.ADDRESS_UNCONFIRMED,
    "relay": kinds.STRICT_UNAVAILABLE,
    "relay-without-fallback": kinds.RELAY_MISSING_PROBES_FAIL,
    "manifest": kinds.MANIFEST_INVALID,
    "host": kinds.PROBE_HOST,
    "annotation": kinds.ANNOTATION_IGNORED,
    "certificate": kinds.PROBE_CERTIFICATE,
}
"""What a problem with each part of a pod is."""

# Components of which nothing else in the report has the reason.
_COMPONENTS: Mapping[str, tuple[Kind, str]] = {
    "default_deny": (
        kinds.DEFAULT_DENY_MISSING,
        "The table that blocks new pods is not installed: they are open until they have their gate",
    ),
    "cni_plugin": (
        kinds.CNI_PLUGIN_MISSING,
        "podgate-cni is not installed: new pods get their gate after they start",
    ),
    "kubelet_pods_api": (
        kinds.KUBELET_API_MISSING,
        "The kubelet's pods API does not respond: pods come from the API server alone",
    ),
    "state": (
        kinds.STATE_NOT_WRITTEN,
        "State files cannot be written: the next agent starts with older ones",
    ),
}

_BY_REASON: Mapping[str, Mapping[str, Kind]] = {
    labels.ISOLATION_READY: {
        "GateBypassed": kinds.GATE_BYPASSED,
        "GateFailed": kinds.GATE_FAILED,
        isolation.GATE_LOST: kinds.GATE_FAILED,
        "NetnsMissing": kinds.NETNS_UNUSABLE,
        "NetnsInvalid": kinds.NETNS_UNUSABLE,
        "NetnsInUse": kinds.NETNS_UNUSABLE,
        "NetnsNotFound": kinds.POD_STARTING,
        "SandboxMissing": kinds.POD_STARTING,
        "NoInterface": kinds.POD_STARTING,
    },
    labels.PROBES_PASSING: {
        "ProbeFailing": kinds.PROBE_FAILING,
        "ProbePending": kinds.POD_STARTING,
        "ProbeRedirected": kinds.PROBE_REDIRECTED,
        "ProbeCertificateUnusable": kinds.PROBE_CERTIFICATE,
        "ContainerNotRunning": kinds.POD_STARTING,
        "NotScheduled": kinds.POD_STARTING,
        "PodSpecUnknown": kinds.POD_STARTING,
        "NoNetns": kinds.POD_STARTING,
    },
    labels.POLICY_READY: {
        "PoliciesPending": kinds.POD_STARTING,
        "PoliciesNotProgrammed": kinds.POLICY_NOT_PROGRAMMED,
        "WitnessMissing": kinds.POLICY_NOT_CHECKED,
        "PoliciesUnknown": kinds.POLICY_NOT_CHECKED,
        "PolicyCheckFailed": kinds.POLICY_NOT_CHECKED,
        "PolicyChecksOff": kinds.POLICY_NOT_CHECKED,
    },
}
"""By type and reason of a condition that is not as desired. Other reasons are of manifests, and of
probes that cannot be read."""

_ALTHOUGH_TRUE: Mapping[tuple[str, str], Kind] = {
    (labels.ISOLATION_READY, isolation.GATE_LOST): kinds.GATE_FAILED,
    (labels.ISOLATION_READY, "NotSupported"): kinds.NOT_SUPPORTED,
    (labels.POLICY_READY, "PoliciesUnconfirmed"): kinds.POLICY_NOT_PROGRAMMED,
}
"""By type and reason of a condition that is True so that the pod stays, or becomes, Ready."""

_LABELS: Mapping[str, Kind] = {
    modes.NOT_ALLOWED: kinds.MODE_NOT_ALLOWED,
    modes.LIMITED: kinds.MODE_LIMITED,
    modes.LEFT: kinds.MODE_LEFT_BEHIND,
    modes.KEPT: kinds.MODE_KEPT,
    modes.NOT_CLOSED: kinds.CLUSTER_NETWORK_POLICY_NOT_FOLLOWED,
}
_OF_CEILING = (modes.LIMITED, modes.NOT_CLOSED)
_CLOSED = ("enforce", "strict")
# An answer that has just ended is replaced by the next result.
_PASSING_OBSTACLES = frozenset({"", "no_verdict", "stale"})


def find(report: AgentReport) -> list[Finding]:
    """All findings, the worst first."""
    return ordered(
        [
            *_of_agent(report),
            *(unready(report.unsynced or _unsynced(report), report.open_ports)),
            *_of_kubelet(report),
            *_of_source(report),
            *_of_owners(report),
            *of_hooks(report.hooks),
            *_of_guards(report),
            *_of_relay(report.relay),
            *_of_labels(report),
            *(one for pod in report.pods for one in _of_pod(pod, report)),
        ]
    )


def unready(unsynced: str, open_ports: str) -> list[Finding]:
    """What makes /readyz fail. unsynced: why not all pods have been read; open_ports: why declared
    ports are open."""
    found_ones = []
    if open_ports:
        found_ones.append(found(kinds.DECLARED_PORTS_OPEN, open_ports))
    if unsynced:
        found_ones.append(found(kinds.PODS_NOT_SYNCED, unsynced))
    return found_ones


def of_hooks(hooks: Iterable[HookStatus]) -> Iterator[Finding]:
    """Each hook that does not work; also by the pins."""
    for hook in hooks:
        if hook.problem:
            is_for_gates = hook.name == program_specs.RECORD_CONNECTS.name
            rest = "hairpins pass" if is_for_gates else "gates still drop"
            text = f"Hook {hook.name} does not work: {hook.problem.rstrip('.')}; {rest}"
            yield found(kinds.HOOK_MISSING, text)


def off(origin: str) -> Finding:
    """podgate is off on this node. origin: what switches it off, or empty."""
    by = f" by {origin}" if origin else ""
    return found(kinds.OFF, f"podgate is off{by}: all pods of this node are open")


def gate_detached(interface: str, pod: str) -> Finding:
    """A gate without its program. pod: "namespace/name", empty if it is not known."""
    subject = f"pod {pod}" if pod else NODE
    text = f"No program is attached at {interface}: everything passes there"
    return found(kinds.GATE_DETACHED, text, subject)


def relay_missing(problem: str, *, has_fallback: bool) -> Finding:
    """No relay serves, and pods are in strict."""
    if has_fallback:
        text = f"strict unavailable, falling back to enforce: {problem}"
        return found(kinds.RELAY_MISSING, text)
    text = (
        f"strict unavailable, so the kubelet's probes fail (--strict-without-fallback): {problem}"
    )
    return found(kinds.RELAY_MISSING_PROBES_FAIL, text)


def _unsynced(report: AgentReport) -> str:
    return "" if report.is_synced else "initial pod sync not finished"


def _of_agent(report: AgentReport) -> Iterator[Finding]:
    if report.max_mode == "off":
        yield off(report.max_mode_from)
    for name, (kind, text) in _COMPONENTS.items():
        if report.components.get(name) is False:
            yield found(kind, text)
    for text in report.policy_problems:
        yield found(kinds.POLICY_NOT_APPLIED, text)
    for text in report.network_policy_problems:
        yield found(kinds.CLUSTER_NETWORK_POLICY_NOT_UNDERSTOOD, text)
    for text in report.component_problems:
        yield found(kinds.COMPONENT_FAILING, text)
    for text in report.server_problems:
        yield found(kinds.PORT_NOT_OPEN, text)
    for text in report.flow_problems:
        yield found(kinds.FLOWS_NOT_WRITTEN, text)
    for text in report.egress_problems:
        yield found(kinds.HOST_EGRESS_NOT_IN_FORCE, text)
    for text in report.policies_without_effect:
        yield found(kinds.POLICY_WITHOUT_EFFECT, text)


def _of_guards(report: AgentReport) -> Iterator[Finding]:
    """What is configured and not in force, and what has been rejected."""
    sockets, probes = report.raw_sockets, report.host_probes
    if sockets.problem:
        text = f"--raw-sockets={sockets.mode}: {sockets.problem}"
        yield found(kinds.RAW_SOCKETS_NOT_DENIED, text)
    if probes.problem:
        yield found(kinds.HOST_PROBES_NOT_DENIED, probes.problem)
    if report.pods_cgroup_problem:
        yield found(kinds.PODS_CGROUP_MISSING, report.pods_cgroup_problem)
    if sockets.rejected:
        text = f"--raw-sockets={sockets.mode} has rejected raw or packet sockets of containers"
        yield found(kinds.GUARD_DENIED, text)
    if probes.rejected:
        text = f"--kubelet-host-probes={probes.mode} has rejected connections of the kubelet"
        yield found(kinds.GUARD_DENIED, text)


def _of_kubelet(report: AgentReport) -> Iterator[Finding]:
    if report.kubelet is None and not report.open_ports:
        why = report.kubelet_problem or "the report has no reason"
        yield found(kinds.KUBELET_UNKNOWN, f"Kubelet not identified: {why}")
    if report.kubelet_unfollowed:
        text = "Without the agent the kernel does not follow the kubelet's restarts: "
        yield found(kinds.KUBELET_NOT_FOLLOWED, text + report.kubelet_unfollowed)


def _of_source(report: AgentReport) -> Iterator[Finding]:
    source = report.pod_source
    for problem in source.problems:
        yield found(SOURCE_PARTS.get(problem.part, kinds.WATCH_BROKEN), problem.text)
    if source.pending_conditions and source.pending_seconds >= _PENDING_SECONDS:
        text = f"Conditions of {source.pending_conditions} pods are not written to the API server"
        yield found(kinds.CONDITIONS_NOT_WRITTEN, text)


def _of_owners(report: AgentReport) -> Iterator[Finding]:
    """Of conditions: an owner that is gone matters where pods wait for it."""
    now = datetime.datetime.now(datetime.UTC)
    for owner in report.condition_owners:
        since = owner.gone_since
        if owner.is_present or since is None or not owner.waiting_pods:
            continue
        if (now - since).total_seconds() >= owner.stale_after_seconds:
            count = len(owner.waiting_pods)
            pods = "a pod waits" if count == 1 else f"{count} pods wait"
            text = (
                f"No process of this node reports conditions {owner.domain}/*, as its "
                f"ConditionOwner names it: {pods} for them"
            )
            yield found(kinds.CONDITION_OWNER_GONE, text, since=since, pods=owner.waiting_pods)
    for problem in report.condition_owner_problems:
        yield found(kinds.CONDITION_OWNER_INVALID, problem)


def _of_relay(relay: RelayStatus) -> Iterator[Finding]:
    if relay.problem:
        yield relay_missing(relay.problem, has_fallback=relay.has_fallback)
    if relay.is_bypassed:
        text = "The relay is full: new connections of the kubelet go directly to the gate"
        yield found(kinds.RELAY_FULL, text)


def _of_labels(report: AgentReport) -> Iterator[Finding]:
    """A label of a node or namespace decides for many pods: one finding for all of them."""
    pods: dict[Problem, list[PodStatus]] = {problem: [] for problem in report.label_problems}
    for pod in report.pods:
        for problem in pod.mode_problems:
            if report.max_mode == "off" and problem.reason in _OF_CEILING:
                # The finding that podgate is off has it.
                continue
            if problem.subject:
                pods.setdefault(problem, []).append(pod)
            else:
                yield _of_label(problem, [pod], f"pod {pod.full_name}")
    for problem, concerned in pods.items():
        yield _of_label(problem, concerned, problem.subject)


def _of_label(problem: Problem, pods: list[PodStatus], subject: str) -> Finding:
    kind = _LABELS.get(problem.reason, kinds.LABEL_INVALID)
    if problem.reason == modes.INVALID and any(pod.mode not in _CLOSED for pod in pods):
        kind = kinds.LABEL_IGNORED
    return found(kind, problem.message, subject, pods=[pod.full_name for pod in pods])


def _of_pod(pod: PodStatus, report: AgentReport) -> Iterator[Finding]:
    subject = f"pod {pod.full_name}"
    bypassed = [path.address for path in pod.paths if path.result == "bypassed"]
    if bypassed:
        yield found(kinds.GATE_BYPASSED, isolation.bypassed_sentence(bypassed), subject)
    failed = [path.address for path in pod.paths if path.result == "failed"]
    if failed:
        yield found(kinds.PATH_TEST_FAILED, isolation.untested_sentence(failed), subject)
    for problem in pod.problems:
        # The relay's own finding has it.
        if not (problem.part.startswith("relay") and report.relay.problem):
            kind = POD_PARTS.get(problem.part, kinds.GATE_NOT_UPDATED)
            yield found(kind, problem.text, subject)
    if pod.existing_flows:
        text = "Flows that the host opened before enforcement are still open"
        yield found(kinds.EXISTING_FLOWS, text, subject)
    for probe in pod.probes:
        if probe.answer is not None and probe.answer.obstacle not in _PASSING_OBSTACLES:
            yield found(kinds.PROBE_NOT_ANSWERED, probe.answer.problem, subject)
    differing = [probe for probe in pod.probes if probe.lookups_differ]
    if differing:
        text = f"Listeners had room while connections failed: probes {_named(differing)}"
        yield found(kinds.PROBE_LOOKUPS_DIFFER, text, subject)
    redirected = [probe for probe in pod.probes if probe.is_redirected]
    if redirected:
        yield found(kinds.PROBE_REDIRECTED, no_result_sentence(redirected), subject)
    has_problem = any(problem.part == "certificate" for problem in pod.problems)
    lacking = [probe for probe in pod.probes if probe.lacks_certificate]
    if lacking and not has_problem:
        yield found(kinds.PROBE_CERTIFICATE, no_result_sentence(lacking), subject)
    reported = {
        kinds.GATE_BYPASSED: bool(bypassed),
        kinds.GATE_FAILED: any(problem.part == "gate-lost" for problem in pod.problems),
        kinds.PROBE_REDIRECTED: bool(redirected),
        kinds.PROBE_CERTIFICATE: bool(lacking),
    }
    for condition in pod.conditions:
        of_it = kind_of(condition, pod.mode)
        if of_it is not None and not reported.get(of_it):
            yield found(of_it, condition.message, subject, since=condition.last_transition_time)
    if not any(one.type == labels.ISOLATION_READY for one in pod.conditions):
        text = "The agent has not published the pod's condition yet"
        yield found(kinds.POD_STARTING, text, subject)


def no_result_sentence(probes: Sequence[ProbeStatus]) -> str:
    """Of probes that do not get to the application, with the reason of the first."""
    text = probes[0].last_message
    return f"No result of {_named(probes)}: {text[:1].lower()}{text[1:]}"


def _named(probes: Sequence[ProbeStatus]) -> str:
    return ", ".join(f"{probe.container} {probe.type}" for probe in probes)


def kind_of(condition: Condition, mode: str) -> Kind | None:
    """What a condition of a pod in this mode is; None if it is as desired, or another owner's."""
    if condition.type not in TYPES:
        return None
    if condition.status != TRUE:
        by_reason = _BY_REASON.get(condition.type, {})
        return by_reason.get(condition.reason, kinds.MANIFEST_INVALID)
    found = _ALTHOUGH_TRUE.get((condition.type, condition.reason))
    return found if found is not kinds.NOT_SUPPORTED or mode in _CLOSED else None
