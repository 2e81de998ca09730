"""CRI client over the runtime's unix socket: typed responses, a timeout for every call.

A runtime that is missing, hangs, or is no CRI runtime is an error of one sentence.
"""

import contextlib
import datetime
import os
import pathlib
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from agent.cri import containerd_pb2, models, runtime_pb2
from agent.cri.connection import LostError, Metadata, RuntimeConnection, StuckError
from agent.cri.models import CriContainer, NetworkedSandbox, Sandbox, SandboxDetails
from agent.errors import PodgateError

T = TypeVar("T")

CALL_SECONDS = 10.0
"""A list takes milliseconds; a stuck runtime must be reported before people search for it."""

# Events that change the lists, of containerd's Kubernetes namespace only.
_TOPICS = ("/tasks/start", "/tasks/exit", "/containers/delete")
_EXIT_TOPIC = "/tasks/exit"
# One of them is the first with the addresses that the network plugins returned.
_NETWORK_TOPICS = ("/containers/create", "/containers/update")
_KUBERNETES = "k8s.io"


class CriError(PodgateError):
    """A call to the runtime failed; the message is one sentence."""


class CriStuckError(CriError):
    """gRPC does not end a call at its deadline, not over a new connection either.

    Its C core could not start a thread at some time (EAGAIN of clone(2)), and never works again in
    this process, also with another channel.
    """


class CriNotFoundError(CriError):
    """The runtime has no such sandbox or container (any more)."""


class CriUnimplementedError(CriError):
    """The runtime lacks this call."""


class Runtime(Protocol):
    """The calls to a runtime; `RuntimeClient` makes them to a real one."""

    async def list_sandboxes(self) -> list[Sandbox]: ...
    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails: ...
    async def list_containers(self) -> list[CriContainer]: ...
    async def container_started(self, container_id: str) -> datetime.datetime | None: ...
    def events(self) -> AsyncGenerator[str, None]: ...
    def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]: ...
    async def aclose(self) -> None: ...


class RuntimeClient:
    """One runtime, for use on one event loop; `aclose` it at the end.

    Methods raise `CriError`. Calls fail at once while the runtime does not listen; the first call
    after its restart connects again.
    """

    def __init__(self, socket: pathlib.Path, *, call_seconds: float = CALL_SECONDS) -> None:
        self.socket = socket
        self._call_seconds = call_seconds
        self._connection = RuntimeConnection(socket, call_seconds=call_seconds)

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def version(self) -> str:
        """Name and version, such as "containerd 1.6.20"."""
        response = await self._call(
            "Version", runtime_pb2.VersionRequest(), runtime_pb2.VersionResponse
        )
        return f"{response.runtime_name} {response.runtime_version}"

    async def unready_reason(self) -> str:
        """Why new pods do not start; empty if they do. Of the runtime's conditions these two decide
        for the kubelet (updateRuntimeUp in its kubelet.go); containerd 2 has others, such as
        ContainerdHasNoDeprecationWarnings."""
        response = await self._call(
            "Status", runtime_pb2.StatusRequest(), runtime_pb2.StatusResponse
        )
        found = {condition.type: condition for condition in response.status.conditions}
        return "; ".join(
            f"{name} is false ({found[name].message or found[name].reason})"
            if name in found
            else f"{name} is not reported"
            for name in ("RuntimeReady", "NetworkReady")
            if name not in found or not found[name].status
        )

    async def list_sandboxes(self) -> list[Sandbox]:
        """All sandboxes, without the fields of their status."""
        return models.decode_sandboxes(
            await self._call(
                "ListPodSandbox",
                runtime_pb2.ListPodSandboxRequest(),
                runtime_pb2.ListPodSandboxResponse,
            )
        )

    async def sandbox_details(self, sandbox_id: str) -> SandboxDetails:
        """Also raises `CriNotFoundError`."""
        return models.decode_details(
            await self._call(
                "PodSandboxStatus",
                runtime_pb2.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=True),
                runtime_pb2.PodSandboxStatusResponse,
            )
        )

    async def list_containers(self) -> list[CriContainer]:
        """All containers, without their start times."""
        return models.decode_containers(
            await self._call(
                "ListContainers",
                runtime_pb2.ListContainersRequest(),
                runtime_pb2.ListContainersResponse,
            )
        )

    async def container_started(self, container_id: str) -> datetime.datetime | None:
        """When the container's process started; None: not yet. Also raises `CriNotFoundError`."""
        return models.decode_started(
            await self._call(
                "ContainerStatus",
                runtime_pb2.ContainerStatusRequest(container_id=container_id),
                runtime_pb2.ContainerStatusResponse,
            )
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """The topic or kind of each event that may have changed the lists, until the stream ends.

        Events are hints: they get lost, and some arrive before the lists show the change.
        containerd has two streams of them. Its own is used first, because containerd 1.7 delivers
        each CRI event to one listener only (containerd issue 7318), which would deprive a kubelet
        that uses them. Raises `CriUnimplementedError` if the runtime has neither.
        """
        try:
            async for envelope in self._containerd_events(_TOPICS):
                if not _is_exec_exit(envelope):
                    yield envelope.topic
        except CriUnimplementedError:
            async for event in self._stream(
                "/runtime.v1.RuntimeService/GetContainerEvents",
                runtime_pb2.GetEventsRequest(),
                runtime_pb2.ContainerEventResponse,
            ):
                kind = event.container_event_type
                is_named = kind in runtime_pb2.ContainerEventType.values()
                yield runtime_pb2.ContainerEventType.Name(kind) if is_named else str(kind)

    async def networked_sandboxes(
        self, is_added: Callable[[str], bool]
    ) -> AsyncGenerator[NetworkedSandbox, None]:
        """Each new sandbox as soon as it has its network: some 30 ms before the CRI lists it, which
        waits for its process. Until the stream ends.

        is_added: whether a sandbox needs to be reported no more. containerd 1.6 updates each twice.

        Of containerd alone, by what its CRI plugin stores (containerd, pkg/cri/store/sandbox:
        Metadata). Raises `CriUnimplementedError` for other runtimes.
        """
        async for envelope in self._containerd_events(_NETWORK_TOPICS):
            # Its content is up to containerd.
            with contextlib.suppress(CriNotFoundError, DecodeError):
                container = containerd_pb2.ContainerEvent.FromString(envelope.event.value)
                if is_added(container.id):
                    continue
                response = await self._call(
                    "Get",
                    containerd_pb2.GetContainerRequest(id=container.id),
                    containerd_pb2.GetContainerResponse,
                    service="containerd.services.containers.v1.Containers",
                    metadata=(("containerd-namespace", _KUBERNETES),),
                )
                if found := models.decode_networked(response):
                    yield found

    def _containerd_events(self, topics: Iterable[str]) -> AsyncIterator[containerd_pb2.Envelope]:
        return self._stream(
            "/containerd.services.events.v1.Events/Subscribe",
            containerd_pb2.SubscribeRequest(
                filters=[f'namespace=={_KUBERNETES},topic=="{topic}"' for topic in topics]
            ),
            containerd_pb2.Envelope,
        )

    async def _call(
        self,
        name: str,
        request: Any,
        response: type[T],
        *,
        service: str = "runtime.v1.RuntimeService",
        metadata: Metadata | None = None,
    ) -> T:
        try:
            return await self._connection.call(
                f"/{service}/{name}", request, response, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(name, error) from error
        except LostError as error:
            raise CriError(
                f"{self.socket} did not respond to {name} within {self._call_seconds:g} s; "
                "check the container runtime."
            ) from error
        except StuckError as error:
            raise CriStuckError(
                f"gRPC ended no call of {name} to {self.socket} in time."
            ) from error

    async def _stream(self, path: str, request: Any, response: type[T]) -> AsyncIterator[T]:
        messages = self._connection.stream(path, request, response)
        try:
            async for message in messages:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._error(path.rpartition("/")[2], error) from error
        except LostError as error:
            raise CriError(f"the connection to {self.socket} was replaced.") from error

    def _error(self, name: str, error: grpc.aio.AioRpcError) -> CriError:
        code = error.code()
        details = " ".join((error.details() or code.name).split())
        if code is grpc.StatusCode.NOT_FOUND:
            return CriNotFoundError(f"{self.socket} reports for {name}: {details}.")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CriUnimplementedError(
                f"{self.socket} does not implement the CRI's {name}; name the socket of the "
                "runtime that the kubelet uses, or enable its CRI (v1)."
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            return CriError(_unavailable(self.socket, details))
        return CriError(f"{self.socket} failed {name}: {details}.")


def _unavailable(socket: pathlib.Path, details: str) -> str:
    try:
        is_socket = stat.S_ISSOCK(os.stat(socket).st_mode)
    except OSError as error:
        return (
            f"no container runtime's socket at {socket} ({error.strerror}); name the one that the "
            "kubelet uses, and mount its directory."
        )
    if not is_socket:
        return f"{socket} is not a socket; name the one of the runtime that the kubelet uses."
    # grpcio's text contains every step; its end is the kernel's error.
    reason = details.rpartition("error: ")[2]
    return f"no container runtime responds at {socket} ({reason}); podgate retries until one does."


def _is_exec_exit(envelope: containerd_pb2.Envelope) -> bool:
    """Whether a process in addition to the container's own exited, such as an exec probe."""
    if envelope.topic != _EXIT_TOPIC:
        return False
    try:
        exit_ = containerd_pb2.TaskExit.FromString(envelope.event.value)
    except DecodeError:
        return False
    return bool(exit_.id != exit_.container_id)
