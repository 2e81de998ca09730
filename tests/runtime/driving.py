"""What the kubelet does with a runtime: sandboxes and containers, started and ended."""

import pathlib
from types import TracebackType
from typing import Any, TypeVar

import grpc

from agent.cri import runtime_pb2
from tests.runtime import driving_pb2, images

T = TypeVar("T")

# A sandbox with IPv6 waits seconds for duplicate address detection; 100 at once a multiple.
_LIMIT_SECONDS = 120.0


class Driver:
    """Plays the kubelet on one runtime; on one event loop."""

    def __init__(self, socket: pathlib.Path, pods_cgroup: str, logs: pathlib.Path) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket}", options=(("grpc.max_reconnect_backoff_ms", 500),)
        )
        self._pods_cgroup = pods_cgroup
        self._logs = logs
        self._configs: dict[str, Any] = {}

    async def __aenter__(self) -> "Driver":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def run_sandbox(
        self, name: str, *, uid: str | None = None, attempt: int = 0, host_network: bool = False
    ) -> str:
        """Start a pod's sandbox; its id. uid: "uid-NAME" unless given."""
        uid = uid or f"uid-{name}"
        config = driving_pb2.PodSandboxConfig(
            metadata=runtime_pb2.PodSandboxMetadata(
                name=name, uid=uid, namespace="tests", attempt=attempt
            ),
            hostname="" if host_network else name,
            log_directory=str(self._logs / uid),
            linux=driving_pb2.LinuxPodSandboxConfig(
                cgroup_parent=f"{self._pods_cgroup}/pod{uid}",
                security_context=driving_pb2.LinuxSandboxSecurityContext(
                    # As the kubelet does for pods without other settings.
                    namespace_options=runtime_pb2.NamespaceOption(
                        network=runtime_pb2.NODE if host_network else runtime_pb2.POD,
                        pid=runtime_pb2.CONTAINER,
                    )
                ),
            ),
        )
        answer = await self.call(
            "RunPodSandbox",
            driving_pb2.RunPodSandboxRequest(config=config),
            driving_pb2.RunPodSandboxResponse,
        )
        sandbox_id: str = answer.pod_sandbox_id
        self._configs[sandbox_id] = config
        return sandbox_id

    async def stop_sandbox(self, sandbox_id: str) -> None:
        """End its containers and its network."""
        await self.call(
            "StopPodSandbox",
            driving_pb2.StopPodSandboxRequest(pod_sandbox_id=sandbox_id),
            driving_pb2.StopPodSandboxResponse,
        )

    async def remove_sandbox(self, sandbox_id: str) -> None:
        await self.call(
            "RemovePodSandbox",
            driving_pb2.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id),
            driving_pb2.RemovePodSandboxResponse,
        )

    async def start_container(
        self,
        sandbox_id: str,
        name: str = "app",
        *,
        attempt: int = 0,
        command: tuple[str, ...] = ("/bin/httpd", "-f", "-p", "8080", "-h", "/www"),
    ) -> str:
        """Create and start a container of the pod image; its id."""
        config = self._configs[sandbox_id]
        created = await self.call(
            "CreateContainer",
            driving_pb2.CreateContainerRequest(
                pod_sandbox_id=sandbox_id,
                config=driving_pb2.ContainerConfig(
                    metadata=runtime_pb2.ContainerMetadata(name=name, attempt=attempt),
                    image=driving_pb2.ImageSpec(image=images.POD, user_specified_image=images.POD),
                    command=command,
                    log_path=f"{name}-{attempt}.log",
                    linux=driving_pb2.LinuxContainerConfig(
                        security_context=driving_pb2.LinuxContainerSecurityContext(
                            namespace_options=config.linux.security_context.namespace_options
                        )
                    ),
                ),
                sandbox_config=config,
            ),
            driving_pb2.CreateContainerResponse,
        )
        container_id: str = created.container_id
        await self.call(
            "StartContainer",
            driving_pb2.StartContainerRequest(container_id=container_id),
            driving_pb2.StartContainerResponse,
        )
        return container_id

    async def stop_container(self, container_id: str, *, seconds: int = 0) -> None:
        """seconds: between TERM and KILL."""
        await self.call(
            "StopContainer",
            driving_pb2.StopContainerRequest(container_id=container_id, timeout=seconds),
            driving_pb2.StopContainerResponse,
        )

    async def remove_container(self, container_id: str) -> None:
        await self.call(
            "RemoveContainer",
            driving_pb2.RemoveContainerRequest(container_id=container_id),
            driving_pb2.RemoveContainerResponse,
        )

    async def call(self, name: str, request: Any, answer: type[T]) -> T:
        """Any other call of the runtime's; answer: the type of its answer."""
        result: T = await self._channel.unary_unary(
            f"/runtime.v1.RuntimeService/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,  # type: ignore[attr-defined]
        )(request, timeout=_LIMIT_SECONDS, wait_for_ready=True)
        return result
