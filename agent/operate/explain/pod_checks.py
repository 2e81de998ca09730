"""`podgate explain pod`: what a pod needs to be isolated, probed and ready, in order."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.finding import NODE, Finding, of_pod
from agent.admin.finding_kinds import Kind
from agent.admin.findings import gate_detached
from agent.admin.report import AgentReport, PodStatus
from agent.operate import meshes
from agent.operate.explain import pod_readiness, reading
from agent.operate.explain.facts import GateFacts, RelayFacts
from agent.operate.explain.model import Check, PodExplanation
from agent.operate.explain.pods import NamedPod, NamedPods, read_saved
from agent.operate.meshes import PodMesh
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned import status as pinned_status
from agent.operate.pinned.names import Names
from agent.pods import modes
from agent.pods.conditions import TRUE, TYPES
from bpf import pins
from bpf.abi import IPAddress
from bpf.verdicts import Mode

OK, PROBLEM, UNKNOWN = "ok", "problem", "unknown"

_DESCRIBE = "kubectl describe pod -n {0.namespace} {0.name}"
_AGENT = (
    *(kinds.AGENT_DEAD, kinds.AGENT_HUNG, kinds.AGENT_STARTING),
    *(kinds.AGENT_MISSING, kinds.AGENT_UNREADABLE),
    *(kinds.GATES_OPEN, kinds.GATES_OPEN_SOON, kinds.PODS_NOT_SYNCED),
    *(kinds.WATCH_BROKEN, kinds.CONDITIONS_NOT_WRITTEN, kinds.RUNTIME_UNREACHABLE),
)
_MODE = (
    *(kinds.OFF, kinds.LABEL_IGNORED, kinds.LABEL_INVALID, kinds.MODE_LEFT_BEHIND),
    *(kinds.MODE_NOT_ALLOWED, kinds.MODE_LIMITED, kinds.MODE_KEPT),
    kinds.CLUSTER_NETWORK_POLICY_NOT_FOLLOWED,
)
_GATE = (
    *(kinds.GATE_FAILED, kinds.GATE_NOT_UPDATED, kinds.GATE_DETACHED, kinds.GATE_NOT_FIRST),
    kinds.NOT_SUPPORTED,
)
_RELAY = (
    *(kinds.RELAY_MISSING, kinds.RELAY_MISSING_PROBES_FAIL),
    *(kinds.RELAY_FULL, kinds.STRICT_UNAVAILABLE),
)
_KUBELET = (kinds.DECLARED_PORTS_OPEN, kinds.PORTS_OPEN_SOON, kinds.KUBELET_UNKNOWN)
_PROBES = (
    *(kinds.PROBE_FAILING, kinds.PROBE_HOST, kinds.PROBE_NOT_ANSWERED),
    kinds.PROBE_REDIRECTED,
)
_NETNS = (kinds.NETNS_UNUSABLE, kinds.ADDRESS_UNCONFIRMED)
_PATHS = (kinds.GATE_BYPASSED, kinds.PATH_TEST_FAILED)
_SHOWN = {
    kind.name
    for part in (_AGENT, _MODE, _GATE, _RELAY, _KUBELET, _PROBES, _NETNS, _PATHS)
    for kind in part
}
"""Kinds that have a check of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class PodFacts:
    """All that is known of one pod. report: None if no agent responds; findings: of the node;
    gates: those that list one of the pod's addresses; has_pins: whether the gates could be read."""

    pod: NamedPod
    report: AgentReport | None
    findings: Sequence[Finding] = ()
    gates: tuple[GateFacts, ...] = ()
    relay: RelayFacts = dataclasses.field(default_factory=RelayFacts)
    namespace_labels: dict[str, str] | None = None
    node_labels: dict[str, str] | None = None
    has_pins: bool = True
    mesh: PodMesh | None = None

    @property
    def status(self) -> PodStatus | None:
        return self.pod.status

    @property
    def mode(self) -> Mode | None:
        """The desired one; without an agent that of its gates."""
        if self.status is not None:
            return Mode.from_label(self.status.mode)
        return max((gate.mode for gate in self.gates), default=None)


def explain(
    name: str,
    installation: pins.Pins,
    run_directory: pathlib.Path,
    report: AgentReport | None,
) -> PodExplanation:
    """Raises `PodNotFoundError`, and without a report `PinsUnreadableError`. Blocks."""
    saved = read_saved(run_directory)
    gates: list[GateFacts] = []
    relay, has_pins = RelayFacts(), True
    try:
        with pinned_installation.opened(installation) as loaded:
            gates = reading.gates(installation, loaded)
            relay = reading.relay(installation, loaded)
    except pinned_installation.PinsUnreadableError:
        if report is None:
            raise
        has_pins = False
    names = Names(run_directory)
    gated = ((names.pod(gate.ifindex), gate.confirmed) for gate in gates)
    pods = NamedPods(report, saved, (found for found in gated if found[0].name))
    pod = pods.find(name)
    nodes = saved.nodes.objects if saved else []
    return check(
        PodFacts(
            pod,
            report,
            _findings(report, installation, run_directory),
            tuple(_gates_of(pod, gates)),
            relay,
            pods.namespace_labels.get(pod.namespace),
            nodes[0].metadata.labels if nodes else None,
            has_pins,
            meshes.read(pod.status) if pod.status else None,
        )
    )


def _findings(
    report: AgentReport | None, installation: pins.Pins, run_directory: pathlib.Path
) -> list[Finding]:
    if report is not None:
        return report.findings
    return pinned_status.read(installation, run_directory).findings


def check(facts: PodFacts) -> PodExplanation:
    """The checks of one pod, and whether all are well."""
    checks = [*_checks(facts)]
    return PodExplanation(
        namespace=facts.pod.namespace,
        name=facts.pod.name,
        uid=facts.pod.uid,
        is_well=all(found.state == OK for found in checks),
        from_agent=facts.status is not None,
        checks=checks,
    )


def _checks(facts: PodFacts) -> Iterator[Check]:
    yield from _part(facts, "agent", _AGENT, _agent(facts))
    yield from _part(facts, "mode", _MODE, _mode(facts))
    for text in facts.status.ingress_policies if facts.status else ():
        yield Check(name="node traffic", state=OK, text=text)
    if facts.pod.host_network:
        text = "hostNetwork: it is part of the node, so it is not gated and not probed inside"
        yield Check(name="network namespace", state=OK, text=text)
    else:
        yield from _part(facts, "network namespace", _NETNS, _namespace(facts))
        yield from _gate(facts)
        yield from _part(facts, "path test", _PATHS, _path_test(facts))
        if facts.mode is Mode.STRICT:
            yield from _part(facts, "relay", _RELAY, _relay(facts))
        if facts.mode in (Mode.ENFORCE, Mode.STRICT):
            yield from _part(facts, "kubelet", _KUBELET, _kubelet(facts))
    if facts.mesh is not None and facts.status is not None:
        text = meshes.describe(facts.status, facts.mesh)
        yield Check(name="mesh", state=OK, text=text)
    yield from _part(facts, "probes", _PROBES, None)
    yield from _probes(facts)
    for finding in of_pod(facts.findings, facts.pod.full_name):
        if finding.kind not in _SHOWN:
            yield _problem("pod", finding)
    yield from _conditions(facts)
    if facts.pod.saved is not None:
        yield from pod_readiness.checks(facts.pod.saved, facts.status)


def _part(
    facts: PodFacts, name: str, part: Sequence[Kind], in_order: Check | None
) -> Iterator[Check]:
    """The findings about one part of the pod or of its node; without any, what is in order."""
    names = {kind.name for kind in part}
    problems = [
        _problem(name, finding)
        for finding in facts.findings
        if finding.kind in names and _concerns(finding, facts.pod.full_name)
    ]
    yield from problems
    if not problems and in_order is not None:
        yield in_order


def _concerns(finding: Finding, name: str) -> bool:
    return name in finding.pod_names if finding.pod_names else finding.subject == NODE


def _problem(name: str, finding: Finding) -> Check:
    """A finding as a check. The next command is another one than this."""
    command = finding.next_command
    return Check(
        name=name,
        state=PROBLEM,
        severity=finding.severity,
        text=finding.sentence,
        remedy=finding.remedy,
        next="" if command.startswith("podgate explain pod") else command,
    )


def _agent(facts: PodFacts) -> Check:
    if facts.report is None:
        return Check(name="agent", state=UNKNOWN, text="its state is not known")
    if facts.status is None:
        text = "it does not know the pod yet"
        return Check(name="agent", state=PROBLEM, text=text, next="podgate status")
    return Check(name="agent", state=OK, text=f"alive, version {facts.report.version}")


def _mode(facts: PodFacts) -> Check:
    if facts.mode is None:
        text = "no gate has it, and without an agent the desired mode is not known"
        return Check(name="mode", state=UNKNOWN, text=text)
    text = f"{facts.mode.label}, by {_decided_by(facts)}"
    hint = ""
    if facts.mode in (Mode.OFF, Mode.AUDIT) and facts.pod.namespace and not facts.pod.host_network:
        hint = (
            f"to close it: kubectl label namespace {facts.pod.namespace} "
            f"{labels.MODE_LABEL}=enforce --overwrite"
        )
    return Check(name="mode", state=OK, text=text, next=hint)


def _decided_by(facts: PodFacts) -> str:
    """Which label, default or ceiling decides, by the rules of agent/pods/modes.py."""
    report, mode = facts.report, facts.mode
    assert mode is not None
    if report is None:
        return "its gate; which label decides is not known without an agent"
    if facts.status is not None and facts.status.mode_origin:
        return facts.status.mode_origin
    if facts.pod.saved is None:
        return f"the pod's manifest, or else the node's default ({report.default_mode})"
    of_pod = modes.read_label(facts.pod.labels, labels.MODE_LABEL, modes.THE_POD)
    namespace = f"namespace {facts.pod.namespace}"
    of_namespace = modes.read_mode(facts.namespace_labels or {}, namespace)
    override = (facts.namespace_labels or {}).get(labels.OVERRIDE_LABEL)
    unlimited = modes.decide(
        modes.NodeModes(default=Mode.from_label(report.default_mode)),
        modes.NamespaceModes(
            of_namespace,
            override == labels.OVERRIDE_ALLOWED,
            facts.pod.namespace if modes.is_left(facts.namespace_labels or {}) else "",
        ),
        of_pod,
    ).mode
    if unlimited > mode:
        return f"the ceiling, {report.max_mode_from}"
    if of_pod.mode is mode is not of_namespace.mode:
        return f"label {labels.MODE_LABEL} of the pod"
    if of_namespace.mode is mode:
        return f"label {labels.MODE_LABEL} of namespace {facts.pod.namespace}"
    if labels.MODE_LABEL in (facts.node_labels or {}):
        return f"label {labels.MODE_LABEL} of the node"
    return "the node's default (--mode)"


def _namespace(facts: PodFacts) -> Check:
    name, status = "network namespace", facts.status
    if status is None:
        return Check(name=name, state=UNKNOWN, text="only the agent knows its path")
    if status.netns is None:
        text = "the container runtime reports none: the pod has no sandbox yet, or no more"
        return Check(name=name, state=UNKNOWN, text=text, next=_DESCRIBE.format(facts.pod))
    addresses = ", ".join(status.addresses) or "no confirmed address"
    return Check(name=name, state=OK, text=f"{status.netns}, {addresses}")


def _gate(facts: PodFacts) -> Iterator[Check]:
    """By the findings, and by the pins, which are newer."""
    listed = {finding.sentence for finding in facts.findings}
    for gate in facts.gates:
        detached = gate_detached(gate.interface, facts.pod.full_name)
        if not gate.is_attached and detached.sentence not in listed:
            yield _problem("gate", detached)
    is_attached = all(gate.is_attached for gate in facts.gates)
    yield from _part(facts, "gate", _GATE, _gate_in_order(facts) if is_attached else None)


def _gate_in_order(facts: PodFacts) -> Check:
    name, mode = "gate", facts.mode
    if not facts.has_pins:
        return Check(name=name, state=UNKNOWN, text="the maps cannot be read; run as root")
    if not facts.gates:
        if facts.status is not None and mode is Mode.OFF:
            return Check(name=name, state=OK, text="none: the mode is off")
        text = "no gate has an address of the pod"
        return Check(name=name, state=PROBLEM, text=text, next="podgate status")
    differing = [gate for gate in facts.gates if gate.mode is not mode]
    if differing:
        text = f"{differing[0].interface} is in mode {differing[0].mode.label}"
        return Check(name=name, state=PROBLEM, text=text, next="podgate status")
    words = ", ".join(f"{gate.interface} ({len(gate.rules)} rules)" for gate in facts.gates)
    return Check(name=name, state=OK, text=f"attached to {words}")


def _path_test(facts: PodFacts) -> Check | None:
    """A CNI may block the node itself: then nothing is open."""
    paths = facts.status.paths if facts.status else ()
    words = ", ".join(f"{path.address}: {path.result}" for path in paths)
    return Check(name="path test", state=OK, text=words) if words else None


def _relay(facts: PodFacts) -> Check:
    proxied = {pod for pod, _ in facts.relay.targets} & set(facts.pod.own_addresses)
    if proxied:
        text = f"proxies {', '.join(map(str, sorted(proxied, key=str)))}"
        return Check(name="relay", state=OK, text=text)
    saved = facts.pod.saved
    annotations = saved.metadata.annotations if saved else {}
    text = "it serves, and proxies no port of this pod: the kubelet connects directly"
    if annotations.get(labels.RELAY_ANNOTATION) == "off":
        text = f"off by annotation {labels.RELAY_ANNOTATION}; the kubelet connects directly"
    return Check(name="relay", state=OK, text=text)


def _kubelet(facts: PodFacts) -> Check | None:
    if facts.report is None or facts.report.kubelet is None:
        return None
    return Check(name="kubelet", state=OK, text=f"identified, in {facts.report.kubelet}")


def _probes(facts: PodFacts) -> Iterator[Check]:
    status = facts.status
    if status is None:
        return
    if not status.probes:
        text = (
            "podgate probes nothing of it: no probes, or they are the kubelet's alone (annotation "
            "podgate.io/probes: agent)"
        )
        yield Check(name="probes", state=OK, text=text)
    for probe in status.probes:
        text = f"{probe.container} {probe.type} {probe.handler}: {probe.result}"
        text += f" ({probe.successes} successes, {probe.failures} failures)"
        if probe.last_message:
            text += f", last: {probe.last_message}"
        is_well = probe.result == "success"
        hint = "" if is_well else f"podgate probe --pod {facts.pod.full_name}"
        yield Check(name="probe", state=OK if is_well else PROBLEM, text=text, next=hint)
        if probe.answer is not None and probe.answer.verdict:
            text = (
                f"{probe.container} {probe.type}: the kubelet gets {probe.answer.verdict}, "
                f"{probe.answer.age_seconds or 0:.1f} s old"
            )
            yield Check(name="answer", state=OK, text=text)


def _conditions(facts: PodFacts) -> Iterator[Check]:
    """The sentence of one of podgate's that is not True is a finding's."""
    for condition in facts.status.conditions if facts.status else ():
        is_well = condition.status == TRUE
        text = f"{condition.status} ({condition.reason})"
        if condition.message and (is_well or condition.type not in TYPES):
            text += f": {condition.message}"
        yield Check(name=condition.type, state=OK if is_well else PROBLEM, text=text)


def _gates_of(pod: NamedPod, gates: Sequence[GateFacts]) -> Iterator[GateFacts]:
    """By the report's interfaces; else by addresses."""
    if pod.status is not None:
        own = {gate.ifindex for gate in pod.status.gates}
        yield from (gate for gate in gates if gate.ifindex in own)
        return
    addresses: set[IPAddress] = set(pod.addresses)
    if not pod.host_network:
        yield from (gate for gate in gates if not addresses.isdisjoint(gate.addresses))
