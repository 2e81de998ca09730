"""What a store has of a source's objects, and which changes its listener learns of."""

from typing import Any

import pytest

from agent.services.api.objects import EndpointSlice
from agent.services.api.store import ServiceStore
from agent.services.api.topology import NodeTopology
from tests.agent.services.api.making import (
    NODE,
    Json,
    endpoint_json,
    endpoint_slice,
    no_readiness,
    service,
)

WEB, API = ("default", "web"), ("default", "api")
LATER, AT_ONCE = False, True


class Listener:
    """All changes, in order: services with whether they are urgent, and nodes."""

    def __init__(self) -> None:
        self._changes: list[Any] = []

    def service_changed(self, key: tuple[str, str], *, is_urgent: bool) -> None:
        self._changes.append((key, is_urgent))

    def zone_changed(self, node: str) -> None:
        self._changes.append(node)

    def take(self) -> list[Any]:
        taken, self._changes = self._changes, []
        return taken


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def store(listener: Listener) -> ServiceStore:
    made = ServiceStore(NODE, readiness=no_readiness)
    made.listen(listener)
    return made


def pods(*endpoints: Json, name: str = "web-1", of: str = "web") -> EndpointSlice:
    return endpoint_slice(*endpoints, name=name, service=of)


def addresses(store: ServiceStore, key: tuple[str, str] = WEB) -> list[list[str]]:
    """Of each slice of a service."""
    return [[one.address.text for one in found.candidates] for found in store.slices_of(key)]


HERE = endpoint_json("198.19.0.1", node=NODE, uid="u1")
HERE_WITHOUT_UID = endpoint_json("198.19.0.2", node=NODE)
AWAY = endpoint_json("198.19.0.3", uid="u3")


def test_services_are_those_that_were_set_last(store: ServiceStore, listener: Listener) -> None:
    first, second = service(), service(type="NodePort")
    store.set_service(None, first)
    store.set_service(first, second)
    assert store.services == {WEB: second}
    store.set_service(second, None)
    store.set_service(None, None)
    assert store.services == {}
    assert listener.take() == 3 * [(WEB, LATER)]


def test_slice_changes_the_service_that_it_is_of(store: ServiceStore, listener: Listener) -> None:
    first, second = pods(AWAY), pods(HERE_WITHOUT_UID, AWAY)
    store.set_slice(None, first)
    store.set_slice(first, second)
    assert addresses(store) == [["198.19.0.2", "198.19.0.3"]]
    store.set_slice(second, second)
    assert listener.take() == 2 * [(WEB, LATER)]
    moved = pods(AWAY, of="api")
    store.set_slice(second, moved)
    assert listener.take() == [(WEB, LATER), (API, LATER)]
    assert (addresses(store), addresses(store, API)) == ([], [["198.19.0.3"]])
    store.set_slice(moved, None)
    store.set_slice(moved, None)
    assert (addresses(store, API), listener.take()) == ([], [(API, LATER)])
    store.set_slice(None, pods(AWAY, of=""))
    assert (addresses(store, ("default", "")), listener.take()) == ([], [])


def test_slices_are_in_order_of_their_names(store: ServiceStore) -> None:
    for name, endpoint in (("web-2", AWAY), ("web-3", HERE), ("web-1", HERE_WITHOUT_UID)):
        store.set_slice(None, pods(endpoint, name=name))
    assert addresses(store) == [["198.19.0.2"], ["198.19.0.3"], ["198.19.0.1"]]


def test_readiness_of_a_local_pod_changes_its_services_at_once(
    store: ServiceStore, listener: Listener
) -> None:
    web = pods(HERE, AWAY)
    store.set_slice(None, web)
    store.set_slice(None, pods(HERE, HERE_WITHOUT_UID, name="api-1", of="api"))
    listener.take()

    def changed(*keys: str) -> list[Any]:
        store.pod_changed(keys)
        return sorted(listener.take())

    assert changed("u1") == [(API, AT_ONCE), (WEB, AT_ONCE)]
    assert changed("198.19.0.2", "other") == [(API, AT_ONCE)]
    assert changed("198.19.0.1", "198.19.0.3", "u3", "other") == []
    # An endpoint may be in two slices for a moment.
    store.set_slice(None, pods(HERE, name="web-2"))
    store.set_slice(web, pods(AWAY))
    listener.take()
    assert changed("u1") == [(API, AT_ONCE), (WEB, AT_ONCE)]
    store.set_slice(pods(HERE, name="web-2"), None)
    listener.take()
    assert changed("u1") == [(API, AT_ONCE)]
    store.set_slice(pods(name="api-1", of="api"), pods(HERE_WITHOUT_UID, name="api-1", of="api"))
    listener.take()
    assert changed("u1") == []
    assert changed("198.19.0.2") == [(API, AT_ONCE)]


@pytest.mark.parametrize("publishes_not_ready", [False, True])
def test_readiness_of_a_local_pod_counts_unless_its_service_has_all(
    publishes_not_ready: bool,
) -> None:
    store = ServiceStore(NODE, readiness=lambda uid, address: False)
    store.set_slice(None, pods(HERE))
    assert [one.is_ready for one in store.slices_of(WEB)[0].candidates] == [False]
    store.set_service(None, service(publishNotReadyAddresses=publishes_not_ready))
    (found,) = store.slices_of(WEB)
    assert [one.is_ready for one in found.candidates] == [publishes_not_ready]


def test_zone_of_a_node_changes_with_its_label(store: ServiceStore, listener: Listener) -> None:
    for zone in ("", "a", "a", "b"):
        store.set_zone(zone)
    store.set_zone("a", "other")
    assert store.topology_of(NODE) == NodeTopology(NODE, "b")
    assert store.zones == {NODE: "b", "other": "a"}
    store.set_zone("", "other")
    store.set_zone("", "other")
    assert store.topology_of("other") == NodeTopology("other", "")
    assert listener.take() == [NODE, NODE, "other", "other"]
