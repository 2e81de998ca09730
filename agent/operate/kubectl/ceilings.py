"""Ceilings that keep pods of a node below what their namespaces' labels demand.

To an agent a ceiling is a setting as any other: its pods are as desired. Who labelled a namespace
has to read of it here.
"""

from collections.abc import Iterable, Sequence

from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object
from agent.operate.kubectl.node_status import MODES, NodeStatus

_MODE_LABEL = "podgate.io/mode"
_OFF = "off"


def labelled_namespaces(cluster: Cluster) -> dict[str, str]:
    """Modes of namespaces by their label, without labels that are no mode. None of them for users
    that may not list namespaces."""
    try:
        namespaces = cluster.items("namespaces")
    except KubectlError:
        return {}
    labels = {one["metadata"]["name"]: _mode(one) for one in namespaces}
    return {name: mode for name, mode in labels.items() if mode in MODES}


def sentences(nodes: Iterable[NodeStatus], namespaces: dict[str, str]) -> list[str]:
    """One for each ceiling that matters, with the nodes that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if is_limited(node, namespaces):
            found.setdefault((node.max_mode, node.max_mode_from), []).append(node.node)
    return [
        _sentence(mode, ceiling_from, names, _above(mode, namespaces))
        for (mode, ceiling_from), names in found.items()
    ]


def is_limited(node: NodeStatus, namespaces: dict[str, str]) -> bool:
    """Whether it is off, or below a namespace's label."""
    return node.max_mode in MODES and (
        node.max_mode == _OFF or bool(_above(node.max_mode, namespaces))
    )


def _sentence(mode: str, ceiling_from: str, nodes: Sequence[str], above: Sequence[str]) -> str:
    by = f", by {ceiling_from}" if ceiling_from else ""
    text = f"{printing.listed(nodes)}: at most {mode}{by}"
    if above:
        text += f"; labelled above that: {printing.listed(above)}"
    if mode == _OFF:
        is_of_nodes = "node" in ceiling_from
        names = " ".join(["", *nodes]) if is_of_nodes else ""
        text += f". 'kubectl podgate on{names}' undoes it"
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
    return str(labels.get(_MODE_LABEL, ""))
