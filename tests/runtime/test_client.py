"""Sockets where a runtime should be: what is said of them, and that they are asked again."""

import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.cri import containerd_pb2, runtime_pb2
from agent.cri.client import CriError, CriNotFoundError, CriUnimplementedError, RuntimeClient
from agent.cri.endpoints import open_runtime
from agent.cri.models import CriContainerState
from tests.runtime import servers
from tests.runtime.servers import FakeRuntime
from tests.runtime.watching import following

_SANDBOX = runtime_pb2.PodSandbox(
    id="s", metadata=runtime_pb2.PodSandboxMetadata(name="web", uid="u", namespace="shop")
)

_TOO_SLOW = "{path} did not answer Version within 0.5 s; look after the container runtime."


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "runtime.sock"


async def test_no_socket_is_one_sentence(path: pathlib.Path) -> None:
    sentence = await _refusal(path)
    assert sentence == (
        f"there is no container runtime's socket at {path} (No such file or directory); name the "
        "one that the kubelet uses, and mount its directory."
    )


async def test_a_file_that_is_no_socket_is_one_sentence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert await _refusal(path) == (
        f"{path} is no socket; name that of the runtime that the kubelet uses."
    )


async def test_a_socket_that_nobody_listens_on_is_one_sentence(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert await _refusal(path) == (
        f"nothing at {path} answers as a container runtime does (Connection refused); it is asked "
        "again until it does."
    )


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00" * 64], ids=["http", "end", "zeros"]
)
async def test_a_server_that_speaks_something_else_is_one_sentence(
    path: pathlib.Path, words: bytes
) -> None:
    async with servers.speaking(path, words):
        sentence = await _refusal(path)
    assert str(path) in sentence
    assert "\n" not in sentence


async def test_a_server_that_says_nothing_is_given_up_in_time(path: pathlib.Path) -> None:
    async with servers.speaking(path, None):
        sentence = await _refusal(path)
    assert sentence == _TOO_SLOW.format(path=path)


async def test_a_runtime_that_hangs_is_given_up_in_time(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.answers["Version"] = None
    async with servers.serving(path, runtime):
        assert await _refusal(path) == _TOO_SLOW.format(path=path)


async def test_a_grpc_server_without_a_cri_is_one_sentence(path: pathlib.Path) -> None:
    async with servers.serving(path, None):
        assert await _refusal(path) == (
            f"{path} answers, but not to the CRI's Version; name the socket of the runtime that "
            "the kubelet uses, or enable its CRI (v1)."
        )


async def test_what_fails_within_the_runtime_is_one_sentence(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.answers["Version"] = grpc.StatusCode.UNKNOWN
    async with servers.serving(path, runtime):
        assert await _refusal(path) == f"{path} failed Version: as the test wants it."


async def test_a_sandbox_that_is_gone_is_told_apart(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.answers["PodSandboxStatus"] = grpc.StatusCode.NOT_FOUND
    async with servers.serving(path, runtime), _client(path) as client:
        with pytest.raises(CriNotFoundError, match="PodSandboxStatus"):
            await client.sandbox_details("s")


async def test_a_runtime_that_comes_later_is_found(path: pathlib.Path) -> None:
    async with following(path) as watched:
        await watched.until("it is missed", lambda: "no container" in watched.sandboxes.problem)
        runtime = FakeRuntime()
        runtime.answers["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(items=[_SANDBOX])
        runtime.answers["PodSandboxStatus"] = runtime_pb2.PodSandboxStatusResponse()
        async with servers.serving(path, runtime):
            await watched.until("it answers", lambda: watched.sandboxes.current)
        assert watched.sandboxes.current["u"].full_name == "shop/web"


async def test_answers_are_typed_and_what_is_strange_in_them_is_left_out(
    path: pathlib.Path,
) -> None:
    runtime = FakeRuntime()
    runtime.answers["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(
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
    runtime.answers["PodSandboxStatus"] = runtime_pb2.PodSandboxStatusResponse(
        status=runtime_pb2.PodSandboxStatus(
            network=runtime_pb2.PodSandboxNetworkStatus(
                ip="198.18.0.9",
                additional_ips=[runtime_pb2.PodIP(ip="fd00:18::9"), runtime_pb2.PodIP(ip="x")],
            )
        )
    )
    runtime.answers["ListContainers"] = runtime_pb2.ListContainersResponse(
        containers=[
            runtime_pb2.Container(id="c", pod_sandbox_id="s", state=9),  # type: ignore[arg-type]
            runtime_pb2.Container(id="of nobody"),
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


async def test_unmet_conditions_of_the_runtime_are_told(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    runtime.answers["Status"] = runtime_pb2.StatusResponse(
        status=runtime_pb2.RuntimeStatus(
            conditions=[
                runtime_pb2.RuntimeCondition(type="RuntimeReady", status=True),
                runtime_pb2.RuntimeCondition(type="NetworkReady", message="no CNI config"),
            ]
        )
    )
    async with servers.serving(path, runtime), _client(path) as client:
        assert await client.unready_reason() == "NetworkReady is false (no CNI config)"


async def test_containerd_s_own_events_are_heard_and_the_cri_s_left_to_the_kubelet(
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


async def test_where_containerd_s_are_missing_the_cri_s_are_heard(path: pathlib.Path) -> None:
    runtime = FakeRuntime()
    started = runtime_pb2.CONTAINER_STARTED_EVENT
    runtime.streams = {
        servers.CRI_EVENTS: [runtime_pb2.ContainerEventResponse(container_event_type=started)]
    }
    async with servers.serving(path, runtime), _client(path) as client:
        assert [event async for event in client.events()] == ["CONTAINER_STARTED_EVENT"]


async def test_no_events_at_all_are_told_apart(path: pathlib.Path) -> None:
    async with servers.serving(path, FakeRuntime()), _client(path) as client:
        with pytest.raises(CriUnimplementedError):
            await anext(client.events())


async def test_the_only_socket_that_answers_is_the_runtime_s(tmp_path: pathlib.Path) -> None:
    docker, cri, absent = (tmp_path / name for name in ("docker", "cri", "absent"))
    async with servers.serving(docker, None), servers.serving(cri, FakeRuntime()):
        runtime = await open_runtime(None, (absent, docker, cri))
        await runtime.aclose()
    assert runtime.socket == cri


async def test_of_two_runtimes_the_one_with_pods_is_the_kubelet_s(tmp_path: pathlib.Path) -> None:
    empty, busy = FakeRuntime(), FakeRuntime()
    busy.answers["ListPodSandbox"] = runtime_pb2.ListPodSandboxResponse(items=[_SANDBOX])
    paths = (tmp_path / "empty", tmp_path / "busy")
    async with servers.serving(paths[0], empty), servers.serving(paths[1], busy):
        runtime = await open_runtime(None, paths)
        await runtime.aclose()
        assert runtime.socket == paths[1]

        empty.answers["ListPodSandbox"] = busy.answers["ListPodSandbox"]
        with pytest.raises(CriError, match="2 of them have pods; name the one"):
            await open_runtime(None, paths)
        named = await open_runtime(paths[0], paths)
        await named.aclose()
        assert named.socket == paths[0]


async def test_a_node_without_any_socket_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CriError, match=r"^no container runtime's socket was found; name the one"):
        await open_runtime(None, (tmp_path / "a", tmp_path / "b"))


@contextlib.asynccontextmanager
async def _client(path: pathlib.Path) -> AsyncIterator[RuntimeClient]:
    client = RuntimeClient(path, call_seconds=0.5)
    try:
        yield client
    finally:
        await client.aclose()


async def _refusal(path: pathlib.Path) -> str:
    async with _client(path) as client:
        with pytest.raises(CriError) as caught:
            await client.version()
    return str(caught.value)
