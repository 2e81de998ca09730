"""Views: a difference gives exactly the full state, whatever changed and whatever the filter is."""

import dataclasses
import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.services.api import filters, objects, view
from agent.services.api.encoder import ServiceEncoder
from agent.services.api.store import ServiceStore
from agent.services.api.view import SavedRevision, ServicesSnapshot, ServiceView
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.making import (
    NODE,
    endpoint_json,
    endpoint_slice,
    no_readiness,
    read,
    service,
    service_json,
)

INSTANCE = 7
NAMES = ("a", "b", "c")
NAMESPACES = ("default", "kube-system")


class OneView:
    """A view without a publisher: changes are committed when the test does."""

    def __init__(self, store: ServiceStore, **request: Any) -> None:
        self.store = store
        selection = filters.read(pb.NextFilter(**request))
        self.encoder = ServiceEncoder(store, selection.form, is_for_all_nodes=False)
        self.view = ServiceView(
            store, self.encoder, node=NODE, selection=selection, instance_id=INSTANCE
        )

    def commit(self) -> None:
        while self.view.dirty:
            self.view.evaluate_next()
        if self.view.has_changed(None):
            # Other views may have had revisions in between.
            self.view.commit(self.view.rev + 3, None)

    def mark(self, key: tuple[str, str]) -> None:
        self.encoder.forget(key)
        self.view.mark(key)


@dataclasses.dataclass
class Views:
    """The views of a store, as its listener."""

    views: list[OneView] = dataclasses.field(default_factory=list)

    def service_changed(self, key: tuple[str, str], *, is_urgent: bool) -> None:
        for one in self.views:
            one.mark(key)

    def zone_changed(self, node: str) -> None:
        for one in self.views:
            one.view.mark_all()


class Client:
    """A state that is kept current by differences only, after the first."""

    def __init__(self) -> None:
        self.position = (0, 0)
        self.services: dict[tuple[str, str], pb.ServiceEndpoints] = {}
        self.full_states = 0

    def apply(self, snapshot: ServicesSnapshot) -> None:
        header, *parts, end = map(pb.NextItem.FromString, snapshot.messages())
        if not header.is_delta:
            self.services = {}
            self.full_states += 1
        for part in parts:
            for one in part.services.items:
                self.services[one.namespace, one.name] = one
            for name in part.services.removed:
                self.services.pop((name.namespace, name.name), None)
        assert end.end.service_count == len(self.services)
        self.position = (header.next.instance_id, header.next.rev)


REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"namespaces": ["kube-system"]},
    {"types": [pb.SERVICE_TYPE_EXTERNAL_NAME, pb.SERVICE_TYPE_CLUSTER_IP]},
    {"families": [pb.ADDRESS_FAMILY_IPV6]},
    {"service_proxy_name": "own"},
    {"service_proxy_name": "*", "label_patterns": ["*"]},
    {"all_endpoints": True, "endpoint_details": True},
)
KEYS = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(NAMES))
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(("ClusterIP", "NodePort", "ExternalName")),
        "clusterIPs": st.sampled_from((["198.18.0.1"], ["fd00:18::1"], ["None"], [""])),
        "labels": st.sampled_from(
            ({"app": "a"}, {"service.kubernetes.io/service-proxy-name": "own"})
        ),
    },
)
ADDRESSES = st.lists(st.integers(1, 4), max_size=3, unique=True)
CHANGES = st.one_of(
    st.tuples(st.just("service"), KEYS, SPECS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("slice"), KEYS, ADDRESSES),
    st.tuples(st.just("zone"), st.sampled_from(("a", "b"))),
    st.tuples(st.just("commit")),
    st.tuples(st.just("read"), st.integers(0, len(REQUESTS) - 1)),
)


def change(store: ServiceStore, kind: str, *arguments: Any) -> None:
    if kind == "zone":
        store.set_zone(*arguments)
        return
    (namespace, name), *more = arguments
    if kind == "slice":
        zones = [{"zones": [zone]} for zone in ("a", "b", "a", "b")]
        found = endpoint_slice(
            *(endpoint_json(f"198.19.0.{n}", node=NODE, **zones[n - 1]) for n in more[0]),
            service=name,
            name=name,
        )
        store.set_slice(None, in_namespace(found, namespace))
        return
    content = service_json(name, **dict(more[0] if more else {}))
    content["metadata"]["namespace"] = namespace
    one = read(content, objects.ApiService)
    store.set_service(one, one if kind == "service" else None)


def in_namespace(found: objects.EndpointSlice, namespace: str) -> objects.EndpointSlice:
    metadata = msgspec.structs.replace(found.metadata, namespace=namespace)
    return msgspec.structs.replace(found, metadata=metadata)


@given(steps=st.lists(CHANGES, max_size=40), history=st.sampled_from((1, 5, 4096)))
def test_differences_give_exactly_the_full_state(
    steps: list[tuple[Any, ...]], history: int
) -> None:
    store = ServiceStore(NODE, readiness=no_readiness)
    views = Views([OneView(store, **request) for request in REQUESTS])
    store.listen(views)
    clients = [Client() for _ in REQUESTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "_MAX_HISTORY", history)
        for kind, *arguments in (*steps, ("commit",)):
            if kind == "read":
                synchronise(clients[arguments[0]], views.views[arguments[0]].view)
            elif kind == "commit":
                for one in views.views:
                    one.commit()
            else:
                change(store, kind, *arguments)
        for client, one in zip(clients, views.views, strict=True):
            synchronise(client, one.view)


def synchronise(client: Client, of: ServiceView) -> None:
    if of.is_newer(*client.position):
        client.apply(of.changes_since(*client.position))
    if of.rev:
        whole = Client()
        whole.apply(of.snapshot())
        assert client.services == whole.services
        assert client.position == whole.position


@pytest.fixture
def store() -> ServiceStore:
    made = ServiceStore(NODE, readiness=no_readiness)
    for number in range(10):
        made.set_service(None, service(f"s{number}"))
    return made


@pytest.fixture
def one(store: ServiceStore) -> OneView:
    made = OneView(store)
    store.listen(Views([made]))
    made.commit()
    return made


def test_difference_has_only_what_changed_and_was_removed(
    store: ServiceStore, one: OneView
) -> None:
    base = one.view.rev
    store.set_service(None, service("s3", type="NodePort"))
    one.commit()
    store.set_service(None, service("new"))
    store.set_service(service("s5"), None)
    store.set_service(service("never"), None)
    one.commit()
    found = one.view.changes_since(INSTANCE, base)
    header, part, end = map(pb.NextItem.FromString, found.messages())
    assert header.is_delta
    assert [each.name for each in part.services.items] == ["new", "s3"]
    assert [each.name for each in part.services.removed] == ["s5"]
    assert end.end.service_count == 10


def test_revision_that_a_view_never_had_gets_the_full_state(one: OneView) -> None:
    assert one.view.rev == 3
    for instance_id, rev in (
        (INSTANCE, 2),
        (INSTANCE, 4),
        (INSTANCE, 0),
        (INSTANCE + 1, 3),
        (0, 0),
    ):
        assert not one.view.changes_since(instance_id, rev).is_delta
    assert one.view.changes_since(INSTANCE, 3).is_delta


def test_history_is_bounded_and_a_client_behind_it_gets_the_full_state(
    store: ServiceStore, one: OneView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_MAX_HISTORY", 20)
    revs = [one.view.rev]
    for number in range(40):
        store.set_service(None, service("s3", clusterIPs=[f"198.18.1.{number + 1}"]))
        one.commit()
        revs.append(one.view.rev)
    found = [one.view.changes_since(INSTANCE, rev).is_delta for rev in revs]
    assert found == sorted(found)
    assert (found.count(True), len(one.view._history)) == (10, 10)


def test_revision_of_everything_is_still_a_base(
    store: ServiceStore, one: OneView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_MAX_HISTORY", 5)
    for number in range(10):
        store.set_service(None, service(f"s{number}", type="NodePort"))
    one.commit()
    base = one.view.rev
    store.set_service(None, service("s0"))
    one.commit()
    assert len(one.view.changes_since(INSTANCE, base).elements) == 1


def test_difference_of_everything_is_the_full_state(store: ServiceStore, one: OneView) -> None:
    base = one.view.rev
    for number in range(10):
        store.set_service(service(f"s{number}"), None)
    store.set_service(None, service("left"))
    one.commit()
    found = one.view.changes_since(INSTANCE, base)
    assert (found.is_delta, found.service_count, len(found.elements)) == (False, 1, 1)


def test_equal_views_share_the_encoded_services(store: ServiceStore) -> None:
    encoder = ServiceEncoder(store, filters.MessageForm(), is_for_all_nodes=True)
    store.set_slice(None, endpoint_slice(endpoint_json("198.19.0.1", node="n1"), service="s0"))
    hinted = endpoint_slice(endpoint_json("198.19.0.2", zones=["a"]), service="s1", name="s1")
    store.set_slice(None, hinted)
    for node, zone in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "")):
        store.set_zone(zone, node)

    def encoded(name: str) -> list[bytes | None]:
        nodes = ("n1", "n2", "n3", "n4")
        return [encoder.encode(("default", name), store.topology_of(node)) for node in nodes]

    local, hinted_to, plain = encoded("s0"), encoded("s1"), encoded("s2")
    assert local[0] != local[1] is local[2] is local[3]
    assert hinted_to[0] is hinted_to[1]
    assert hinted_to[2] is hinted_to[3]
    assert plain[0] is plain[1] is plain[2] is plain[3]


def test_view_without_a_revision_has_nothing_newer(store: ServiceStore) -> None:
    made = OneView(store)
    assert not made.view.is_newer(0, 0)
    made.commit()
    assert made.view.is_newer(0, 0)
    assert made.view.is_newer(INSTANCE, 0)
    assert not made.view.is_newer(INSTANCE, made.view.rev)


def test_service_that_is_as_it_was_makes_no_revision(store: ServiceStore, one: OneView) -> None:
    store.set_service(None, service("s3", type="NodePort"))
    one.view.evaluate_next()
    assert one.view.has_changed(None)
    store.set_service(None, service("s3"))
    one.view.evaluate_next()
    assert not one.view.has_changed(None)


def test_saved_state_is_not_newer_than_what_followed_it(store: ServiceStore, one: OneView) -> None:
    saved = SavedRevision(5, 8, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    assert one.view.has_changed(saved)
    one.view.commit(4, saved)
    assert not one.view.has_changed(saved)
    assert [one.view.is_newer(5, rev) for rev in (7, 8, 9)] == [True, True, False]
    assert [one.view.is_newer(6, rev) for rev in (8, 9)] == [True, True]


def test_difference_of_as_many_services_as_there_are_is_still_one(
    store: ServiceStore, one: OneView
) -> None:
    base = one.view.rev
    for number in range(10):
        store.set_service(None, service(f"s{number}", type="NodePort"))
    one.commit()
    assert one.view.changes_since(INSTANCE, base).is_delta


def test_state_has_its_services_in_order_of_their_names(store: ServiceStore, one: OneView) -> None:
    def names() -> list[str]:
        _, *parts, _ = map(pb.NextItem.FromString, one.view.snapshot().messages())
        return [each.name for part in parts for each in part.services.items]

    before = [f"s{number}" for number in range(10)]
    assert names() == before
    store.set_service(None, service("a"))
    one.commit()
    assert names() == ["a", *before]
    store.set_service(service("s0"), None)
    one.commit()
    assert names() == ["a", *before[1:]]
