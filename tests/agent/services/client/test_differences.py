"""Clients apply differences: users get whole states, whatever the server sends."""

import asyncio
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.client.base import StreamError
from agent.services.client import diff
from agent.services.client.service_states import ServicesSession
from agent.services.client.services import AsyncServicesClient, ServicesClient, ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.services.api.conftest import WAIT_SECONDS, Served
from tests.agent.services.api.making import service
from tests.agent.services.client.test_services import HEADER, WEB, after, client_of, end, scripted

FULL = [HEADER, WEB, end(1)]


def one(name: str, *addresses: str) -> pb.ServiceEndpoints:
    return pb.ServiceEndpoints(name=name, cluster_ips=addresses)


def delta(rev: int, *changed: pb.ServiceEndpoints, removed: tuple[str, ...] = ()) -> list[Any]:
    names = [pb.ServiceName(name=name) for name in removed]
    header = pb.NextFilter(instance_id=7, rev=rev, accepts_delta=True)
    return [
        pb.NextItem(next=header, is_delta=True),
        pb.NextItem(services=pb.Services(items=changed)),
        pb.NextItem(services=pb.Services(removed=names)),
    ]


def names(state: ServicesState | None) -> list[str]:
    assert state is not None
    return [each.name for each in state.services]


def test_difference_is_applied_to_the_last_state(tmp_path: pathlib.Path) -> None:
    streams = [
        FULL,
        [*delta(4, one("api"), one("zoo")), end(3)],
        [*delta(5, one("web", "198.18.0.1"), removed=("api", "unknown")), end(2)],
        [*delta(6), end(2)],
    ]
    with (
        scripted(tmp_path / "s", *streams) as requests,
        contextlib.closing(client_of(tmp_path / "s")) as client,
    ):
        states = [client.next() for _ in streams]
    assert [names(state) for state in states] == [
        ["web"],
        ["api", "web", "zoo"],
        ["web", "zoo"],
        ["web", "zoo"],
    ]
    assert [state.rev for state in states if state] == [3, 4, 5, 6]
    third, fourth = states[2:]
    assert third is not None
    assert fourth is not None
    assert list(third.services[0].cluster_ips) == ["198.18.0.1"]
    # What did not change is the same object: it is compared without reading it.
    assert all(a is b for a, b in zip(third.services, fourth.services, strict=True))
    assert [request.accepts_delta for request in requests] == [False, True, True, True]


def test_client_with_a_wrong_base_reads_the_full_state(tmp_path: pathlib.Path) -> None:
    problems: list[str] = []
    streams = [FULL, [*delta(4, one("api")), end(5)], [HEADER, WEB, end(1)]]
    with (
        scripted(tmp_path / "s", *streams) as requests,
        contextlib.closing(client_of(tmp_path / "s", problems)) as client,
    ):
        assert names(client.next()) == ["web"]
        assert names(client.next()) == ["web"]
        client.next()
    assert requests == [pb.NextFilter(), after(HEADER), pb.NextFilter(), after(HEADER)]
    assert problems == [
        "cannot read the service endpoints of this node: the response is incomplete"
    ]


def test_client_that_resumes_has_no_base(tmp_path: pathlib.Path) -> None:
    with scripted(tmp_path / "s", FULL, FULL) as requests:
        client = ServicesClient(f"unix:{tmp_path / 's'}", instance_id=5, rev=9)
        with contextlib.closing(client):
            client.next()
            client.instance_id = client.rev = 0
            client.next()
    assert requests == [pb.NextFilter(instance_id=5, rev=9), pb.NextFilter()]


def test_differences_can_be_declined(tmp_path: pathlib.Path) -> None:
    with scripted(tmp_path / "s", FULL, FULL) as requests:
        client = ServicesClient(f"unix:{tmp_path / 's'}", accepts_delta=False)
        with contextlib.closing(client):
            client.next()
            client.next()
    assert requests == [pb.NextFilter(), HEADER.next]


def test_filter_is_in_each_request(tmp_path: pathlib.Path) -> None:
    requested = pb.NextFilter(namespaces=["default"], label_patterns=["*"], instance_id=1, rev=1)
    echoed = pb.NextFilter(namespaces=["default"], label_patterns=["*"], instance_id=7, rev=3)
    stream = [pb.NextItem(next=echoed), WEB, end(1)]
    with scripted(tmp_path / "s", stream, stream) as requests:
        client = ServicesClient(f"unix:{tmp_path / 's'}", filter=requested)
        with contextlib.closing(client):
            client.next()
            client.next()
    echoed.accepts_delta = True
    assert requests == [pb.NextFilter(namespaces=["default"], label_patterns=["*"]), echoed]


def test_server_that_ignores_the_filter_is_an_error(tmp_path: pathlib.Path) -> None:
    requested = pb.NextFilter(service_proxy_name="own")
    with scripted(tmp_path / "s", FULL):
        client = ServicesClient(f"unix:{tmp_path / 's'}", filter=requested)
        with (
            contextlib.closing(client),
            pytest.raises(StreamError, match="the server ignores the filter"),
        ):
            client.once(WAIT_SECONDS)


async def test_both_clients_follow_a_server_by_differences(served: Served) -> None:
    await served.start()
    for number in range(5):
        await served.change(f"s{number}")
    requested = pb.NextFilter(label_patterns=["*"])
    first = ServicesClient(served.target, filter=requested)
    async with AsyncServicesClient(served.target, filter=requested) as second:
        for number in range(5):
            states = [
                await asyncio.wait_for(second.next(), WAIT_SECONDS),
                await asyncio.to_thread(first.once, WAIT_SECONDS),
            ]
            assert states[0] == states[1]
            assert len(states[0].services) == 6 - number
            kept = states[0].services[-1]
            served.publisher.store.set_service(service(f"s{number}"), None)
        last = await asyncio.wait_for(second.next(), WAIT_SECONDS)
    await asyncio.to_thread(first.close)
    assert [each.name for each in last.services] == ["web"]
    assert last.services[-1] is kept


KEYS = st.sampled_from(("a", "b", "c", "d"))
STATES = st.lists(st.dictionaries(KEYS, st.sampled_from(("198.18.0.1", "198.18.0.2"))), min_size=1)


@given(states=STATES)
def test_differences_of_any_states_give_these_states(states: list[dict[str, str]]) -> None:
    session = ServicesSession()
    differ: diff.Differ[tuple[str, str], pb.ServiceEndpoints] = diff.Differ()
    before: dict[str, str] = {}
    for rev, state in enumerate(states, start=1):
        request = session.request(7, rev - 1)
        assert request.accepts_delta is (rev > 1)
        read = None
        for item in stream_of(request, rev, before, state):
            read = session.read(item)
        assert read is not None
        assert {each.name: each.cluster_ips[0] for each in read.services} == state
        assert names(read) == sorted(state)
        change = differ.compare(read.by_name())
        assert {name for _, name in change.changed} == {
            name for name in before.keys() & state if before[name] != state[name]
        }
        differ.accept()
        before = state


def stream_of(
    request: pb.NextFilter, rev: int, before: dict[str, str], state: dict[str, str]
) -> Iterator[pb.NextItem]:
    """What a server sends, by difference if the client accepts it."""
    base = before if request.accepts_delta else {}
    yield pb.NextItem(next=pb.NextFilter(instance_id=7, rev=rev), is_delta=request.accepts_delta)
    changed = [one(name, state[name]) for name in sorted(state) if base.get(name) != state[name]]
    yield pb.NextItem(services=pb.Services(items=changed))
    removed = [pb.ServiceName(name=name) for name in sorted(base.keys() - state)]
    yield pb.NextItem(services=pb.Services(removed=removed))
    yield end(len(state))
