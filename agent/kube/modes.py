"""A pod's mode, computed from the labels of node, namespace and pod. Pure functions.

The node's mode is the maximum: its label if it has one (so that single nodes can be canaries), else
the agent's own setting. A namespace's label decides within it. A pod's label may only be stricter
than that, since a user who may create pods must not be able to open them; where the namespace
carries `podgate.io/mode-override: allowed`, it may also be less strict.
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
    """The mode, and labels that are invalid or ignored."""

    mode: Mode
    problems: tuple[Problem, ...] = ()


def node_default(setting: Mode, node: Labels) -> ModeDecision:
    """The maximum mode of this node's pods. setting: the agent's own default."""
    label, problems = _read(node, "node")
    return ModeDecision(setting if label is None else label, problems)


def decide(node_mode: Mode, namespace: Labels, pod: Labels) -> ModeDecision:
    """The mode of one pod. Labels with an unknown mode are ignored."""
    label, problems = _read(namespace, "namespace")
    of_namespace = node_mode if label is None else min(node_mode, label)
    of_pod, more = _read(pod, "pod")
    problems += more
    if of_pod is None:
        return ModeDecision(of_namespace, problems)
    if of_pod < of_namespace and namespace.get(OVERRIDE_LABEL) != OVERRIDE_ALLOWED:
        problem = Problem(
            NOT_ALLOWED,
            f"Pod label {agent_labels.MODE_LABEL}={of_pod.label} is less strict than "
            f"{of_namespace.label} and is ignored; set {OVERRIDE_LABEL}={OVERRIDE_ALLOWED} on the "
            "namespace to allow it.",
        )
        return ModeDecision(of_namespace, (*problems, problem))
    if of_pod > node_mode:
        problem = Problem(
            NOT_ALLOWED,
            f"Pod label {agent_labels.MODE_LABEL}={of_pod.label} exceeds this node's maximum "
            f"{node_mode.label}; raise the node's mode to use it.",
        )
        return ModeDecision(node_mode, (*problems, problem))
    return ModeDecision(of_pod, problems)


def _read(labels: Labels, owner: str) -> tuple[Mode | None, tuple[Problem, ...]]:
    text = labels.get(agent_labels.MODE_LABEL)
    if text is None:
        return None, ()
    try:
        return Mode.from_label(text), ()
    except ValueError as error:
        return None, (
            Problem(INVALID, f"Label {agent_labels.MODE_LABEL} of the {owner}: {error}."),
        )
