"""Lasting labels: those that the next pod of the same workload has, too."""

from collections.abc import Mapping

from agent import labels as agent_labels

# Labels that controllers set on single pods or revisions, and that vanish with them.
_TRANSIENT = {
    "pod-template-hash",
    "pod-template-generation",
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "batch.kubernetes.io/job-completion-index",
}


def lasting_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Without those of single pods and revisions, and without podgate's own; in order of keys."""
    return {
        key: value
        for key, value in sorted(labels.items())
        if key not in _TRANSIENT and not key.startswith(f"{agent_labels.DOMAIN}/")
    }
