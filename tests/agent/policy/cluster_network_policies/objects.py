"""ClusterNetworkPolicies as the watch has them."""

from typing import Any

import msgspec

from agent.kube.objects import ObjectMetadata
from agent.policy.cluster_network_policies.api_types import ApiClusterNetworkPolicy


def received(name: str, spec: dict[str, Any]) -> ApiClusterNetworkPolicy:
    raw = msgspec.Raw(msgspec.json.encode(spec))
    return ApiClusterNetworkPolicy(metadata=ObjectMetadata(name=name), spec=raw)
