"""Why a pod is not Ready: findings in the order in which the kubelet and podgate need them. No I/O.

The kubelet sets Ready when ContainersReady is True and each readiness gate's condition is True
(KEP-580; pkg/kubelet/status/generate.go, GeneratePodReadyCondition).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from agent.labels import DOMAIN, ISOLATION_READY
from agent.operate.kubectl.cluster import Object
from agent.operate.kubectl.node_status import NodeStatus

_PODGATE = f"{DOMAIN}/"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadinessCheck:
    """One thing that Ready needs. is_met: whether it holds; text: one sentence; next_command: what
    to run about it, if it does not hold."""

    subject: str
    is_met: bool
    text: str
    next_command: str = ""


def findings(
    pod: Object,
    events: Sequence[Object],
    *,
    node: Object | None,
    agent: NodeStatus | None,
    agent_command: str = "",
    explanation: Object | None = None,
) -> list[ReadinessCheck]:
    """In order: what comes later often follows from what comes first.

    :param node: None if the pod has none or it is gone, empty if it is not readable.
    :param agent: of that node, None without one.
    :param agent_command: what runs a command in that agent's pod, empty without.
    :param explanation: the node's `podgate explain pod`, None if it has none.
    """
    return [
        *_existence(pod),
        *_placement(pod, events, node),
        *_init_containers(pod, events),
        *_containers(pod, events, agent_command),
        *_readiness_gates(pod, agent),
        *(_agent(pod, agent) if explanation is None else _of_node(explanation, agent_command)),
    ]


def is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def _existence(pod: Object) -> Iterator[ReadinessCheck]:
    if since := pod["metadata"].get("deletionTimestamp"):
        text = f"The pod is being deleted since {since}: it does not become Ready again."
        yield ReadinessCheck("pod", False, text, _kubectl(pod, "get pod", "-o yaml"))
    phase = pod["status"].get("phase")
    if phase in ("Succeeded", "Failed"):
        status = pod["status"]
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        text = f"The pod has ended ({phase}{f', {why}' if why else ''}): it does not become Ready."
        yield ReadinessCheck("pod", False, text, _logs(pod, ""))


def _placement(
    pod: Object, events: Sequence[Object], node: Object | None
) -> Iterator[ReadinessCheck]:
    name = pod["spec"].get("nodeName")
    if not name:
        condition = _condition(pod, "PodScheduled")
        why = condition.get("message") or "the scheduler has not handled it yet"
        gates = [one["name"] for one in pod["spec"].get("schedulingGates") or ()]
        if gates:
            why = f"scheduling gates {', '.join(gates)} hold it back"
        yield ReadinessCheck(
            "scheduling", False, _sentence(f"No node: {why}"), _kubectl(pod, "describe pod")
        )
        return
    if node is None:
        text = f"Its node {name} does not exist any more."
        yield ReadinessCheck("node", False, text, "kubectl get nodes")
        return
    ready = _condition(node, "Ready")
    if ready.get("status") == "True":
        yield ReadinessCheck("node", True, f"Node {name} is Ready.")
    elif node:
        why = ready.get("message") or "its kubelet does not report"
        text = _sentence(f"Node {name} is not Ready, so none of its pods is: {why}")
        yield ReadinessCheck("node", False, text, f"kubectl describe node {name}")
    sandbox = _condition(pod, "PodReadyToStartContainers")
    if sandbox.get("status") == "False" and pod["status"].get("phase") == "Pending":
        found = _last_messages(
            events, ("FailedCreatePodSandBox", "FailedMount", "FailedAttachVolume")
        )
        why = found[-1] if found else "the runtime has not created it yet"
        text = _sentence(f"The pod has no sandbox: {why}")
        yield ReadinessCheck("sandbox", False, text, _kubectl(pod, "describe pod"))


def _init_containers(pod: Object, events: Sequence[Object]) -> Iterator[ReadinessCheck]:
    if _condition(pod, "Initialized").get("status") == "True":
        return
    for status in pod["status"].get("initContainerStatuses") or ():
        ended = (status.get("state") or {}).get("terminated") or {}
        is_sidecar = _spec_of(pod, status["name"]).get("restartPolicy") == "Always"
        is_done = bool(status.get("started")) if is_sidecar else ended.get("exitCode") == 0
        if not is_done:
            what = f"Init container {status['name']} has not {'started' if is_sidecar else 'ended'}"
            yield _stuck(pod, status, what, events)
            # The others wait for it.
            return


def _containers(
    pod: Object, events: Sequence[Object], agent_command: str
) -> Iterator[ReadinessCheck]:
    statuses = pod["status"].get("containerStatuses") or []
    if not statuses or _condition(pod, "Initialized").get("status") == "False":
        return
    bad = [status for status in statuses if not status.get("ready")]
    if not bad:
        yield ReadinessCheck("containers", True, f"All {len(statuses)} containers are ready.")
    for status in bad:
        name = status["name"]
        if "running" not in (status.get("state") or {}):
            yield _stuck(pod, status, f"Container {name} does not run", events)
            continue
        kind = "startup" if not status.get("started") else "readiness"
        probe = _spec_of(pod, name).get(f"{kind}Probe")
        if not probe:
            text = f"Container {name} runs; the kubelet has not reported it as ready yet."
            yield ReadinessCheck("containers", False, text, _kubectl(pod, "get pod", "-o yaml"))
            continue
        failed = _last_messages(_of_container(events, name), ("Unhealthy",))
        failed = [one for one in failed if one.lower().startswith(kind)]
        # After "Readiness probe failed: " (pkg/kubelet/prober/prober.go).
        why = failed[-1].partition(": ")[2] if failed else "the kubelet has no result yet"
        text = _sentence(f"Container {name}, {kind} probe ({_handler(probe)}): {why}")
        command = _logs(pod, f"-c {name}")
        if agent_command:
            target = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            command = f"{agent_command} podgate probe --pod {target}"
        yield ReadinessCheck("containers", False, text, command)


def _stuck(pod: Object, status: Object, what: str, events: Sequence[Object]) -> ReadinessCheck:
    """A container that does not run, by its state and last end."""
    state = status.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    last = ended or (status.get("lastState") or {}).get("terminated") or {}
    words = [waiting.get("reason") or ended.get("reason") or "", waiting.get("message") or ""]
    if last:
        words.append(f"it ended with exit code {last.get('exitCode')} ({last.get('reason')})")
        words.append(last.get("message") or "")
    if restarts := status.get("restartCount"):
        words.append(f"{restarts} restarts")
    if not any(words[:2]):
        words += _last_messages(_of_container(events, status["name"]), ("Failed", "BackOff"))[-1:]
    text = _sentence(f"{what}: {', '.join(filter(None, words)) or 'no reason is known yet'}")
    option = f"-c {status['name']}"
    if last:
        return ReadinessCheck("containers", False, text, _logs(pod, f"{option} --previous"))
    return ReadinessCheck("containers", False, text, _kubectl(pod, "describe pod"))


def _readiness_gates(pod: Object, agent: NodeStatus | None) -> Iterator[ReadinessCheck]:
    for gate in pod["spec"].get("readinessGates") or ():
        kind = gate["conditionType"]
        condition = _condition(pod, kind)
        is_ours = kind.startswith(_PODGATE)
        if condition.get("status") == "True":
            reason = condition.get("reason") or "no reason"
            yield ReadinessCheck("readiness gate", True, f"{kind} is True ({reason}).")
            continue
        if condition:
            why = f"{condition.get('reason') or 'no reason'}: {condition.get('message') or '-'}"
            text = _sentence(f"{kind} is {condition['status']}, {why}")
        elif is_ours:
            text = f"{kind} is missing: no agent of podgate has written it."
        else:
            text = (
                f"{kind} is missing: its controller has not written it; podgate does only what the "
                "ConditionOwner of its domain reports."
            )
        command = _kubectl(pod, "describe pod")
        if is_ours:
            command = (
                "kubectl podgate status"
                if agent is None or agent.problem
                else f"kubectl podgate doctor --node {agent.node}"
            )
        yield ReadinessCheck("readiness gate", False, text, command)


def _of_node(explanation: Object, agent_command: str) -> Iterator[ReadinessCheck]:
    """The checks of `podgate explain pod`, without those of objects that the plugin reads itself:
    the API server's are newer than what the agent last saw."""
    for check in explanation.get("checks") or ():
        name, text, remedy, hint = (
            str(check.get(key) or "") for key in ("name", "text", "remedy", "next")
        )
        if name in ("readiness gate", "API server"):
            continue
        # A hint is a command, or a sentence.
        command = hint if hint.startswith("kubectl ") else ""
        if hint.startswith("podgate ") and agent_command:
            command = f"{agent_command} {hint}"
        if hint and not command:
            text = f"{text}; {hint}"
        text = " ".join(filter(None, (_sentence(text), remedy)))
        is_met = check.get("state") != "problem"
        severity = check.get("severity")
        subject = f"on the node, {name}" + (f" ({severity})" if severity else "")
        yield ReadinessCheck(subject, is_met, text, command)


def _agent(pod: Object, agent: NodeStatus | None) -> Iterator[ReadinessCheck]:
    """What the node knows, which the API server may not have yet."""
    if agent is None or pod["spec"].get("hostNetwork"):
        return
    if agent.problem:
        text = _sentence(f"The agent of node {agent.node} does not answer: {agent.problem}")
        yield ReadinessCheck("agent", not _gates(pod), text, "kubectl podgate status")
        return
    metadata = pod["metadata"]
    found = [
        one
        for one in agent.pods
        if (one.namespace, one.name) == (metadata["namespace"], metadata["name"])
    ]
    if not found:
        text = f"The agent of node {agent.node} does not know the pod yet."
        yield ReadinessCheck(
            "agent", not _gates(pod), text, f"kubectl podgate doctor --node {agent.node}"
        )
    for one in found:
        text = f"Mode {one.desired}, in force {one.in_force} ({one.reason}): {one.message}"
        command = f"kubectl podgate doctor --node {agent.node}"
        yield ReadinessCheck(
            "gate", one.in_force != "none" or not _gates(pod), _sentence(text), command
        )
        written = _condition(pod, ISOLATION_READY)
        if ISOLATION_READY in _gates(pod) and written.get("reason") != one.reason:
            text = (
                f"The agent has {ISOLATION_READY} as {one.reason}, and the API server as "
                f"{written.get('reason') or 'missing'}: the write is outstanding."
            )
            yield ReadinessCheck("agent", False, text, command)
    for of_node in agent.findings:
        if not of_node.pod_names:
            text = f"Node {agent.node}: {of_node.sentence}"
            yield ReadinessCheck(f"agent ({of_node.severity})", True, text)


def _gates(pod: Object) -> list[str]:
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    return [kind for kind in gates if kind.startswith(_PODGATE)]


def _condition(thing: Object, kind: str) -> Object:
    for one in (thing.get("status") or {}).get("conditions") or ():
        if one["type"] == kind:
            found: Object = one
            return found
    return {}


def _spec_of(pod: Object, name: str) -> Object:
    spec = pod["spec"]
    for one in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        if one["name"] == name:
            found: Object = one
            return found
    return {}


def _handler(probe: Object) -> str:
    """As "httpGet 80/healthz": the field that is an object."""
    for kind, handler in probe.items():
        if isinstance(handler, dict):
            return f"{kind} {handler.get('port', '')}{handler.get('path') or ''}".rstrip()
    return "no handler"


def _of_container(events: Iterable[Object], name: str) -> list[Object]:
    """fieldPath is spec.containers{name} (pkg/kubelet/container/ref.go)."""
    return [
        one
        for one in events
        if (one.get("involvedObject") or {}).get("fieldPath", "").endswith(f"{{{name}}}")
    ]


def _last_messages(events: Iterable[Object], reasons: Sequence[str]) -> list[str]:
    """The newest last."""
    found = [one for one in events if one.get("reason") in reasons]
    return [one.get("message", "").strip() for one in sorted(found, key=last_seen)]


def last_seen(event: Object) -> str:
    """The time of an Event, in RFC 3339."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def _sentence(text: str) -> str:
    """On one line, with a full stop."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _kubectl(pod: Object, verb: str, options: str = "") -> str:
    metadata = pod["metadata"]
    return f"kubectl {verb} {metadata['name']} -n {metadata['namespace']} {options}".strip()


def _logs(pod: Object, options: str) -> str:
    return _kubectl(pod, "logs", options)
