"""Reads the API's pod as the agent's `Pod`; probes are read as in manifests."""

from collections.abc import Callable
from typing import Final

import msgspec

from agent import labels
from agent.kube.objects import ApiPod
from agent.pods.modes import LIMITED, NOT_CLOSED
from agent.pods.pod import Pod, Problem
from agent.pods.pod_modes import PodModes
from probes.spec import probespec
from probes.spec.fields import clipped
from probes.spec.handlers import HOST_REASON
from probes.spec.specs import PodSpec, parse_pod

PROBES_ANNOTATION: Final = f"{labels.DOMAIN}/probes"
PROBES_BY_AGENT: Final = "agent"
RELAY_OFF: Final = "off"
SOURCE: Final = "api"

IGNORED: Final = "AnnotationIgnored"
INVALID: Final = "InvalidAnnotation"


class PodReading(msgspec.Struct, frozen=True):
    """A pod, and warnings for its author about settings without effect."""

    pod: Pod
    warnings: tuple[Problem, ...] = ()


class SpecReader:
    """Reads pods' specs. The API has some ten versions of a pod that starts, all with one spec,
    which is read once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ApiPod, PodSpec]] = {}

    def read(self, pod: ApiPod) -> PodSpec:
        """As `read_spec`."""
        if last := self._read.get(pod.uid):
            before, spec = last
            # All that is read of it.
            has_annotations = before.metadata.annotations == pod.metadata.annotations
            if has_annotations and before.spec == pod.spec:
                return spec
        spec = read_spec(pod)
        self._read[pod.uid] = pod, spec
        return spec

    def forget(self, uid: str) -> None:
        self._read.pop(uid, None)


def read(
    pod: ApiPod, modes: PodModes, read_spec_of: Callable[[ApiPod], PodSpec] | None = None
) -> PodReading:
    """The pod as podgate gates and probes it. Never fails: mistakes become warnings.

    The path of the network namespace is left open: only the runtime reports it, never an annotation
    of the API. read_spec_of: reads its spec; None: `read_spec`.
    """
    decision = modes.of_pod(
        pod.uid,
        pod.metadata.namespace,
        pod.metadata.labels,
        host_network=pod.spec.host_network,
    )
    spec = (read_spec_of or read_spec)(pod)
    # Not its author's: the operator's labels of the node, and ClusterNetworkPolicies.
    others = (LIMITED, NOT_CLOSED)
    foreign = {*modes.node.problems, *(p for p in decision.problems if p.reason in others)}
    annotations = _annotation_problems(pod)
    warnings = [p for p in decision.problems if p not in foreign] + annotations
    hosts = _host_problems(pod, spec)
    warnings += hosts
    if not is_probed_by_agent(pod):
        # Only the kubelet probes it; declared ports stay, since the kubelet connects to them.
        spec = msgspec.structs.replace(spec, containers=(), base=(), errors=())
    return PodReading(
        Pod(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            mode=decision.mode,
            mode_problems=decision.problems,
            mode_origin=decision.origin,
            host_problems=tuple(hosts),
            annotation_problems=tuple(annotations),
            kept_up_to=modes.kept_up_to(pod.metadata.namespace),
            host_network=pod.spec.host_network,
            is_relayed=pod.metadata.annotations.get(labels.RELAY_ANNOTATION) != RELAY_OFF,
            labels=pod.metadata.labels,
            spec=spec,
            awaits_policies=labels.POLICY_READY in pod.gates,
            source=SOURCE,
            is_deleting=pod.metadata.deletion_timestamp is not None,
        ),
        tuple(warnings),
    )


def read_spec(pod: ApiPod) -> PodSpec:
    """The pod's probes and hooks, with an error for each invalid field, as for manifests."""
    return parse_pod(
        {"metadata": msgspec.to_builtins(pod.metadata), "spec": msgspec.to_builtins(pod.spec)}
    )


def is_probed_by_agent(pod: ApiPod) -> bool:
    """Whether podgate runs probes in addition to the kubelet: by readiness gate or annotation."""
    annotations = pod.metadata.annotations
    return (
        labels.PROBES_PASSING in pod.gates
        or annotations.get(PROBES_ANNOTATION) == PROBES_BY_AGENT
        or probespec.ANNOTATION in annotations
    )


def _host_problems(pod: ApiPod, spec: PodSpec) -> list[Problem]:
    """KEP-4559, problem 1: the kubelet connects for the pod's author, from the node. On the host
    network that is the pod's own network."""
    if spec.host_network:
        return []
    own = {one.ip for one in pod.status.pod_ips}
    return [
        Problem(
            HOST_REASON,
            f"{found.handler} of container {found.container} has host {clipped(found.host)}, so "
            "the kubelet connects there and not to the pod; remove host.",
        )
        for found in spec.hosts
        if found.host not in own
    ]


def _annotation_problems(pod: ApiPod) -> list[Problem]:
    warnings = []
    annotations = pod.metadata.annotations
    if labels.NETNS_ANNOTATION in annotations:
        warnings.append(
            Problem(
                IGNORED,
                f"Annotation {labels.NETNS_ANNOTATION} is ignored for API pods; the container "
                "runtime reports the network namespace.",
            )
        )
    supported = (
        (PROBES_ANNOTATION, PROBES_BY_AGENT, "The kubelet's probes are used."),
        (labels.RELAY_ANNOTATION, RELAY_OFF, "The relay stays on."),
    )
    for name, value, consequence in supported:
        text = annotations.get(name, value)
        if text != value:
            warnings.append(
                Problem(
                    INVALID,
                    f"Annotation {name} has the unknown value {clipped(text)}; only {value!r} is "
                    f"supported. {consequence}",
                )
            )
    return warnings
