"""Zones of nodes, from the API server or as configured."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from agent.kube.client import ApiClient
from agent.kube.objects import MetadataOnly
from agent.kube.watcher import Query, Watcher
from agent.services.api.objects import ZONE_LABEL

ALL_NODES = Query("nodes", "/api/v1/nodes", MetadataOnly, is_metadata_only=True)


class NodeZones(Protocol):
    """The zone of each node that is known."""

    @property
    def synced(self) -> asyncio.Event:
        """Set once all are known."""

    def zones(self) -> Mapping[str, str]: ...


class FixedZone:
    """One node's, as configured. zone: empty for none."""

    def __init__(self, node: str, zone: str) -> None:
        self._zones = {node: zone} if zone else {}
        self.synced = asyncio.Event()
        self.synced.set()

    def zones(self) -> Mapping[str, str]:
        return self._zones


class WatchedZones:
    """Of the nodes of a watch, which someone else runs."""

    def __init__(self, nodes: Watcher[MetadataOnly]) -> None:
        self._nodes = nodes
        self.synced = nodes.synced

    def zones(self) -> Mapping[str, str]:
        return {
            name: zone
            for (_, name), node in self._nodes.objects.items()
            if (zone := node.metadata.labels.get(ZONE_LABEL))
        }


def watch_all(api: ApiClient) -> Watcher[MetadataOnly]:
    """A watch of all nodes, to be run by the caller."""
    return Watcher(api, ALL_NODES, on_change=lambda old, new: None)
