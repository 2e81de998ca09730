"""Files of rules: for Prometheus, and the object for the Prometheus operator."""

from typing import Any

from agent.operate.monitoring import alerts, recordings


def recording_rules() -> dict[str, Any]:
    """A rules file of the recording rules alone, as YAML's data."""
    return {"groups": [recordings.group()]}


def all_rules() -> dict[str, Any]:
    """Recording rules and alerts: the spec of a PrometheusRule."""
    return {"groups": [recordings.group(), *alerts.rules()["groups"]]}


def prometheus_rule() -> dict[str, Any]:
    """The object for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "podgate",
            "namespace": "podgate",
            "labels": {"app.kubernetes.io/name": "podgate"},
        },
        "spec": all_rules(),
    }
