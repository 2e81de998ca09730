"""What would change a verdict: a command, or a HostAccessPolicy. Pure functions."""

import datetime

import msgspec
import yaml

from agent import labels
from agent.operate.explain import model, observed
from agent.operate.explain.evaluation import Evaluation
from agent.operate.explain.facts import Flow, Source
from agent.operate.explain.model import Change
from agent.operate.explain.pods import NamedPod, NamedPods
from agent.policy import suggestions
from bpf.verdicts import Mode, Reason, Verdict

_RESTART = "kubectl -n podgate rollout restart daemonset/podgate"
# `suggest` doubts what it has seen once; here a person names the flow.
_NO_DOUBT_ABOUT_TIME = datetime.timedelta(days=-1)


def changes(
    found: Evaluation,
    source: Source,
    flow: Flow,
    pod: NamedPod | None,
    pods: NamedPods,
    *,
    is_kubelet: bool,
    policy: str,
    denied_by: str,
) -> list[Change]:
    """pod: the target; policy: that of the rule which admits the flow, empty if none does;
    denied_by: the HostEgressPolicy that denies it, empty if none does."""
    match found.decided_by:
        case model.FORWARDED:
            text = "A NetworkPolicy decides about traffic from pods and from outside."
            return [Change(text=text, command=_get("networkpolicies", pod))]
        case model.NO_GATE:
            return _label(pod)
        case model.DEFAULT_DENY:
            name = pod.full_name if pod else "POD"
            text = "It ends when the pod's gate is attached; what it waits for:"
            return [Change(text=text, command=f"podgate explain pod {name}")]
        case model.HOST_EGRESS:
            text = (
                f"HostEgressPolicy {denied_by} denies it; name the source in its `except`, or "
                "narrow what it denies."
            )
            command = f"kubectl get hostegresspolicy {denied_by} -o yaml"
            return [Change(text=text, command=command)]
        case model.RELAY:
            text = 'The annotation podgate.io/relay: "off" lets the kubelet connect directly.'
            return [Change(text=text)]
    if found.gate is not None and found.gate.mode is Mode.OFF:
        return _label(pod)
    if found.verdict is Verdict.PASS:
        return _closing(found.reason, policy)
    return _admitting(found, source, flow, pod, pods, is_kubelet=is_kubelet)


def _closing(reason: Reason | None, policy: str) -> list[Change]:
    """Of a flow that passes."""
    match reason:
        case Reason.RULE if policy:
            command = f"kubectl get hostaccesspolicy {policy} -o yaml"
            text = f"HostAccessPolicy {policy} admits it; narrow or delete that."
            return [Change(text=text, command=command)]
        case Reason.STALE | Reason.DEAD_MAN:
            return [
                Change(text="A running agent closes it with its first heartbeat.", command=_RESTART)
            ]
        case Reason.UNIDENTIFIED:
            text = "An identified kubelet closes it: --kubelet names its unit or cgroup."
            return [Change(text=text, command="podgate doctor")]
    return []


def _admitting(
    found: Evaluation,
    source: Source,
    flow: Flow,
    pod: NamedPod | None,
    pods: NamedPods,
    *,
    is_kubelet: bool,
) -> list[Change]:
    """Of a flow that is dropped, or in audit would be."""
    match found.reason:
        case Reason.STRICT:
            text = "In strict the kubelet connects through the relay; why none serves:"
            return [Change(text=text, command="podgate status")]
        case Reason.NODE | Reason.KERNEL:
            pass
        case _:
            return []
    if is_kubelet:
        text = (
            "The kubelet reaches the ports that probes and hooks of the pod declare, and with an "
            "http one all TCP ports; declare this port in a probe or hook."
        )
        return [Change(text=text)]
    if pod is None:
        text = (
            "A HostAccessPolicy that selects the pod and names the source admits it; with the "
            "pod's name in --to, this command writes one."
        )
        return [Change(text=text)]
    return _policy(source, flow, pod, pods)


def _policy(source: Source, flow: Flow, pod: NamedPod, pods: NamedPods) -> list[Change]:
    """The policy that `podgate suggest` would make of the flow."""
    seen = observed.flows(source, flow, pod, pods)
    if seen is None:
        text = "Name the source by pid, unit, pod or cgroup to get a HostAccessPolicy for it."
        return [Change(text=text)]
    made = suggestions.suggest([seen], _NO_DOUBT_ABOUT_TIME)
    return [_suggested(suggestion) for suggestion in made]


def _suggested(suggestion: suggestions.Suggestion) -> Change:
    if suggestion.policy is None:
        return Change(text=f"No HostAccessPolicy can admit it: {suggestion.doubt}.")
    content = yaml.safe_dump(msgspec.to_builtins(suggestion.policy), sort_keys=False, width=1000)
    doubt = f" Mind that {suggestion.doubt}." if suggestion.doubt else ""
    return Change(
        text=f"This HostAccessPolicy admits it ('kubectl apply -f -').{doubt}", policy=content
    )


def _label(pod: NamedPod | None) -> list[Change]:
    namespace = pod.namespace if pod else "NAMESPACE"
    if pod is not None and pod.host_network:
        return [Change(text="A hostNetwork pod has no network namespace of its own to gate.")]
    text = "The mode enforce closes it, for all pods of the namespace that no label opens."
    command = f"kubectl label namespace {namespace} {labels.MODE_LABEL}=enforce --overwrite"
    return [Change(text=text, command=command)]


def _get(resource: str, pod: NamedPod | None) -> str:
    return f"kubectl get {resource} -n {pod.namespace if pod else 'NAMESPACE'}"
