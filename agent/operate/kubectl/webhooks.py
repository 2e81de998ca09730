"""Webhooks and admission policies of podgate that no process maintains: findings of the cluster.

No account of podgate's may read or write them, so nothing but the Job of an installation and a user
of kubectl can find them.
"""

from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import findings
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.findings import Finding

OBSOLETE = (
    "mutatingadmissionpolicybinding/podgate-inject-isolation-ready",
    "mutatingadmissionpolicybinding/podgate-inject-probes-passing",
    "mutatingadmissionpolicy/podgate-inject-isolation-ready",
    "mutatingadmissionpolicy/podgate-inject-probes-passing",
    "mutatingwebhookconfiguration/podgate-inject",
    "validatingwebhookconfiguration/podgate-probe-spec",
)
"""What controllers up to 0.1 wrote by themselves; the plugin has nothing of agent/controller."""

CURRENT = (
    "mutatingwebhookconfiguration/podgate-webhook-inject",
    "validatingwebhookconfiguration/podgate-webhook-probe-spec",
)
"""Of the chart."""

_RESOURCES = (
    "mutatingwebhookconfigurations,validatingwebhookconfigurations",
    # Since Kubernetes 1.36.
    "mutatingadmissionpolicies,mutatingadmissionpolicybindings",
)


def find(cluster: Cluster) -> Iterator[Finding]:
    """Those of previous releases, and those that the API server cannot call."""
    found = {
        f"{one['kind'].lower()}/{one['metadata']['name']}": one
        for resources in _RESOURCES
        for one in cluster.items_if_served(resources)
    }
    for name in OBSOLETE:
        if name in found:
            text = f"{name} is of a previous release, and nothing of this release maintains it."
            yield findings.of_cluster(kinds.WEBHOOK_OBSOLETE, text, f"webhook {name}")
    for name in CURRENT:
        if name in found and not all(map(_is_trusted, found[name].get("webhooks") or ())):
            text = (
                f"{name} has no caBundle: the API server does not trust the controller, and does "
                "without its answer."
            )
            yield findings.of_cluster(kinds.WEBHOOK_UNTRUSTED, text, f"webhook {name}")


def _is_trusted(webhook: Object) -> bool:
    return bool((webhook.get("clientConfig") or {}).get("caBundle"))
