"""A node on which podgate's DaemonSet runs: the test's own container runtime, and its kubelet."""

import asyncio
import contextlib
import copy
import ctypes
import os
import pathlib
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus
from agent.errors import AgentRequestError
from agent.lab.lab import NODE_IPV4
from agent.settings import admin_socket
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer, Json
from tests.agent.kube.test_client import certificate
from tests.image import manifests, podspec
from tests.kernel.cgroups import Cgroup
from tests.polling import PATIENCE
from tests.runtime import driving_pb2
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver

NAME = "node1"
IMAGE = "localhost/podgate:test"
PORT = 8080
BPFFS = pathlib.Path("/sys/fs/bpf")
RUN_DIRECTORY = pathlib.Path("/run/podgate")
READY = {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 1}

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_PATIENCE_SECONDS = 60 * PATIENCE
_POLL_SECONDS = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def as_on_a_node(runtime: Containerd) -> Iterator[None]:
    """Sockets and BPF file system where nodes have them, and mounts that containers learn of, as
    systemd makes them; in the lab's own mount namespace, as it was afterwards."""
    with contextlib.ExitStack() as undo:
        # containerd's shims have theirs below it, those of tests before this one, too.
        runtime.sockets.mkdir(exist_ok=True)
        _mount(str(runtime.socket.parent), str(runtime.sockets), None, _MS_BIND)
        undo.callback(_libc.umount2, os.fsencode(runtime.sockets), _MNT_DETACH)
        _mount("bpf", str(BPFFS), "bpf", 0)
        undo.callback(_libc.umount2, os.fsencode(BPFFS), _MNT_DETACH)
        _mount("none", "/", None, _MS_REC | _MS_SHARED)
        undo.callback(_mount, "none", "/", None, _MS_REC | _MS_PRIVATE)
        yield


class AgentPod:
    """One pod of the DaemonSet."""

    def __init__(self, sandbox: str, container: str, log: pathlib.Path, pid: int) -> None:
        self.sandbox = sandbox
        self.container = container
        self.log = log
        self.pid = pid
        """Of the agent, as the node sees it."""

    def lines(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


class Node:
    """Plays the kubelet and the cluster."""

    def __init__(
        self, runtime: Containerd, driver: Driver, server: ApiServer, folder: pathlib.Path
    ) -> None:
        """folder: with the service account's files."""
        self.runtime = runtime
        self.driver = driver
        self.server = server
        self._folder = folder
        self._pods: dict[str, tuple[Json, Any]] = {}
        self._guarded: list[str] = []
        server.put({"kind": "Node", "metadata": {"name": NAME}}, path=NODES)
        server.put({"kind": "Namespace", "metadata": {"name": "tests"}}, path=NAMESPACES)

    def pod(self, name: str = "podgate-a", *, args: tuple[str, ...] = ()) -> Json:
        """A pod of the DaemonSet; args: more arguments, which override."""
        made = manifests.agent_pod(name)
        (container,) = made["spec"]["containers"]
        container["image"] = IMAGE
        container["args"] += args
        return made

    async def start(self, pod: Json) -> AgentPod:
        """Start it as a kubelet does, without waiting for its probes."""
        podspec.make_host_paths(pod)
        uid = pod["metadata"]["uid"]
        for volume in pod["spec"]["volumes"]:
            if "emptyDir" in volume:
                self.volume(uid, volume["name"]).mkdir(parents=True)
        config = podspec.sandbox(
            pod,
            cgroup_parent=f"{self.runtime.pods_cgroup}/pod{uid}",
            logs=self.runtime.directory / "logs" / uid,
        )
        answer = await self.driver.call(
            "RunPodSandbox",
            driving_pb2.RunPodSandboxRequest(config=config),
            driving_pb2.RunPodSandboxResponse,
        )
        self._pods[answer.pod_sandbox_id] = (pod, config)
        return await self.start_container(answer.pod_sandbox_id)

    async def start_container(self, sandbox: str, *, attempt: int = 0) -> AgentPod:
        """The container of a pod that was started, once more after its end."""
        pod, config = self._pods[sandbox]
        uid = pod["metadata"]["uid"]
        wanted = podspec.container(
            pod,
            attempt,
            fields={
                "spec.nodeName": NAME,
                "status.hostIP": str(NODE_IPV4),
                "metadata.name": pod["metadata"]["name"],
                "metadata.namespace": pod["metadata"]["namespace"],
            },
            service={
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(self.server.port),
            },
            volumes={
                volume["name"]: self.volume(uid, volume["name"])
                for volume in pod["spec"]["volumes"]
            },
            token=self._folder,
        )
        created = await self.driver.call(
            "CreateContainer",
            driving_pb2.CreateContainerRequest(
                pod_sandbox_id=sandbox, config=wanted, sandbox_config=config
            ),
            driving_pb2.CreateContainerResponse,
        )
        await self.driver.call(
            "StartContainer",
            driving_pb2.StartContainerRequest(container_id=created.container_id),
            driving_pb2.StartContainerResponse,
        )
        return AgentPod(
            sandbox,
            created.container_id,
            pathlib.Path(config.log_directory, wanted.log_path),
            self._pid(created.container_id),
        )

    async def is_ready(self, pod: AgentPod) -> bool:
        """The result of the DaemonSet's readiness probe."""
        (container,) = manifests.agent_pod("any")["spec"]["containers"]
        return await self.succeeds(pod, *container["readinessProbe"]["exec"]["command"])

    async def succeeds(self, pod: AgentPod, *command: str) -> bool:
        """Whether a command in the agent's container ends with 0."""
        answer = await self.driver.call(
            "ExecSync",
            driving_pb2.ExecSyncRequest(container_id=pod.container, cmd=command, timeout=5),
            driving_pb2.ExecSyncResponse,
        )
        return bool(answer.exit_code == 0)

    async def report(self) -> AgentReport | None:
        """Of the agent that has the node; None while none answers."""
        with contextlib.suppress(AgentRequestError):
            content = await admin_client.fetch(admin_socket(RUN_DIRECTORY), "/status")
            return msgspec.json.decode(content, type=AgentReport)
        return None

    async def knows(self, kubelet: Cgroup) -> bool:
        """Whether the agent takes this cgroup for the kubelet's."""
        report = await self.report()
        return report is not None and report.kubelet == kubelet.path

    async def is_proxying(self) -> bool:
        """Whether the relay has proxied a connection."""
        report = await self.report()
        return report is not None and any(pod.relayed for pod in report.pods)

    async def until(self, what: str, pod: AgentPod, holds: Callable[[], Any]) -> Any:
        """Poll until it holds, and return its value. holds: may be a coroutine function."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            said = pod.lines()[-3000:]
            late = asyncio.get_running_loop().time() > deadline
            assert not late, f"{what} did not come true; the agent said: {said}"
            await asyncio.sleep(_POLL_SECONDS)

    async def ready(self, pod: AgentPod) -> None:
        await self.until("ready", pod, lambda: self.is_ready(pod))

    async def gated(self, agent: AgentPod, name: str, reason: str) -> PodStatus:
        """Wait until a pod's condition has this reason."""

        async def look() -> PodStatus | None:
            report = await self.report()
            return next(
                (
                    pod
                    for pod in (report.pods if report else ())
                    if pod.name == name and any(one.reason == reason for one in pod.conditions)
                ),
                None,
            )

        found: PodStatus = await self.until(f"{name} {reason}", agent, look)
        return found

    async def run_pod(self, name: str, *, mode: str, probe: Json = READY) -> str:
        """A pod of the cluster's with a server; its sandbox."""
        thing = apiserver.gated(
            name, namespace="tests", labels={"podgate.io/mode": mode} if mode else {}
        )
        thing["spec"]["containers"][0]["readinessProbe"] = copy.deepcopy(probe)
        self.server.put(thing)
        sandbox = await self.driver.run_sandbox(name)
        self._guarded.append(sandbox)
        await self.driver.start_container(sandbox)
        return sandbox

    async def kill(self, pod: AgentPod) -> None:
        """End the agent's container without a word."""
        await self.driver.stop_container(pod.container, seconds=0)

    async def end(self, pod: AgentPod) -> None:
        """Delete the agent's pod, with its grace period."""
        made, _ = self._pods.pop(pod.sandbox)
        seconds = made["spec"]["terminationGracePeriodSeconds"]
        await self.driver.stop_container(pod.container, seconds=seconds)
        await self._remove(pod.sandbox)

    async def clean_up(self) -> None:
        """End all pods, whatever state they are in."""
        for sandbox in (*self._pods, *self._guarded):
            await self._remove(sandbox)
        own = self.runtime.directory
        for directory in (own / "volumes", own / "logs", RUN_DIRECTORY):
            shutil.rmtree(directory, ignore_errors=True)

    async def _remove(self, sandbox: str) -> None:
        await self.driver.stop_sandbox(sandbox)
        await self.driver.remove_sandbox(sandbox)

    def volume(self, uid: str, name: str) -> pathlib.Path:
        """On the node, an emptyDir of a pod."""
        return self.runtime.directory / "volumes" / uid / name

    def _pid(self, container: str) -> int:
        """runc keeps it beside the container's bundle."""
        (file,) = (self.runtime.directory / "state").rglob(f"{container}/init.pid")
        return int(file.read_text())


@contextlib.asynccontextmanager
async def api_server(folder: pathlib.Path) -> AsyncIterator[ApiServer]:
    """With TLS, and a service account's files for it in `folder`."""
    cert, key = certificate(folder)
    (folder / "token").write_text("secret", encoding="utf-8")
    (folder / "namespace").write_text("podgate", encoding="utf-8")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    server = ApiServer()
    async with server.running(tls=tls):
        yield server


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    if _libc.mount(source.encode(), target.encode(), encoded, flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {target}")
