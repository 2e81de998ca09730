"""The CRI client: errors of one sentence, typed responses, events, and the search for a socket."""

import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.cri import containerd_pb2, models, runtime_pb2
from agent.cri.client import CriError, CriNotFoundError, CriUnimplementedError, RuntimeClient
from agent.cri.endpoints import open_runtime
from agent.cri.models import CriContainerState
from tests.runtime import servers
from tests.runtime.servers import FakeRuntime
from tests.runtime.watching import following

_SANDBOX = runtime_pb2.PodSandbox(
    id="s", metadata=runtime_pb2.PodSandboxMetadata(name="web", uid="u", namespace="shop")
)

_TOO_SLOW = "{path} did not respond to Version within 0.5 s; check the container runtime."


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "runtime.sock"


async def test_no_socket_is_one_sentence(path: pathlib.Path) -> None:
    sentence = await _error_text(path)
    assert sentence == (
        f"no container runtime's socket at {path} (No such file or directory); name the one that "
        "the kubelet uses, and mount its directory."
    )


async def test_regular_file_is_one_sentence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert await _error_text(path) == (
        f"{path} is not a socket; name the one of the runtime that the kubelet uses."
    )


async def test_socket_without_a_listener_is_one_sentence(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert await _error_text(path) == (
        f"no container runtime responds at {path} (Connection refused); podgate retries until one "
        "does."
    )


@pytest.mark.parametrize(
    "content",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00" * 64],
    ids=["http", "end", "zeros"],
)
async def test_server_of_another_protocol_is_one_sentence(
    path: pathlib.Path, content: bytes
) -> None:
    async with servers.speaking(path, content):
        sentence = await _error_text(path)
    assert str(path) in sentence
    assert "\n" not in sentence


async def test_silent_server_times_out(path: pathlib.Path) -> None:
    async with servers.speaking(path, None):
        sentence = await _error_text(path)
    assert sentence == _TOO_SLOW.format(path=path)


async def test_hanging_runtime_times_out(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.responses["Version"] = None
    async with servers.serving(path, runtime):
        assert await _error_text(path) == _TOO_SLOW.format(path=path)


async def test_grpc_server_without_cri_is_one_sentence(path: pathlib.Path) -> None:
    async with servers.serving(path, None):
        assert await _error_text(path) == (
            f"{path} does not implement the CRI's Version; name the socket of the runtime that the "
            "kubelet uses, or enable its CRI (v1)."
        )


async def test_error_of_the_runtime_is_one_sentence(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.responses["Version"] = grpc.StatusCode.UNKNOWN
    async with servers.serving(path, runtime):
        assert await _error_text(path) == f"{path} failed Version: as the test wants it."


async def test_deleted_sandbox_is_not_found(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.responses["PodSandboxStatus"] = grpc.StatusCode.NOT_FOUND
    async with servers.serving(path, runtime), _client(path) as client:
        with pytest.raises(CriNotFoundError, match="PodSandboxStatus"):
            await client.sandbox_details("s")


async def test_runtime_that_starts_later_is_found(path: pathlib.Path) -> None:
    async with following(path) as watched:
        await watched.until(
            "the runtime is missing", lambda: "no container" in watched.sandboxes.problem
        )
        runtime = FakeRuntime()
        runtime.responses["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(items=[_SANDBOX])
        runtime.responses["PodSandboxStatus"] = runtime_pb2.PodSandboxStatusResponse()
        async with servers.serving(path, runtime):
            await watched.until("it responds", lambda: watched.sandboxes.current)
        assert watched.sandboxes.current["u"].full_name == "shop/web"


async def test_responses_are_typed_without_invalid_values(
    path: pathlib.Path,
) -> None:
    runtime = FakeRuntime()
    runtime.responses["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(
        items=[
            _SANDBOX,
            runtime_pb2.PodSandbox(id="by hand", created_at=-1),
            runtime_pb2.PodSandbox(
                id="odd",
                metadata=runtime_pb2.PodSandboxMetadata(uid="v", attempt=7),
                state=5,  # type: ignore[arg-type]
                created_at=2**63 - 1,
                runtime_handler="kata",
            ),
        ]
    )
    runtime.responses["PodSandboxStatus"] = runtime_pb2.PodSandboxStatusResponse(
        status=runtime_pb2.PodSandboxStatus(
            network=runtime_pb2.PodSandboxNetworkStatus(
                ip="198.18.0.9",
                additional_ips=[runtime_pb2.PodIP(ip="fd00:18::9"), runtime_pb2.PodIP(ip="x")],
            )
        )
    )
    runtime.responses["ListContainers"] = runtime_pb2.ListContainersResponse(
        containers=[
            runtime_pb2.Container(id="c", pod_sandbox_id="s", state=9),  # type: ignore[arg-type]
            runtime_pb2.Container(id="without a sandbox"),
        ]
    )
    async with servers.serving(path, runtime), _client(path) as client:
        plain, odd = await client.list_sandboxes()
        details = await client.sandbox_details("s")
        [container] = await client.list_containers()

    assert (plain.is_ready, plain.created) == (True, None)
    assert (odd.is_ready, odd.attempt, odd.runtime_handler) == (False, 7, "kata")
    assert [str(ip) for ip in details.ips] == ["198.18.0.9", "fd00:18::9"]
    assert container.state is CriContainerState.UNKNOWN


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({"RuntimeReady": "", "NetworkReady": ""}, ""),
        (
            {"RuntimeReady": "", "NetworkReady": "no CNI config"},
            "NetworkReady is false (no CNI config)",
        ),
        (
            {"RuntimeReady": "starting", "NetworkReady": "no CNI config"},
            "RuntimeReady is false (starting); NetworkReady is false (no CNI config)",
        ),
        (
            {
                "RuntimeReady": "",
                "NetworkReady": "",
                "ContainerdHasNoDeprecationWarnings": "cgroup",
            },
            "",
        ),
        ({"RuntimeReady": ""}, "NetworkReady is not reported"),
    ],
)
async def test_conditions_that_keep_the_kubelet_from_starting_pods_are_reported(
    path: pathlib.Path, conditions: dict[str, str], reason: str
) -> None:
    runtime = FakeRuntime()
    runtime.responses["Status"] = runtime_pb2.StatusResponse(
        status=runtime_pb2.RuntimeStatus(
            conditions=[
                runtime_pb2.RuntimeCondition(type=name, status=not problem, message=problem)
                for name, problem in conditions.items()
            ]
        )
    )
    async with servers.serving(path, runtime), _client(path) as client:
        assert await client.unready_reason() == reason


async def test_containerd_events_are_used_before_cri_events(
    path: pathlib.Path,
) -> None:
    runtime = FakeRuntime()
    exec_probe = containerd_pb2.TaskExit(container_id="c", id="probe")
    container = containerd_pb2.TaskExit(container_id="c", id="c")
    runtime.streams = {
        servers.EVENTS: [
            servers.envelope("/tasks/start"),
            servers.envelope("/tasks/exit", exec_probe),
            servers.envelope("/tasks/exit", container),
        ],
        servers.CRI_EVENTS: [runtime_pb2.ContainerEventResponse(container_id="c")],
    }
    async with servers.serving(path, runtime), _client(path) as client:
        assert [event async for event in client.events()] == ["/tasks/start", "/tasks/exit"]
    assert runtime.subscribed == [servers.EVENTS]


async def test_cri_events_are_used_without_containerd_events(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    started = runtime_pb2.CONTAINER_STARTED_EVENT
    runtime.streams = {
        servers.CRI_EVENTS: [runtime_pb2.ContainerEventResponse(container_event_type=started)]
    }
    async with servers.serving(path, runtime), _client(path) as client:
        assert [event async for event in client.events()] == ["CONTAINER_STARTED_EVENT"]


async def test_runtime_without_events_is_unimplemented(path: pathlib.Path) -> None:
    async with servers.serving(path, FakeRuntime()), _client(path) as client:
        with pytest.raises(CriUnimplementedError):
            await anext(client.events())


# As containerd 1.6.20 stores it, but for the addresses.
_STORED = (
    b'{"Version":"v1","Metadata":{"ID":"72db","Name":"w0_tests_uid-w0_0","Config":{"metadata":'
    b'{"name":"w0","uid":"uid-w0","namespace":"tests"},"hostname":"w0","linux":{}},"NetNSPath":'
    b'"/var/run/netns/cni-16ec","IP":"198.18.0.9","AdditionalIPs":["fd00:18::9"],'
    b'"RuntimeHandler":"","CNIResult":null,"ProcessLabel":""}}'
)


def test_sandbox_of_containerd_has_its_network() -> None:
    found = models.decode_networked(_stored(_STORED))
    assert found is not None
    assert found.netns_path == "/var/run/netns/cni-16ec"
    assert (found.sandbox.id, found.sandbox.full_name) == ("72db", "tests/w0")
    assert [str(ip) for ip in found.sandbox.ips] == ["198.18.0.9", "fd00:18::9"]


@pytest.mark.parametrize(
    "content",
    [
        _STORED.replace(b'"198.18.0.9"', b'""').replace(b'["fd00:18::9"]', b"null"),
        _STORED.replace(b"/var/run/netns/cni-16ec", b""),
        _STORED.replace(b'"uid-w0"', b"7"),
        b'{"Version":"v2"}',
        b"",
    ],
    ids=["no address yet", "host network", "another type", "another version", "nothing"],
)
def test_container_without_a_network_of_its_own_is_no_networked_sandbox(content: bytes) -> None:
    assert models.decode_networked(_stored(content)) is None


def test_container_of_a_pod_is_no_networked_sandbox() -> None:
    assert models.decode_networked(containerd_pb2.GetContainerResponse()) is None


def _stored(content: bytes) -> containerd_pb2.GetContainerResponse:
    response = containerd_pb2.GetContainerResponse()
    response.container.extensions["io.cri-containerd.sandbox.metadata"].value = content
    return response


async def test_only_responding_socket_is_the_runtime(tmp_path: pathlib.Path) -> None:
    docker, cri, absent = (tmp_path / name for name in ("docker", "cri", "absent"))
    async with servers.serving(docker, None), servers.serving(cri, FakeRuntime()):
        runtime = await open_runtime(None, (absent, docker, cri))
        await runtime.aclose()
    assert runtime.socket == cri


async def test_runtime_with_pods_is_chosen_of_two(tmp_path: pathlib.Path) -> None:
    empty, busy = FakeRuntime(), FakeRuntime()
    busy.responses["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(items=[_SANDBOX])
    paths = (tmp_path / "empty", tmp_path / "busy")
    async with servers.serving(paths[0], empty), servers.serving(paths[1], busy):
        runtime = await open_runtime(None, paths)
        await runtime.aclose()
        assert runtime.socket == paths[1]

        empty.responses["ListPodSandbox"] = busy.responses["ListPodSandbox"]
        with pytest.raises(CriError, match="2 of them have pods; name the one"):
            await open_runtime(None, paths)
        named = await open_runtime(paths[0], paths)
        await named.aclose()
        assert named.socket == paths[0]


async def test_node_without_a_socket_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CriError, match=r"^no container runtime's socket found; name the one"):
        await open_runtime(None, (tmp_path / "a", tmp_path / "b"))


@contextlib.asynccontextmanager
async def _client(path: pathlib.Path) -> AsyncIterator[RuntimeClient]:
    client = RuntimeClient(path, call_seconds=0.5)
    try:
        yield client
    finally:
        await client.aclose()


async def _error_text(path: pathlib.Path) -> str:
    async with _client(path) as client:
        with pytest.raises(CriError) as caught:
            await client.version()
    return str(caught.value)
