"""A container runtime for pods of the lab: a CRI server that lists them and no more."""

import asyncio
import contextlib
import json
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from agent.cri import runtime_pb2
from agent.lab.lab import LabPod
from tests.runtime import servers


@contextlib.asynccontextmanager
async def serving_pods(socket: pathlib.Path, pods: list[LabPod]) -> AsyncIterator[None]:
    """A CRI server that has a ready sandbox, with one running container, for each pod."""
    born = time.time_ns()
    runtime = PodRuntime({f"sandbox-{pod.name}": pod for pod in pods}, born)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((runtime,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class PodRuntime(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers as containerd does, with events that never come."""

    def __init__(self, pods: dict[str, LabPod], born: int) -> None:
        """pods: by sandbox id; born: of all of it, nanoseconds of Unix time."""
        self._pods = pods
        self._born = born
        self._calls: dict[str, tuple[Any, Any]] = {
            "Version": (runtime_pb2.VersionRequest, self._version),
            "ListPodSandbox": (runtime_pb2.ListPodSandboxRequest, self._sandboxes),
            "ListContainers": (runtime_pb2.ListContainersRequest, self._containers),
            "PodSandboxStatus": (runtime_pb2.PodSandboxStatusRequest, self._sandbox),
            "ContainerStatus": (runtime_pb2.ContainerStatusRequest, self._container),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method == servers.EVENTS:
            return grpc.unary_stream_rpc_method_handler(_no_events)
        name = details.method.rpartition("/")[2]
        if name not in self._calls:
            return None
        request, answer = self._calls[name]

        async def call(asked: Any, context: Any) -> bytes:
            return bytes(answer(asked).SerializeToString())

        return grpc.unary_unary_rpc_method_handler(call, request_deserializer=request.FromString)

    def _version(self, asked: Any) -> Any:
        return runtime_pb2.VersionResponse(runtime_name="lab", runtime_version="1")

    def _sandboxes(self, asked: Any) -> Any:
        return runtime_pb2.ListPodSandboxResponse(
            items=[
                runtime_pb2.PodSandbox(
                    id=key,
                    metadata=runtime_pb2.PodSandboxMetadata(
                        name=pod.name, uid=f"uid-{pod.name}", namespace="default"
                    ),
                    state=runtime_pb2.SANDBOX_READY,
                    created_at=self._born,
                )
                for key, pod in self._pods.items()
            ]
        )

    def _containers(self, asked: Any) -> Any:
        return runtime_pb2.ListContainersResponse(
            containers=[
                runtime_pb2.Container(
                    id=f"app-{key}",
                    pod_sandbox_id=key,
                    metadata=runtime_pb2.ContainerMetadata(name="app"),
                    state=runtime_pb2.CONTAINER_RUNNING,
                    created_at=self._born,
                )
                for key in self._pods
            ]
        )

    def _sandbox(self, asked: Any) -> Any:
        pod = self._pods[asked.pod_sandbox_id]
        namespace = {"type": "network", "path": pod.netns.path}
        info = {"runtimeSpec": {"linux": {"namespaces": [namespace]}}}
        return runtime_pb2.PodSandboxStatusResponse(
            status=runtime_pb2.PodSandboxStatus(
                network=runtime_pb2.PodSandboxNetworkStatus(
                    ip=pod.ipv4, additional_ips=[runtime_pb2.PodIP(ip=pod.ipv6)]
                )
            ),
            info={"info": json.dumps(info)},
        )

    def _container(self, asked: Any) -> Any:
        return runtime_pb2.ContainerStatusResponse(
            status=runtime_pb2.ContainerStatus(started_at=self._born)
        )


async def _no_events(request: bytes, context: Any) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""
