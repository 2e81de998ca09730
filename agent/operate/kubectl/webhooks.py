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


_JOB = "podgate-webhook-certificate"
"""The Job's name, and that of its bindings, which it deletes last."""


def find(cluster: Cluster) -> Iterator[Finding]:
    """Those of previous releases, those that the API server cannot call, and rights to write them
    that no Job uses."""
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
    if _named(cluster, "clusterrolebindings") and not any(
        map(_is_unfinished, _named(cluster, "jobs", f"--namespace={cluster.namespace}"))
    ):
        text = f"ClusterRoleBinding {_JOB} grants the right to write webhooks, and no Job uses it."
        yield findings.of_cluster(kinds.WEBHOOK_RIGHTS_LEFT, text)


def _named(cluster: Cluster, resource: str, *place: str) -> list[Object]:
    """The object with the Job's name, if there is one."""
    found = cluster.items(resource, *place, f"--field-selector=metadata.name={_JOB}")
    return [one for one in found if one["metadata"]["name"] == _JOB]


def _is_unfinished(job: Object) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    ends = ("Complete", "Failed")
    return not any(one["type"] in ends and one["status"] == "True" for one in conditions)


def _is_trusted(webhook: Object) -> bool:
    return bool((webhook.get("clientConfig") or {}).get("caBundle"))
