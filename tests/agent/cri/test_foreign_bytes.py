"""Responses of a container runtime with any content: what cannot be read is left out."""

import datetime
import ipaddress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cri import client, containerd_pb2, models, runtime_pb2, sandbox_netns
from agent.cri.client import RuntimeClient
from agent.cri.models import SandboxDetails

DEEP = "[" * 100_000
TEXTS = st.text() | st.just(DEEP) | st.sampled_from(["{}", '{"pid":-1}', '{"pid":1e400}', "[]"])


@given(info=st.dictionaries(TEXTS, TEXTS, max_size=3), ip=TEXTS)
def test_no_info_of_a_sandbox_ends_its_reader(info: dict[str, str], ip: str) -> None:
    response = runtime_pb2.PodSandboxStatusResponse(info=info)
    response.status.network.ip = ip
    details = models.decode_details(response)
    list(sandbox_netns.netns_paths(details))


def test_path_of_the_namespace_is_read_beside_info_that_is_no_json() -> None:
    info = {
        "a": DEEP,
        "b": '{"runtimeSpec": 1}',
        "c": '{"sandboxMetadata":{"NetNSPath":"/run/netns/a"}}',
    }
    details = SandboxDetails(
        host_network=False, ips=(ipaddress.ip_address("198.18.0.1"),), info=info
    )
    assert list(sandbox_netns.netns_paths(details)) == ["/run/netns/a"]


@given(
    content=st.binary(max_size=100)
    | st.just(DEEP.encode())
    | st.just(b'{"Metadata":{"ID":"\xff"}}')
)
def test_no_stored_sandbox_ends_its_reader(content: bytes) -> None:
    response = containerd_pb2.GetContainerResponse()
    response.container.extensions[models._STORED_SANDBOX].value = content
    found = models.decode_networked(response)
    assert found is None or msgspec.json.encode(found.sandbox.pod_uid)


@given(content=st.binary(max_size=100), topic=st.sampled_from(["/tasks/exit", "/a"]))
def test_no_event_of_containerd_ends_its_reader(content: bytes, topic: str) -> None:
    envelope = containerd_pb2.Envelope(topic=topic)
    envelope.event.value = content
    assert client._is_exec_exit(envelope) in (True, False)


def test_exit_that_cannot_be_read_is_none_of_another_process() -> None:
    envelope = containerd_pb2.Envelope(topic="/tasks/exit")
    envelope.event.value = b"\xff\xff"
    assert not client._is_exec_exit(envelope)


async def test_sandbox_that_is_added_already_is_not_requested_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    requested: list[str] = []

    async def events(self: RuntimeClient, topics: Any) -> Any:
        for name in ("before", "new"):
            envelope = containerd_pb2.Envelope(topic="/containers/create")
            envelope.event.value = containerd_pb2.ContainerEvent(id=name).SerializeToString()
            yield envelope

    async def call(self: RuntimeClient, method: str, request: Any, *_: Any, **__: Any) -> Any:
        requested.append(request.id)
        return containerd_pb2.GetContainerResponse()

    monkeypatch.setattr(RuntimeClient, "_containerd_events", events)
    monkeypatch.setattr(RuntimeClient, "_call", call)
    monkeypatch.setattr(models, "decode_networked", lambda _: "found")
    runtime = RuntimeClient(tmp_path / "none.sock")
    try:
        found = [one async for one in runtime.networked_sandboxes(lambda name: name == "before")]
        assert requested == ["new"]
        assert len(found) == 1
    finally:
        await runtime.aclose()


@pytest.mark.parametrize("value", [b"\xff\xff", b"\x0a\x05ab"])
async def test_event_that_cannot_be_read_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, value: bytes
) -> None:
    async def events(self: RuntimeClient, topics: Any) -> Any:
        envelope = containerd_pb2.Envelope(topic="/containers/create")
        envelope.event.value = value
        yield envelope

    monkeypatch.setattr(RuntimeClient, "_containerd_events", events)
    runtime = RuntimeClient(tmp_path / "none.sock")
    try:
        assert [found async for found in runtime.networked_sandboxes(lambda _: False)] == []
    finally:
        await runtime.aclose()


async def test_kind_of_event_of_a_later_runtime_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    async def stream(self: RuntimeClient, path: str, request: Any, response: Any) -> Any:
        if path.startswith("/containerd"):
            raise client.CriUnimplementedError("")
        # Field 2, an enumerator that does not exist yet.
        yield runtime_pb2.ContainerEventResponse.FromString(b"\x10\x63")

    monkeypatch.setattr(RuntimeClient, "_stream", stream)
    runtime = RuntimeClient(tmp_path / "none.sock")
    try:
        assert len([event async for event in runtime.events()]) == 1
    finally:
        await runtime.aclose()


NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(created=NUMBERS, state=st.integers(0, 99), attempt=st.integers(0, 2**32 - 1))
def test_no_list_ends_its_reader(created: int, state: int, attempt: int) -> None:
    sandboxes = runtime_pb2.ListPodSandboxResponse()
    sandbox = sandboxes.items.add(id="a", created_at=created, state=state)
    sandbox.metadata.uid, sandbox.metadata.attempt = "u", attempt
    containers = runtime_pb2.ListContainersResponse()
    containers.containers.add(id="a", pod_sandbox_id="b", created_at=created, state=state)
    assert len(models.decode_sandboxes(sandboxes)) == 1
    assert len(models.decode_containers(containers)) == 1


def test_times_are_nanoseconds_up_to_the_largest_and_none_before_1970() -> None:
    at = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    assert models._time(int(at.timestamp()) * 10**9) == at
    assert models._time(0) is None
    assert models._time(-1) is None
    largest = models._time(2**63 - 1)
    assert largest is not None
    assert largest.year == 2262
