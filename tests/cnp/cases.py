"""The cases of cases.yaml, with their objects for the API."""

import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

LABEL = "podgate.io/conformance-case"
ADMITTED, DROPPED = "admitted", "dropped"
ORIGINS = ("kubelet", "host-process", "host-network")
GROUP = "policy.networking.k8s.io/v1alpha2"

_PATH = pathlib.Path(__file__).with_name("cases.yaml")


class Case(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """One pod, and what its node may do. policies, network_policies: specs with placeholders."""

    name: str
    ingress: str
    kubelet: str
    host_process: str
    host_network: str
    policies: list[dict[str, Any]] = []
    network_policies: list[dict[str, Any]] = msgspec.field(
        default_factory=list, name="networkPolicies"
    )

    @property
    def labels(self) -> dict[str, str]:
        """Those of its pod."""
        return {LABEL: self.name}

    @property
    def expected(self) -> dict[str, str]:
        """By origin."""
        return dict(zip(ORIGINS, (self.kubelet, self.host_process, self.host_network), strict=True))

    def cluster_network_policies(self, prefix: str = "") -> list[dict[str, Any]]:
        return [
            {
                "apiVersion": GROUP,
                "kind": "ClusterNetworkPolicy",
                "metadata": {"name": f"{prefix}{self.name}-{number}"},
                "spec": _filled(spec, self._placeholders),
            }
            for number, spec in enumerate(self.policies)
        ]

    def own_network_policies(self, namespace: str) -> list[dict[str, Any]]:
        return [
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": f"{self.name}-{number}", "namespace": namespace},
                "spec": _filled(spec, self._placeholders),
            }
            for number, spec in enumerate(self.network_policies)
        ]

    @property
    def _placeholders(self) -> dict[str, Any]:
        pod = {"matchLabels": self.labels}
        return {
            "$pod": pod,
            "$subject": {"pods": {"namespaceSelector": {}, "podSelector": pod}},
            "$everything": {"namespaces": {}},
            "$others": {"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": "others"}}},
        }


def read() -> list[Case]:
    return msgspec.convert(yaml.safe_load(_PATH.read_text(encoding="utf-8")), list[Case])


def _filled(value: Any, placeholders: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, placeholders) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, placeholders) for one in value]
    return placeholders.get(value, value) if isinstance(value, str) else value
