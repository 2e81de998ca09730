"""Services and slices of the cluster, parsed, as a source reports them; and the newest readiness of
this node's pods."""

from collections.abc import Iterable
from typing import Protocol

from agent.services.api import objects, slices
from agent.services.api.slices import ParsedSlice, ReadinessSource
from agent.services.api.topology import NodeTopology

ServiceKey = tuple[str, str]
"""Namespace and name."""


class StoreListener(Protocol):
    """Learns of each change."""

    def service_changed(self, key: ServiceKey, *, is_urgent: bool) -> None:
        """The service, its slices or the readiness of its endpoints. is_urgent: publish at once."""

    def zone_changed(self, node: str) -> None:
        """The zone of a node."""


class ServiceStore:
    """All services of the cluster, and what a source reports of them."""

    def __init__(self, node: str, *, readiness: ReadinessSource) -> None:
        """readiness: of the pods on this node."""
        self.node = node
        self.services: dict[ServiceKey, objects.ApiService] = {}
        self._readiness = readiness
        self._slices: dict[ServiceKey, dict[str, ParsedSlice]] = {}
        self._services_of_pod: dict[str, set[ServiceKey]] = {}
        """Services with an endpoint here, by uid or address of its pod."""
        self.zones: dict[str, str] = {}
        """By node, where known. Change them by `set_zone`."""
        self._listener: StoreListener | None = None

    def listen(self, listener: StoreListener) -> None:
        """Set the only listener."""
        self._listener = listener

    def slices_of(self, key: ServiceKey) -> list[ParsedSlice]:
        """By name: which of two mentions of an endpoint counts must not depend on the order of
        arrival."""
        found = self._slices.get(key, {})
        in_order = [found[name] for name in sorted(found)]
        service = self.services.get(key)
        if service is not None and service.spec.publish_not_ready_addresses:
            return in_order
        return [one.with_readiness(self.node, self._readiness) for one in in_order]

    def topology_of(self, node: str) -> NodeTopology:
        return NodeTopology(node, self.zones.get(node, ""))

    def set_service(self, old: objects.ApiService | None, new: objects.ApiService | None) -> None:
        """A service was added, changed or deleted."""
        service = new or old
        if service is None:
            return
        key = (service.metadata.namespace, service.metadata.name)
        if new is None:
            self.services.pop(key, None)
        else:
            self.services[key] = new
        self._changed(key)

    def set_slice(
        self, old: objects.EndpointSlice | None, new: objects.EndpointSlice | None
    ) -> None:
        """A slice was added, changed or deleted."""
        if old is not None and (new is None or old.service != new.service):
            self._put_slice(old, None)
        if new is not None:
            self._put_slice(new, slices.parse(new))

    def set_zone(self, zone: str, node: str | None = None) -> None:
        """The zone of a node, of this one by default; empty: unknown. Every service depends on
        it."""
        node = self.node if node is None else node
        if zone == self.zones.get(node, ""):
            return
        if zone:
            self.zones[node] = zone
        else:
            del self.zones[node]
        if self._listener:
            self._listener.zone_changed(node)

    def pod_changed(self, keys: Iterable[str]) -> None:
        """The readiness of the pod with this uid and these addresses has changed."""
        for key in keys:
            for service in self._services_of_pod.get(key, ()):
                self._changed(service, is_urgent=True)

    def _put_slice(self, changed: objects.EndpointSlice, content: ParsedSlice | None) -> None:
        if not changed.service:
            return
        key = (changed.metadata.namespace, changed.service)
        of_service = self._slices.setdefault(key, {})
        before = of_service.pop(changed.metadata.name, None)
        if content is not None:
            of_service[changed.metadata.name] = content
        if not of_service:
            del self._slices[key]
        if before == content:
            return
        removed = before.local_keys(self.node) if before else frozenset[str]()
        added = content.local_keys(self.node) if content else frozenset[str]()
        if removed or added:
            remaining = (one.local_keys(self.node) for one in of_service.values())
            self._index(key, removed.difference(*remaining), added)
        self._changed(key)

    def _index(self, key: ServiceKey, removed: frozenset[str], added: frozenset[str]) -> None:
        for name in removed:
            services = self._services_of_pod.get(name, set())
            services.discard(key)
            if not services:
                self._services_of_pod.pop(name, None)
        for name in added:
            self._services_of_pod.setdefault(name, set()).add(key)

    def _changed(self, key: ServiceKey, *, is_urgent: bool = False) -> None:
        if self._listener:
            self._listener.service_changed(key, is_urgent=is_urgent)
