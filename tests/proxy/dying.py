"""From a listener's end to the first connection that avoids it, over the whole chain: the kernel's
event, the agent's second look, the localnet API, `podgate proxy`, and the kernel again.

The API server is away meanwhile: nothing of this is any of its business.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from agent.admin.report import AgentReport
from agent.default_deny import table as default_deny_table
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import LabPod
from agent.services.proxy import nftables
from agent.settings import localnet_socket
from bpf import pins
from bpf.services import links as service_links
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.agent.services.api import making
from tests.kernel.cgroups import Cgroup
from tests.proxy import scene
from tests.proxy.feeding import Process, wait_until
from tests.proxy.scene import Servers
from tests.runtime.labpods import serving_pods

_PROBE = {"readinessProbe": {"tcpSocket": {"port": scene.PORT}, "failureThreshold": 1}}
# Connections that went well after the last that did not: then the dead one is avoided.
_IN_A_ROW = 500


class Chain:
    """An agent and a proxy, both as processes of their own, and pods behind one service."""

    def __init__(self, servers: Servers, cgroup: Cgroup) -> None:
        self._servers = servers
        self._cgroup = cgroup

    async def end(self, pod: LabPod) -> float:
        """The pod's listeners are closed; milliseconds until no new connection meets them."""
        return await asyncio.to_thread(self._end, pod)

    def _end(self, pod: LabPod) -> float:
        with _client(self._cgroup) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"begun\n"
            closed = time.monotonic()
            self._servers.stop(pod)
            output, _ = client.communicate(timeout=60)
        refused = [at for at in json.loads(output) if at >= closed]
        return (max(refused, default=closed) - closed) * 1000


@contextlib.asynccontextmanager
async def chain(
    directory: pathlib.Path,
    installation: pins.Pins,
    pods: Sequence[LabPod],
    cgroup: Cgroup,
    *,
    backend: str = "ebpf",
) -> AsyncIterator[Chain]:
    """All of it, until the block ends. cgroup: of the client; backend: ebpf or nft."""
    api = ApiServer()
    _publish(api, pods)
    operator = AgentProcess(directory, installation.bpffs)
    proxy = Process(
        directory,
        *("--backend", backend, "--run-directory", str(operator.run_directory)),
        *("--target", f"unix://{localnet_socket(operator.run_directory)}"),
        *(
            ("--cgroup", str(cgroup.directory), "--bpffs", str(installation.bpffs))
            if backend == "ebpf"
            else ()
        ),
    )
    cri = directory / "cri.sock"
    servers = Servers(())
    try:
        async with serving_pods(cri, list(pods)), contextlib.AsyncExitStack() as serving:
            await serving.enter_async_context(api.running())
            kubeconfig = write_kubeconfig(directory / "kube", f"http://127.0.0.1:{api.port}")
            operator.pods_from = (
                *("--node-name", making.NODE, "--kubeconfig", kubeconfig),
                *("--cri-socket", str(cri)),
            )
            await asyncio.to_thread(operator.start, "--service-endpoints")
            await asyncio.to_thread(operator.wait_for, "all gates", _are_gated(len(pods)))
            # Before Linux 6.12 a listener that opened before the agent watched it sends no event.
            await asyncio.to_thread(wait_until, lambda: _hears_of_listeners(operator))
            for pod in pods:
                servers.start(pod)
            await asyncio.to_thread(operator.wait_for, "all pods ready", _are_ready(len(pods)))
            await asyncio.to_thread(proxy.start)
            await serving.aclose()
            yield Chain(servers, cgroup)
    finally:
        proxy.stop()
        service_links.detach(installation)
        await nftables.remove()
        operator.stop(signal.SIGKILL)
        servers.close()
        await default_deny_table.remove()


def _publish(api: ApiServer, pods: Sequence[LabPod]) -> None:
    api.put({"kind": "Node", "metadata": {"name": making.NODE}}, path=NODES)
    api.put({"kind": "Namespace", "metadata": {"name": "default"}}, path=NAMESPACES)
    for pod in pods:
        thing = apiserver.gated(pod.name)
        thing["spec"]["containers"][0].update(_PROBE)
        api.put(thing)
    service = making.service_json(
        clusterIP=scene.cluster_ip(4, 0),
        clusterIPs=[scene.cluster_ip(4, 0)],
        ports=[{"protocol": "TCP", "port": scene.SERVICE_PORT}],
    )
    api.put(service, path="/api/v1/services")
    endpoints = (
        making.endpoint_json(pod.ipv4, node=making.NODE, uid=f"uid-{pod.name}") for pod in pods
    )
    ports = [{"name": "", "protocol": "TCP", "port": scene.PORT}]
    slice_ = making.slice_json(*endpoints, ports=ports)
    api.put(slice_, path="/apis/discovery.k8s.io/v1/endpointslices")


def _are_gated(count: int) -> Callable[[AgentReport], bool]:
    return lambda report: len([pod for pod in report.pods if pod.gates]) == count


def _hears_of_listeners(operator: AgentProcess) -> bool:
    """Of all pods: the agent attaches when that is compiled, after everything else."""
    for fd in pathlib.Path(f"/proc/{operator.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd) == "anon_inode:bpf_link":
                return True
    return False


def _are_ready(count: int) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        statuses = [condition.status for pod in report.pods for condition in pod.conditions]
        return statuses.count("True") == 2 * count

    return holds


@contextlib.contextmanager
def _client(cgroup: Cgroup) -> Iterator["subprocess.Popen[bytes]"]:
    """Connects again and again, until its input has ended and connections succeed."""
    address = scene.cluster_ip(4, 0)
    process = cgroup.popen(
        [sys.executable, "-m", "tests.proxy.dying", address, str(scene.SERVICE_PORT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _connect_again_and_again(address: str, port: int) -> list[float]:
    """When a connection failed with ECONNREFUSED, by CLOCK_MONOTONIC in seconds."""
    refused: list[float] = []
    in_a_row = 0
    has_ended = False
    while not has_ended or in_a_row < _IN_A_ROW:
        if not has_ended and select.select([sys.stdin], [], [], 0)[0]:
            has_ended, in_a_row = True, 0
        with socket.socket() as sock:
            # Ends with RST: no TIME-WAIT takes the ports of the next one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))
            sock.settimeout(5)
            begun = time.monotonic()
            try:
                sock.connect((address, port))
            except ConnectionError:
                refused.append(begun)
                in_a_row = 0
            else:
                in_a_row += 1
    return refused


if __name__ == "__main__":
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(_connect_again_and_again(sys.argv[1], int(sys.argv[2]))))
