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


class Decision(msgspec.Struct, frozen=True):
    """The mode, and what about the labels is wrong or without effect."""

    mode: Mode
    problems: tuple[Problem, ...] = ()


def node_default(setting: Mode, node: Labels) -> Decision:
    """The outer bound of this node's pods. setting: the agent's own default."""
    label, problems = _read(node, "the node")
    return Decision(setting if label is None else label, problems)


def decide(bound: Mode, namespace: Labels, pod: Labels) -> Decision:
    """The mode of one pod. A label that names no mode counts as none."""
    wanted, problems = _read(namespace, "the namespace")
    of_namespace = bound if wanted is None else min(bound, wanted)
    of_pod, more = _read(pod, "the pod")
    problems += more
    if of_pod is None:
        return Decision(of_namespace, problems)
    if of_pod < of_namespace and namespace.get(OVERRIDE_LABEL) != OVERRIDE_ALLOWED:
        note = Problem(
            NOT_ALLOWED,
            f"label {agent_labels.MODE_LABEL}={of_pod.word} of the pod is less strict than "
            f"{of_namespace.word} and has no effect; label the namespace "
            f"{OVERRIDE_LABEL}={OVERRIDE_ALLOWED} to allow it.",
        )
        return Decision(of_namespace, (*problems, note))
    if of_pod > bound:
        note = Problem(
            NOT_ALLOWED,
            f"label {agent_labels.MODE_LABEL}={of_pod.word} of the pod goes beyond {bound.word}, "
            "the most that this node does; raise the node's default to have it.",
        )
        return Decision(bound, (*problems, note))
    return Decision(of_pod, problems)


def _read(labels: Labels, whose: str) -> tuple[Mode | None, tuple[Problem, ...]]:
    word = labels.get(agent_labels.MODE_LABEL)
    if word is None:
        return None, ()
    try:
        return Mode.from_word(word), ()
    except ValueError as error:
        return None, (Problem(INVALID, f"label {agent_labels.MODE_LABEL} of {whose}: {error}."),)
