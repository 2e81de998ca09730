"""`podgate explain pod`: what a pod needs to be isolated, probed and ready, in order."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from agent import labels
from agent.admin.report import AgentReport, AnswerStatus, PodStatus, ProbeStatus
from agent.kube.objects import ApiPod
from agent.operate.explain import reading
from agent.operate.explain.facts import GateFacts, RelayFacts
from agent.operate.explain.model import Check, PodExplanation
from agent.operate.explain.pods import NamedPod, NamedPods, read_saved
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.names import Names
from agent.pods import modes
from agent.pods.conditions import TRUE
from bpf import pins
from bpf.abi import IPAddress
from bpf.verdicts import Mode

OK, PROBLEM, UNKNOWN = "ok", "problem", "unknown"

_CONTAINERS_READY, _READY = "ContainersReady", "Ready"
_DESCRIBE = "kubectl describe pod -n {0.namespace} {0.name}"
_NEXT = {
    "SandboxMissing": _DESCRIBE,
    "NetnsMissing": "name the network namespace in the manifest's annotation podgate.io/netns",
    "NetnsNotFound": _DESCRIBE,
    "NetnsInvalid": _DESCRIBE,
    "NetnsInUse": "give each manifest a namespace of its own",
    "NoInterface": "check that the CNI gives the pod a veth pair (docs: which CNIs work)",
    "GateFailed": "podgate doctor",
    "GateBypassed": "check how the CNI routes from the node to the pod; until then use audit",
    "ProbeFailing": "podgate probe --pod {0.full_name} KIND PORT shows each step of the probe",
    "ProbePending": "wait for its first results; a long initialDelaySeconds delays them",
    "ContainerNotRunning": _DESCRIBE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class PodFacts:
    """All that is known of one pod. report: None if no agent responds; gates: those that list one
    of its addresses; has_pins: whether the gates could be read."""

    pod: NamedPod
    report: AgentReport | None
    gates: tuple[GateFacts, ...] = ()
    relay: RelayFacts = dataclasses.field(default_factory=RelayFacts)
    namespace_labels: dict[str, str] | None = None
    node_labels: dict[str, str] | None = None
    has_pins: bool = True

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
            tuple(_gates_of(pod, gates)),
            relay,
            pods.namespace_labels.get(pod.namespace),
            nodes[0].metadata.labels if nodes else None,
            has_pins,
        )
    )


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
    yield _agent(facts)
    yield _mode(facts)
    if facts.pod.host_network:
        text = "hostNetwork: it is part of the node, so it is not gated and not probed inside"
        yield Check(name="network namespace", state=OK, text=text)
    else:
        yield _namespace(facts)
        yield _gate(facts)
        yield from _path_tests(facts)
        if facts.mode is Mode.STRICT:
            yield _relay(facts)
        if facts.mode in (Mode.ENFORCE, Mode.STRICT) and facts.report is not None:
            yield _kubelet(facts.report)
    yield from _probes(facts)
    yield from _conditions(facts)
    if facts.pod.saved is not None:
        yield from _readiness(facts, facts.pod.saved)


def _agent(facts: PodFacts) -> Check:
    if facts.report is None:
        text = "no agent responds: gates stay, and conditions do not follow the pod"
        return Check(name="agent", state=PROBLEM, text=text, next="podgate doctor")
    if facts.status is None:
        text = "it does not know the pod yet"
        return Check(name="agent", state=PROBLEM, text=text, next="podgate status")
    if problems := facts.report.pod_source.problems:
        return Check(name="agent", state=PROBLEM, text=" ".join(problems), next="podgate doctor")
    return Check(name="agent", state=OK, text=f"alive, version {facts.report.version}")


def _mode(facts: PodFacts) -> Check:
    if facts.mode is None:
        text = "no gate has it, and without an agent the desired mode is not known"
        return Check(name="mode", state=UNKNOWN, text=text)
    text = f"{facts.mode.label}, by {_decided_by(facts)}"
    if facts.status is not None and facts.status.mode_problems:
        problems = " ".join(facts.status.mode_problems)
        return Check(name="mode", state=PROBLEM, text=f"{text}. {problems}")
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
    if facts.pod.saved is None:
        return f"the pod's manifest, or else the node's default ({report.default_mode})"
    of_pod = modes.read_label(facts.pod.labels, labels.MODE_LABEL, "pod")
    of_namespace = modes.read_label(facts.namespace_labels or {}, labels.MODE_LABEL, "namespace")
    override = (facts.namespace_labels or {}).get(labels.OVERRIDE_LABEL)
    unlimited = modes.decide(
        modes.NodeModes(default=Mode.from_label(report.default_mode)),
        modes.NamespaceModes(of_namespace, override == labels.OVERRIDE_ALLOWED),
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
        return Check(name=name, state=PROBLEM, text=text, next=_DESCRIBE.format(facts.pod))
    addresses = ", ".join(status.addresses) or "no confirmed address"
    unconfirmed = "; ".join(f"{a}: {why}" for a, why in status.unconfirmed.items())
    more = f"; not confirmed: {unconfirmed}" if unconfirmed else ""
    return Check(name=name, state=OK, text=f"{status.netns}, {addresses}{more}")


def _gate(facts: PodFacts) -> Check:
    name, mode = "gate", facts.mode
    if not facts.has_pins:
        return Check(name=name, state=UNKNOWN, text="the maps cannot be read; run as root")
    is_gated = mode is not None and mode is not Mode.OFF
    if not facts.gates:
        if facts.status is not None and not is_gated:
            return Check(name=name, state=OK, text="none: the mode is off")
        text = "no gate has an address of the pod"
        return Check(name=name, state=PROBLEM, text=text, next="podgate status")
    detached = [gate.interface for gate in facts.gates if not gate.is_attached]
    if detached:
        text = f"configured, but not attached to {', '.join(detached)}: everything passes there"
        return Check(name=name, state=PROBLEM, text=text, next="podgate doctor")
    differing = [gate for gate in facts.gates if gate.mode is not mode]
    if differing:
        text = f"{differing[0].interface} is in mode {differing[0].mode.label}"
        return Check(name=name, state=PROBLEM, text=text, next="podgate status")
    words = ", ".join(f"{gate.interface} ({len(gate.rules)} rules)" for gate in facts.gates)
    return Check(name=name, state=OK, text=f"attached to {words}")


def _path_tests(facts: PodFacts) -> Iterator[Check]:
    for path in facts.status.paths if facts.status else ():
        is_well = path.result == "confirmed"
        text = f"{path.address}: {path.result}"
        hint = "" if is_well else _NEXT["GateBypassed"] if path.result == "bypassed" else ""
        # A CNI may block the node itself: then nothing is open.
        state = OK if is_well or path.result == "unreachable" else PROBLEM
        yield Check(name="path test", state=state, text=text, next=hint)


def _relay(facts: PodFacts) -> Check:
    name, report = "relay", facts.report
    proxied = {pod for pod, _ in facts.relay.targets} & set(facts.pod.addresses)
    if report is None:
        text = "without the agent no relay serves: the gate admits the kubelet as in enforce"
        return Check(name=name, state=PROBLEM, text=text, next="start the agent")
    if report.relay.problem:
        return Check(
            name=name, state=PROBLEM, text=report.relay.problem_text, next="podgate doctor"
        )
    if not proxied:
        saved = facts.pod.saved
        annotations = saved.metadata.annotations if saved else {}
        if annotations.get(labels.RELAY_ANNOTATION) == "off":
            text = f"off by annotation {labels.RELAY_ANNOTATION}; the kubelet connects directly"
            return Check(name=name, state=OK, text=text)
        text = "it serves, and proxies no port of this pod: the kubelet connects directly"
        return Check(name=name, state=OK, text=text)
    return Check(
        name=name, state=OK, text=f"proxies {', '.join(map(str, sorted(proxied, key=str)))}"
    )


def _kubelet(report: AgentReport) -> Check:
    if report.open_ports:
        return Check(name="kubelet", state=PROBLEM, text=report.open_ports, next="podgate doctor")
    if report.kubelet is None:
        text = f"not identified, and no port is open for it: {report.kubelet_problem}"
        return Check(name="kubelet", state=OK, text=text)
    return Check(name="kubelet", state=OK, text=f"identified, in {report.kubelet}")


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
        hint = "" if is_well else _NEXT["ProbeFailing"].format(facts.pod)
        yield Check(name="probe", state=OK if is_well else PROBLEM, text=text, next=hint)
        if probe.answer is not None:
            yield _answer(probe, probe.answer)


def _answer(probe: ProbeStatus, answer: AnswerStatus) -> Check:
    """What the kubelet's own probe gets."""
    name = f"{probe.container} {probe.type}"
    if answer.verdict:
        text = f"{name}: the kubelet gets {answer.verdict}, {answer.age_seconds or 0:.1f} s old"
        return Check(name="answer", state=OK, text=text)
    return Check(name="answer", state=PROBLEM, text=f"{name}: {answer.problem}")


def _conditions(facts: PodFacts) -> Iterator[Check]:
    status = facts.status
    if status is None:
        return
    if not status.conditions:
        yield Check(name="conditions", state=PROBLEM, text="none yet", next="podgate status")
    for condition in status.conditions:
        is_well = condition.status == TRUE
        text = f"{condition.status} ({condition.reason}): {condition.message}"
        hint = "" if is_well else _NEXT.get(condition.reason, "").format(facts.pod)
        yield Check(name=condition.type, state=OK if is_well else PROBLEM, text=text, next=hint)


def _readiness(facts: PodFacts, pod: ApiPod) -> Iterator[Check]:
    """What the API server has, as the agent last saw it: the kubelet's part of readiness."""
    own = {c.type: c.status for c in facts.status.conditions} if facts.status else {}
    for gate in sorted(pod.gates):
        found = pod.condition(gate)
        status = found.status if found else "not set"
        if status == TRUE:
            yield Check(name="readiness gate", state=OK, text=f"{gate} is True")
            continue
        text = f"{gate} is {status}"
        hint = "its owner sets it, not podgate"
        if gate in own:
            hint = "podgate has it True and writes it" if own[gate] == TRUE else ""
        yield Check(name="readiness gate", state=PROBLEM, text=text, next=hint)
    for kind in (_CONTAINERS_READY, _READY):
        found = pod.condition(kind)
        if found is None:
            continue
        is_well = found.status == TRUE
        words = f"{kind} is {found.status}"
        if not is_well:
            words += f": {found.message or found.reason or _unready_containers(pod)}"
        yield Check(
            name="API server",
            state=OK if is_well else PROBLEM,
            text=words,
            next="" if is_well else _DESCRIBE.format(facts.pod),
        )


def _unready_containers(pod: ApiPod) -> str:
    unready = [status.name for status in pod.status.container_statuses if not status.ready]
    return f"not ready: {', '.join(unready)}" if unready else "no reason"


def _gates_of(pod: NamedPod, gates: Sequence[GateFacts]) -> Iterator[GateFacts]:
    """By the report's interfaces; else by addresses."""
    if pod.status is not None:
        own = {gate.ifindex for gate in pod.status.gates}
        yield from (gate for gate in gates if gate.ifindex in own)
        return
    addresses: set[IPAddress] = set(pod.addresses)
    if not pod.host_network:
        yield from (gate for gate in gates if not addresses.isdisjoint(gate.addresses))
