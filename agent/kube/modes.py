"""Which mode a pod gets: the ladder of node, namespace and pod, as a pure function.

The node's default is the outer bound: its label if it has one (so that single nodes can be
canaries), else the agent's own setting. A namespace's label decides within it. A pod's label may
only be stricter than that, since whoever may make pods may not thereby open them; where the
namespace carries `podgate.io/mode-override: allowed`, it may also be less strict.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from agent import labels as agent_labels
from agent.pods.pod import Problem
from bpf.verdicts import Mode

OVERRIDE_LABEL: Final = f"{agent_labels.DOMAIN}/mode-override"
OVERRIDE_ALLOWED: Final = "allowed"

INVALID: Final = "InvalidMode"
NOT_ALLOWED: Final = "ModeNotAllowed"

Labels = Mapping[str, str]


class ModeDecision(msgspec.Struct, frozen=True):
    """The mode, and what about the labels is wrong or without effect."""

    mode: Mode
    problems: tuple[Problem, ...] = ()


def node_default(setting: Mode, node: Labels) -> ModeDecision:
    """The outer bound of this node's pods. setting: the agent's own default."""
    label, problems = _read(node, "the node")
    return ModeDecision(setting if label is None else label, problems)


def decide(node_mode: Mode, namespace: Labels, pod: Labels) -> ModeDecision:
    """The mode of one pod. A label that names no mode counts as none."""
    wanted, problems = _read(namespace, "the namespace")
    of_namespace = node_mode if wanted is None else min(node_mode, wanted)
    of_pod, more = _read(pod, "the pod")
    problems += more
    if of_pod is None:
        return ModeDecision(of_namespace, problems)
    if of_pod < of_namespace and namespace.get(OVERRIDE_LABEL) != OVERRIDE_ALLOWED:
        note = Problem(
            NOT_ALLOWED,
            f"Pod label {agent_labels.MODE_LABEL}={of_pod.label} is less strict than "
            f"{of_namespace.label} and is ignored; set {OVERRIDE_LABEL}={OVERRIDE_ALLOWED} on the "
            "namespace to allow it.",
        )
        return ModeDecision(of_namespace, (*problems, note))
    if of_pod > node_mode:
        note = Problem(
            NOT_ALLOWED,
            f"Pod label {agent_labels.MODE_LABEL}={of_pod.label} exceeds this node's maximum "
            f"{node_mode.label}; raise the node's mode to use it.",
        )
        return ModeDecision(node_mode, (*problems, note))
    return ModeDecision(of_pod, problems)


def _read(labels: Labels, whose: str) -> tuple[Mode | None, tuple[Problem, ...]]:
    word = labels.get(agent_labels.MODE_LABEL)
    if word is None:
        return None, ()
    try:
        return Mode.from_label(word), ()
    except ValueError as error:
        return None, (Problem(INVALID, f"label {agent_labels.MODE_LABEL} of {whose}: {error}."),)
