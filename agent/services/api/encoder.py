"""Encoded services in one form, for any node; equal ones are encoded once."""

from agent.services.api import encode, stream_items
from agent.services.api.filters import MessageForm
from agent.services.api.store import ServiceKey, ServiceStore
from agent.services.api.topology import NodeTopology


class ServiceEncoder:
    """The services of a store in one form, each as an element of `stream_items.parts`."""

    def __init__(self, store: ServiceStore, form: MessageForm, *, is_for_all_nodes: bool) -> None:
        """is_for_all_nodes: whether it encodes for others than the store's own node."""
        self._store = store
        self._form = form
        self._is_for_all_nodes = is_for_all_nodes
        self._encoded: dict[ServiceKey, dict[NodeTopology, bytes | None]] = {}
        self._places: dict[ServiceKey, frozenset[str]] = {}
        """Nodes and zones that the slices of a service name."""

    def encode(self, key: ServiceKey, topology: NodeTopology) -> bytes | None:
        """The service as that node uses it; None if there is none in this form."""
        if self._is_for_all_nodes:
            topology = self._relevant(key, topology)
        by_topology = self._encoded.setdefault(key, {})
        if topology not in by_topology:
            by_topology[topology] = self._encode(key, topology)
        return by_topology[topology]

    def forget(self, key: ServiceKey) -> None:
        """The service has changed."""
        self._encoded.pop(key, None)
        self._places.pop(key, None)

    def _encode(self, key: ServiceKey, topology: NodeTopology) -> bytes | None:
        message = encode.encode_service(
            self._store.services[key], self._store.slices_of(key), topology, self._form
        )
        return stream_items.element(message) if message is not None else None

    def _relevant(self, key: ServiceKey, topology: NodeTopology) -> NodeTopology:
        """Without what no endpoint of the service has to do with: the service is the same for all
        such nodes."""
        places = self._places.get(key)
        if places is None:
            places = frozenset(
                name
                for parsed in self._store.slices_of(key)
                for candidate in parsed.candidates
                for name in (candidate.node, *candidate.nodes, *candidate.zones)
            )
            self._places[key] = places
        return NodeTopology(
            topology.node if topology.node in places else "",
            topology.zone if topology.zone in places else "",
        )
