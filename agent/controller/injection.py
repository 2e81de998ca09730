"""Injection of readiness gates: objects of the API, and what the webhook answers.

A namespace's label `podgate.io/inject` selects its pods. Each gate has a policy of its own, since
admission of pods does not show the namespace's labels. Where the API server has
MutatingAdmissionPolicies (v1 since Kubernetes 1.36) it adds gates by itself; elsewhere it calls the
controller's webhook. Both leave out the same pods, by the same expressions.
"""

from collections.abc import Collection
from typing import Any, Final

from agent import labels

Json = dict[str, Any]

NAME: Final = "podgate-inject"
VALUES: Final = {
    labels.ISOLATION_READY: ("isolation", "all"),
    labels.PROBES_PASSING: ("probes", "all"),
}
"""Of the label `podgate.io/inject`, by the gate that they add."""

# A pod that is created while the controller is away gets no gate, which is what pods without the
# label have; a pod that cannot be created would be an outage.
_FAILURE_POLICY: Final = "Ignore"
_WEBHOOK_SECONDS: Final = 3

_SELECTED: Final = [
    ("not-host-network", "!has(object.spec.hostNetwork) || !object.spec.hostNetwork"),
    (
        "not-mirror",
        "!has(object.metadata.annotations) || "
        "!('kubernetes.io/config.mirror' in object.metadata.annotations)",
    ),
    (
        "not-windows",
        "(!has(object.spec.os) || object.spec.os.name != 'windows') && "
        "(!has(object.spec.nodeSelector) || !('kubernetes.io/os' in object.spec.nodeSelector) || "
        "object.spec.nodeSelector['kubernetes.io/os'] != 'windows')",
    ),
]


def policy(gate: str, namespace: str) -> list[Json]:
    """The MutatingAdmissionPolicy of a gate, and its binding. namespace: podgate's own."""
    name = policy_name(gate)
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": metadata(name),
            "spec": {
                "failurePolicy": _FAILURE_POLICY,
                "reinvocationPolicy": "IfNeeded",
                "matchConstraints": {
                    "namespaceSelector": _namespaces(gate, namespace),
                    "resourceRules": [_CREATED_PODS],
                },
                "matchConditions": _conditions(gate),
                "mutations": [
                    {
                        "patchType": "JSONPatch",
                        "jsonPatch": {
                            "expression": "(has(object.spec.readinessGates) ? [] : "
                            '[JSONPatch{op: "add", path: "/spec/readinessGates", value: []}]) + '
                            '[JSONPatch{op: "add", path: "/spec/readinessGates/-", '
                            f'value: Object.spec.readinessGates{{conditionType: "{gate}"}}}}]'
                        },
                    }
                ],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": metadata(name),
            "spec": {"policyName": name},
        },
    ]


def webhook(namespace: str, client_config: dict[str, Json]) -> Json:
    """The MutatingWebhookConfiguration of all gates. client_config: by the gate."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": metadata(NAME),
        "webhooks": [
            {
                "name": f"inject-{_word(gate)}.{labels.DOMAIN}",
                "admissionReviewVersions": ["v1"],
                "clientConfig": client_config[gate],
                "failurePolicy": _FAILURE_POLICY,
                "timeoutSeconds": _WEBHOOK_SECONDS,
                "sideEffects": "None",
                "reinvocationPolicy": "IfNeeded",
                "matchPolicy": "Equivalent",
                "namespaceSelector": _namespaces(gate, namespace),
                "objectSelector": {},
                "rules": [_CREATED_PODS | {"scope": "Namespaced"}],
                "matchConditions": _conditions(gate),
            }
            for gate in VALUES
        ],
    }


def patch(gates: Collection[str], gate: str) -> list[Json]:
    """The JSON patch (RFC 6902) that adds a gate to a pod with these; empty if it has it."""
    if gate in gates:
        return []
    added = {"conditionType": gate}
    if not gates:
        return [{"op": "add", "path": "/spec/readinessGates", "value": [added]}]
    return [{"op": "add", "path": "/spec/readinessGates/-", "value": added}]


def policy_name(gate: str) -> str:
    return f"{NAME}-{_word(gate)}"


def metadata(name: str) -> Json:
    """Of an object that the controller owns."""
    return {"name": name, "labels": {"app.kubernetes.io/name": "podgate-controller"}}


_CREATED_PODS: Final[Json] = {
    "apiGroups": [""],
    "apiVersions": ["v1"],
    "operations": ["CREATE"],
    "resources": ["pods"],
}


def _word(gate: str) -> str:
    return gate.partition("/")[2]


def _namespaces(gate: str, namespace: str) -> Json:
    return {
        "matchExpressions": [
            {"key": labels.INJECT_LABEL, "operator": "In", "values": list(VALUES[gate])},
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [namespace]},
        ]
    }


def _conditions(gate: str) -> list[Json]:
    missing = (
        "!has(object.spec.readinessGates) || "
        f"!object.spec.readinessGates.exists(g, g.conditionType == '{gate}')"
    )
    return [
        {"name": name, "expression": expression}
        for name, expression in (*_SELECTED, ("not-yet", missing))
    ]
