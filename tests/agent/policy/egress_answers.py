"""Specs of HostEgressPolicies, valid and not, and what a real API server answers to each, as
answers.py has those of HostAccessPolicies."""

import functools
import json
from typing import Any

from agent import labels
from tests.agent.policy import answers

FILE = answers.FILE.with_name("egresspolicies.json")

_Json = dict[str, Any]
_PODS: _Json = {"hostNetworkPods": {"podSelector": {}}}
_UNIT: _Json = {"systemdUnit": {"name": "a.service"}}

VALID: tuple[_Json, ...] = (
    {},
    {"subjects": [_PODS, _UNIT], "except": [{"hostNetworkPods": {"namespaces": ["a"]}}]},
    {"deny": [{"preset": name} for name in ("Metadata", "Kubelet", "Etcd", "Loopback")]},
    {"deny": [{"cidr": "10.0.0.0/8"}, {"cidr": "fd00::/8"}, {"cidr": "198.18.0.1"}]},
    {"deny": [{"cidr": "::1/128", "ports": [{"port": 80, "endPort": 90}, {"protocol": "UDP"}]}]},
    {"deny": [{"cidr": "10.0.0.1/32", "ports": [{"protocol": 132, "port": 1}]}]},
    {"action": "Enforce", "nodeSelector": {"matchLabels": {"a": "b"}}},
)
WRONG: tuple[tuple[_Json, str], ...] = (
    ({"subjects": []}, "spec.subjects"),
    ({"subjects": [{}]}, "spec.subjects[0]"),
    ({"subjects": [_PODS | _UNIT]}, "spec.subjects[0]"),
    ({"subjects": [{"systemdUnit": {"name": "a"}}]}, "spec.subjects[0].systemdUnit.name"),
    ({"except": []}, "spec.except"),
    ({"deny": []}, "spec.deny"),
    ({"deny": [{}]}, "spec.deny[0]"),
    ({"deny": [{"cidr": "10.0.0.0/8", "preset": "Etcd"}]}, "spec.deny[0]"),
    ({"deny": [{"preset": "Everything"}]}, "spec.deny[0].preset"),
    ({"deny": [{"preset": "Etcd", "ports": [{"port": 1}]}]}, "spec.deny[0].ports"),
    ({"deny": [{"cidr": "10.0.0.1/8"}]}, "spec.deny[0].cidr"),
    ({"deny": [{"cidr": "example.org"}]}, "spec.deny[0].cidr"),
    ({"deny": [{"cidr": "10.0.0.0/8", "ports": [{}]}]}, "spec.deny[0].ports[0]"),
    ({"deny": [{"cidr": "10.0.0.0/8", "ports": [{"endPort": 2}]}]}, "ports[0].endPort"),
    (
        {"deny": [{"cidr": "10.0.0.0/8", "ports": [{"protocol": "ICMP", "port": 2}]}]},
        "ports[0].port",
    ),
    ({"action": "Deny"}, "spec.action"),
)
"""Specs, and the field that both name."""


def document(**spec: Any) -> _Json:
    default = {"subjects": [_PODS], "deny": [{"preset": "Metadata"}]}
    return {
        "apiVersion": labels.POLICY_API_VERSION,
        "kind": labels.EGRESS_KIND,
        "metadata": {"name": "a-policy"},
        "spec": default | spec,
    }


def specs() -> dict[str, _Json]:
    """All of them, each with a name."""
    made = {f"valid {number}": spec for number, spec in enumerate(VALID)}
    made |= {f"wrong {number}": spec for number, (spec, _) in enumerate(WRONG)}
    return {name: document(**spec)["spec"] for name, spec in made.items()}


@functools.cache
def recorded() -> Any:
    """The recording: the digest of the schema, and the answers by name."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def schema_digest() -> str:
    return answers.schema_digest(labels.EGRESS_KIND)
