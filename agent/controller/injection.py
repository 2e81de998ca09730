"""Injection of readiness gates: which label adds which gate, and the webhook's patch.

A namespace's label `podgate.io/inject` selects its pods. Each gate has a policy, or a webhook, of
its own, since admission of pods does not show the namespace's labels; the chart has both
(templates/injection.yaml).
"""

from collections.abc import Collection
from typing import Any

from agent import labels

Json = dict[str, Any]

VALUES = {
    labels.ISOLATION_READY: ("isolation", "all", "everything"),
    labels.POLICY_READY: ("policies", "everything"),
    labels.PROBES_PASSING: ("probes", "all", "everything"),
}
"""Of the label `podgate.io/inject`, by the gate that they add. `all` has those that need nothing
but the agent."""


def patch(gates: Collection[str], gate: str) -> list[Json]:
    """The JSON patch (RFC 6902) that adds a gate to a pod with these; empty if it has it."""
    if gate in gates:
        return []
    added = {"conditionType": gate}
    if not gates:
        return [{"op": "add", "path": "/spec/readinessGates", "value": [added]}]
    return [{"op": "add", "path": "/spec/readinessGates/-", "value": added}]
