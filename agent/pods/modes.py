"""A pod's mode, decided by the labels of node, namespace and pod. Pure functions.

1. The node's default: its label `podgate.io/mode`, or else the agent's `--mode`.
2. The namespace's label replaces it, stricter or not.
3. The pod's label may be stricter than that. It may be less strict only where the namespace has
   `podgate.io/mode-override: allowed`: a user who may create pods must not be able to open them.
4. What enforces and was left behind by the removal of podgate does not count until its owner
   confirms it: of a node or a namespace that `kubectl podgate uninstall` has labelled with
   `podgate.io/left-behind`, and of pods in such a namespace. Labels that are less strict count.
5. Ceilings bound the result, for canaries and the way out: the node's label `podgate.io/max-mode`,
   or else `--max-mode`; the same label of podgate's own namespace, for the whole cluster; and
   `podgate off --node`. The lowest decides.
6. With `--cluster-network-policies=close` a ClusterNetworkPolicy that denies all ingress of the pod
   makes its mode at least enforce, below the ceilings. Labels `off` stay off.

Without a cluster the node's operator also writes the pod's label, which may be less strict.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from agent import labels as agent_labels
from agent.pods.pod import Problem
from bpf.verdicts import Mode
from probes.spec.fields import clipped

INVALID = "InvalidMode"
"""A mode label is no mode."""
INVALID_CEILING = "InvalidMaxMode"
"""The label of a ceiling is no mode."""
NOT_ALLOWED = "ModeNotAllowed"
"""A pod's label is less strict than its pod may be."""
LEFT = "ModeLeftBehind"
"""A label that enforces is older than this installation, and not confirmed."""
LIMITED = "ModeLimited"
"""The ceiling is below the mode that labels and default give."""
NOT_CLOSED = "ClusterNetworkPolicyNotFollowed"
"""A ClusterNetworkPolicy denies all ingress, and a ceiling or a label keeps the pod open."""
KEPT = "ModeKept"
"""A gate keeps a stricter mode while the labels of node and namespaces are unknown."""

THE_NODE, THE_POD = "the node", "the pod"
"""Owners of labels."""

Labels = Mapping[str, str]

_CLOSED = (Mode.ENFORCE, Mode.STRICT)


class ModeLabel(msgspec.Struct, frozen=True):
    """One label as read. mode: None if it is absent, or no mode and never was one."""

    mode: Mode | None = None
    problem: Problem | None = None


NO_LABEL = ModeLabel()


class Closures(Protocol):
    """What denies all ingress of pods, so that the node's is to be denied as well."""

    @property
    def is_settled(self) -> bool:
        """Whether it was read."""

    def closed_by(self, namespace: str, labels: Labels | None) -> str:
        """What denies all ingress of a pod, in words; empty if nothing does. labels: None where
        they are unknown."""

    def namespaces(self) -> Collection[str]:
        """All that are known."""


class NodeModes(msgspec.Struct, frozen=True, kw_only=True):
    """The node's part in the decision. is_labelled: whether the default is its label's;
    ceiling_from: what sets the ceiling, in words; problems: of the node's labels."""

    default: Mode
    is_labelled: bool = False
    ceiling: Mode = Mode.STRICT
    ceiling_from: str = "--max-mode"
    problems: tuple[Problem, ...] = ()

    @property
    def is_off(self) -> bool:
        """Whether podgate is off on this node: no pod may have a gate."""
        return self.ceiling is Mode.OFF


class NamespaceModes(msgspec.Struct, frozen=True):
    """A namespace's part. may_override: whether labels of its pods may be less strict; left: its
    name, if labels of its pods that enforce do not count, as rule 4."""

    label: ModeLabel = ModeLabel()
    may_override: bool = False
    left: str = ""


class ModeDecision(msgspec.Struct, frozen=True):
    """The mode of one pod, and labels that have no effect, or not the desired one. origin: what
    raised it above that of labels and default, in words, or empty."""

    mode: Mode
    problems: tuple[Problem, ...] = ()
    origin: str = ""


def read_label(labels: Labels, name: str, owner: str, last: Mode | None = None) -> ModeLabel:
    """A label of an owner: "the node", "namespace NAME" or "the pod".

    last: the value that stays in force if this one is no mode; None: it counts as absent then.
    """
    text = labels.get(name)
    if text is None:
        return ModeLabel()
    try:
        return ModeLabel(Mode.from_label(text))
    except ValueError:
        choices = ", ".join(mode.label for mode in Mode)
        effect = "It has no effect."
        if last is not None:
            effect = f"Its last valid value {last.label} stays in force."
        message = (
            f"Label {name} of {owner} is {clipped(text)}, which is no mode; use one of {choices}. "
            f"{effect}"
        )
        reason = INVALID if name == agent_labels.MODE_LABEL else INVALID_CEILING
        subject = "" if owner == THE_POD else owner.removeprefix("the ")
        return ModeLabel(last, Problem(reason, message, subject))


def read_mode(labels: Labels, owner: str, last: Mode | None = None) -> ModeLabel:
    """The mode label of a node or namespace, as `read_label`; none if it was left behind."""
    found = read_label(labels, agent_labels.MODE_LABEL, owner, last)
    if found.mode in _CLOSED and is_left(labels):
        return ModeLabel(problem=_left(owner))
    return found


def is_left(labels: Labels) -> bool:
    """Whether mode labels of a node, or of a namespace and its pods, were left behind by the
    removal of podgate. Not if its mode label was changed since: that is a new decision."""
    return labels.get(agent_labels.LEFT_LABEL) == labels.get(agent_labels.MODE_LABEL, "")


def _left(owner: str) -> Problem:
    subject = owner.removeprefix("the ")
    of_pods = " and its pods" if subject != "node" else ""
    command = f"kubectl label {subject if of_pods else 'node NODE'} {agent_labels.LEFT_LABEL}-"
    message = (
        f"Labels {agent_labels.MODE_LABEL} of {owner}{of_pods} are from before podgate was removed "
        f"and installed again; they do not close pods until you confirm them: {command}"
    )
    return Problem(LEFT, message, subject)


def node_modes(
    default: Mode,
    ceiling: Mode,
    label: ModeLabel,
    max_label: ModeLabel,
    *,
    cluster: ModeLabel = NO_LABEL,
    is_off: bool = False,
) -> NodeModes:
    """default, ceiling: the agent's settings, which the node's labels replace; cluster: the ceiling
    of the whole cluster; is_off: by `podgate off --node`."""
    max_mode = agent_labels.MAX_MODE_LABEL
    ceilings = [(ceiling, "--max-mode")]
    if max_label.mode is not None:
        ceilings = [(max_label.mode, f"the node's label {max_mode}")]
    if cluster.mode is not None:
        ceilings.append((cluster.mode, f"the label {max_mode} of podgate's namespace"))
    if is_off:
        ceilings.append((Mode.OFF, "'podgate off --node'"))
    lowest, origin = min(ceilings, key=lambda found: found[0])
    return NodeModes(
        default=default if label.mode is None else label.mode,
        is_labelled=label.mode is not None,
        ceiling=lowest,
        ceiling_from=origin,
        problems=tuple(one.problem for one in (label, max_label, cluster) if one.problem),
    )


def kept(mode: Mode) -> Problem:
    """For a pod whose attached gate keeps this mode."""
    return Problem(
        KEPT,
        f"The gate keeps mode {mode.label} until the labels of node and namespaces are listed.",
        "node",
    )


def decide(
    node: NodeModes, namespace: NamespaceModes, pod: ModeLabel, closed_by: str = ""
) -> ModeDecision:
    """The mode of one pod, by the rules above. closed_by: as `Closures.closed_by`."""
    problems = [*node.problems]
    problems += [one.problem for one in (namespace.label, pod) if one.problem]
    mode = node.default if namespace.label.mode is None else namespace.label.mode
    if pod.mode in _CLOSED and namespace.left:
        problem = _left(f"namespace {namespace.left}")
        problems += [] if problem in problems else [problem]
    elif pod.mode is not None:
        if pod.mode >= mode or namespace.may_override:
            mode = pod.mode
        else:
            problems.append(
                Problem(
                    NOT_ALLOWED,
                    f"Pod label {agent_labels.MODE_LABEL}={pod.mode.label} is less strict than "
                    f"{mode.label} and is ignored; set {agent_labels.OVERRIDE_LABEL}="
                    f"{agent_labels.OVERRIDE_ALLOWED} on the namespace to allow it.",
                )
            )
    origin = ""
    if closed_by and mode not in _CLOSED:
        if mode is Mode.OFF and _is_off_by_label(node, namespace, pod):
            problems.append(_not_closed(closed_by, f"label {agent_labels.MODE_LABEL}=off"))
        else:
            mode, origin = Mode.ENFORCE, closed_by
    if mode > node.ceiling:
        limit = f"limited to {node.ceiling.label} by {node.ceiling_from}"
        if closed_by and node.ceiling not in _CLOSED:
            problems.append(_not_closed(closed_by, f"mode {mode.label} is {limit}", "node"))
            origin = ""
        else:
            problems.append(Problem(LIMITED, f"Mode {mode.label} is {limit}.", "node"))
        mode = node.ceiling
    return ModeDecision(mode, tuple(problems), origin)


def _is_off_by_label(node: NodeModes, namespace: NamespaceModes, pod: ModeLabel) -> bool:
    """Of a pod that is off. A pod's own label counts where it may be less strict."""
    return (
        node.is_labelled
        or namespace.label.mode is Mode.OFF
        or (pod.mode is Mode.OFF and namespace.may_override)
    )


def _not_closed(closed_by: str, why: str, subject: str = "") -> Problem:
    text = f"{closed_by} denies all ingress, but host processes reach the pod: {why}."
    return Problem(NOT_CLOSED, text, subject)
