"""Ceilings that keep pods of a node below what their namespaces' labels demand.

To an agent a ceiling is a setting as any other: its pods are as desired. Who labelled a namespace
has to read of it here.
"""

import dataclasses
from collections.abc import Sequence

from agent.admin import finding_kinds as kinds
from agent.labels import MODE_LABEL
from agent.listing import listed
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import MODES, NodeStatus

_OFF = "off"
_REPLACED = (kinds.OFF.name, kinds.MODE_LIMITED.name)


def labelled_namespaces(cluster: Cluster) -> dict[str, str]:
    """Modes of namespaces by their label, without labels that are no mode. None of them for users
    that may not list namespaces."""
    try:
        namespaces = cluster.items("namespaces")
    except KubectlError:
        return {}
    labels = {one["metadata"]["name"]: _mode(one) for one in namespaces}
    return {name: mode for name, mode in labels.items() if mode in MODES}


def with_findings(node: NodeStatus, namespaces: dict[str, str]) -> NodeStatus:
    """The node with a finding for its ceiling, if that is off or below a namespace's label."""
    if node.max_mode not in MODES:
        return node
    is_off = node.max_mode == _OFF
    above = _above(node.max_mode, namespaces)
    if not is_off and not above:
        return node
    kind = kinds.OFF if is_off else kinds.MODE_LIMITED
    # This one has the namespaces and the way back, which the agent does not know.
    replaced = [one for one in node.findings if one.kind in _REPLACED and one.subject == "node"]
    others = [one for one in node.findings if one not in replaced]
    pods = tuple(dict.fromkeys(name for one in replaced for name in one.pods))
    text = _sentence(node, above)
    own = Finding(
        *(node.node, kind.severity, kind.name, "node", text, kind.remedy, kind.command), pods=pods
    )
    found = sorted([own, *others], key=lambda one: one.rank)
    return dataclasses.replace(node, findings=tuple(found))


def _sentence(node: NodeStatus, above: Sequence[str]) -> str:
    """The same for all nodes with this ceiling, so that they are one line."""
    by = f" by {node.max_mode_from}" if node.max_mode_from else ""
    text = f"Modes are limited to {node.max_mode}{by}"
    if node.max_mode == _OFF:
        text = f"podgate is off{by}: all pods of this node are open"
    if above:
        text += f"; labelled above that: {listed(above)}"
    if node.max_mode == _OFF:
        name = " NODE" if "node" in node.max_mode_from else ""
        text += f". 'kubectl podgate on{name}' undoes it"
    return f"{text}."


def _above(ceiling: str, namespaces: dict[str, str]) -> list[str]:
    """Namespaces with a higher mode, with it."""
    return [
        f"{name} ({mode})"
        for name, mode in sorted(namespaces.items())
        if MODES.index(mode) > MODES.index(ceiling)
    ]


def _mode(namespace: Object) -> str:
    labels = namespace["metadata"].get("labels") or {}
    return str(labels.get(MODE_LABEL, ""))
