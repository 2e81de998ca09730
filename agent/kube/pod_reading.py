"""From the API's pod to the agent's: the same reading of probes as for manifests."""

from collections.abc import Sequence
from typing import Final

import msgspec

from agent import labels
from agent.kube import modes
from agent.kube.objects import ApiPod
from agent.pods.pod import Pod, Problem
from bpf.verdicts import Mode
from probes.spec import probespec
from probes.spec.fields import clipped
from probes.spec.specs import PodSpec, parse_pod

PROBES_ANNOTATION: Final = f"{labels.DOMAIN}/probes"
PROBES_BY_AGENT: Final = "agent"
RELAY_OFF: Final = "off"
SOURCE: Final = "api"

IGNORED: Final = "AnnotationIgnored"
INVALID: Final = "InvalidAnnotation"


class PodReading(msgspec.Struct, frozen=True):
    """What became of one pod. warnings: what its author should hear; the pod works without."""

    pod: Pod
    warnings: tuple[Problem, ...] = ()


def read(pod: ApiPod, *, node_mode: Mode, namespace: modes.Labels) -> PodReading:
    """The pod as podgate guards and probes it. Never fails: what is wrong is told beside it.

    bound: the node's default mode; namespace: the labels of the pod's namespace. The path of the
    network namespace is left open: the runtime tells it, and an annotation of the API never does.
    """
    decision = modes.decide(node_mode, namespace, pod.metadata.labels)
    spec = read_spec(pod)
    warnings = [*decision.problems, *_annotation_problems(pod)]
    if not is_probed_by_agent(pod):
        # The kubelet's alone: what is declared stays, since it has to reach that.
        spec = msgspec.structs.replace(spec, containers=(), base=(), errors=())
    invalid = [one for one in decision.problems if one.reason == modes.INVALID]
    return PodReading(
        Pod(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            mode=decision.mode,
            host_network=pod.spec.host_network,
            is_relayed=pod.metadata.annotations.get(labels.RELAY_ANNOTATION) != RELAY_OFF,
            labels=pod.metadata.labels,
            spec=spec,
            source=SOURCE,
            manifest_problem=_joined(invalid),
        ),
        tuple(warnings),
    )


def read_spec(pod: ApiPod) -> PodSpec:
    """The pod's probes and hooks, with a mistake for each wrong field, as for manifests."""
    return parse_pod(
        {"metadata": msgspec.to_builtins(pod.metadata), "spec": msgspec.to_builtins(pod.spec)}
    )


def is_probed_by_agent(pod: ApiPod) -> bool:
    """Whether podgate runs readiness probes beside the kubelet: a gate, or an annotation."""
    annotations = pod.metadata.annotations
    return (
        labels.PROBES_PASSING in pod.gates
        or annotations.get(PROBES_ANNOTATION) == PROBES_BY_AGENT
        or probespec.ANNOTATION in annotations
    )


def _annotation_problems(pod: ApiPod) -> list[Problem]:
    warnings = []
    annotations = pod.metadata.annotations
    if labels.NETNS_ANNOTATION in annotations:
        warnings.append(
            Problem(
                IGNORED,
                f"annotation {labels.NETNS_ANNOTATION} has no effect on pods of the API: the "
                "container runtime says where a pod's network namespace is.",
            )
        )
    known = (
        (PROBES_ANNOTATION, PROBES_BY_AGENT, "the kubelet's probes go on alone"),
        (labels.RELAY_ANNOTATION, RELAY_OFF, "the relay stays on"),
    )
    for name, word, consequence in known:
        text = annotations.get(name, word)
        if text != word:
            warnings.append(
                Problem(
                    INVALID,
                    f"annotation {name} is {clipped(text)}, and only {word!r} is known; "
                    f"{consequence}.",
                )
            )
    return warnings


def _joined(problems: Sequence[Problem]) -> Problem | None:
    if not problems:
        return None
    return Problem(problems[0].reason, " ".join(problem.message for problem in problems))
