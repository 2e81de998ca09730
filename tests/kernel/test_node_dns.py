"""docs/examples/node_dns.py: DNS of one node by the service endpoints of a real agent."""

import asyncio
import contextlib
import pathlib
import re
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.default_deny import table as default_deny_table
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.services.api.api_objects import SERVICES, SLICES
from agent.settings import localnet_socket
from bpf import pins
from tests import polling
from tests.agent.client import distribution
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.agent.services.api import making
from tests.runtime.labpods import serving_pods

pytestmark = pytest.mark.kernel

_PROGRAM = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "node_dns.py"
_PORTS = [{"name": "http", "protocol": "TCP", "port": 8080}]
_MANY = 40
_A, _SRV = 1, 33
# Of a response's status (RFC 1035, section 4.1.1).
_FORMAT_ERROR, _SERVER_FAILURE, _NO_SUCH_NAME, _REFUSED = 1, 2, 3, 5


class Dns:
    """The program, in one pod's network, and clients in another."""

    def __init__(self, server: LabPod, client: LabPod, log: pathlib.Path) -> None:
        self.server = server
        self.client = client
        self.log = log

    async def lookup(self, name: str, kind: str = "a") -> list[str]:
        """What a resolver's own client prints for a name: addresses, or targets with ports."""
        child = await asyncio.create_subprocess_exec(
            *("nsenter", f"--net={self.client.netns.path}", "busybox", "nslookup"),
            *(f"-type={kind}", name, self.server.ipv4),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await child.communicate()
        answer = output.decode().partition("\n\n")[2]
        found = [line for line in answer.splitlines() if line.startswith(("Address: ", name))]
        return sorted(
            re.split("Address: |(?:service|canonical name) = ", line)[-1] for line in found
        )

    async def shows(self, name: str, kind: str, *expected: str) -> None:
        await polling.request_until(
            f"{name} {kind}", lambda: self.lookup(name, kind), lambda it: it == sorted(expected)
        )

    def status(self, query: bytes) -> int:
        """The status of the response to any bytes, by UDP."""
        with self.client.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(30)
            sock.sendto(query, (self.server.ipv4, 53))
            return sock.recv(600)[3] & 15

    def exchange(self, query: bytes, kind: socket.SocketKind) -> tuple[bool, int]:
        """Whether the response is truncated, and its number of answers."""
        with self.client.open_socket(socket.AF_INET, kind) as sock:
            sock.settimeout(30)
            sock.connect((self.server.ipv4, 53))
            if kind == socket.SOCK_DGRAM:
                sock.sendall(query)
                response = sock.recv(600)
            else:
                sock.sendall(len(query).to_bytes(2) + query)
                with sock.makefile("rb") as file:
                    response = file.read(int.from_bytes(file.read(2)))
            return bool(response[2] & 2), int.from_bytes(response[6:8])


def question(name: str, kind: int = _A) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, kind, 1)


def publish(api: ApiServer) -> None:
    api.put({"kind": "Node", "metadata": {"name": making.NODE}}, path=NODES)
    api.put({"kind": "Namespace", "metadata": {"name": "default"}}, path=NAMESPACES)
    addresses = ["198.18.96.1", "fd00:18:96::1"]
    web = making.service_json("web", clusterIP=addresses[0], clusterIPs=addresses)
    api.put(web, path=SERVICES.path)
    headless: dict[str, Any] = {"clusterIP": "None", "clusterIPs": ["None"]}
    api.put(making.service_json("db", **headless), path=SERVICES.path)
    external: dict[str, Any] = {
        "clusterIP": "",
        "clusterIPs": None,
        "externalName": "db.example.org",
    }
    api.put(making.service_json("ext", type="ExternalName", **external), path=SERVICES.path)
    put_pods(api, "198.19.0.1", "198.19.0.2")
    api.put(making.service_json("many", **headless), path=SERVICES.path)
    many = [making.endpoint_json(f"198.19.1.{i + 1}") for i in range(_MANY)]
    many_slice = making.slice_json(*many, name="many-1", service="many", ports=_PORTS)
    api.put(many_slice, path=SLICES.path)


def put_pods(api: ApiServer, *addresses: str) -> None:
    """The headless service has these pods; the first has a host name."""
    first, *others = (making.endpoint_json(address) for address in addresses)
    endpoints = ({**first, "hostname": "db-0"}, *others)
    db_slice = making.slice_json(*endpoints, name="db-1", service="db", ports=_PORTS)
    api.put(db_slice, path=SLICES.path)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    made = ApiServer()
    publish(made)
    async with made.running():
        yield made


@pytest.fixture
async def agent(
    api: ApiServer, installed_pins: pins.Pins, tmp_path: pathlib.Path
) -> AsyncIterator[AgentProcess]:
    """Of a node without pods; not started yet."""
    made = AgentProcess(tmp_path, installed_pins.bpffs)
    kubeconfig = write_kubeconfig(tmp_path / "kube", f"http://127.0.0.1:{api.port}")
    made.pods_from = (
        *("--node-name", making.NODE, "--kubeconfig", kubeconfig),
        *("--cri-socket", str(tmp_path / "cri.sock")),
    )
    async with serving_pods(tmp_path / "cri.sock", []):
        try:
            yield made
        finally:
            await asyncio.to_thread(made.stop, signal.SIGKILL)
            await default_deny_table.remove()


@pytest.fixture
def pods(lab: Lab) -> tuple[LabPod, LabPod]:
    """For the program, and for its clients."""
    return lab.add_pod("dns", 1), lab.add_pod("client", 2)


@pytest.fixture
async def dns(
    agent: AgentProcess, pods: tuple[LabPod, LabPod], tmp_path: pathlib.Path
) -> AsyncIterator[Dns]:
    """The program of the tutorial, started before its agent."""
    python = await asyncio.to_thread(
        lambda: distribution.install(distribution.build(tmp_path / "dist"), tmp_path / "client")
    )
    made = Dns(*pods, tmp_path / "dns.log")
    with made.log.open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *("nsenter", f"--net={made.server.netns.path}", str(python), "-I", str(_PROGRAM)),
            *("--target", f"unix://{localnet_socket(agent.run_directory)}"),
            *("--address", made.server.ipv4),
            stdout=log,
            stderr=log,
        )
    try:
        await polling.until("the server", lambda: is_listening(made))
        yield made
        child.terminate()
        async with asyncio.timeout(polling.PATIENCE_SECONDS):
            assert await child.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def is_listening(dns: Dns) -> bool:
    with dns.client.open_socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return sock.connect_ex((dns.server.ipv4, 53)) == 0


async def test_names_of_services_and_pods_follow_the_agent(
    dns: Dns, api: ApiServer, agent: AgentProcess
) -> None:
    web, db, many = (f"{name}.default.svc.cluster.local" for name in ("web", "db", "many"))
    assert await asyncio.to_thread(dns.status, question(web)) == _SERVER_FAILURE
    await asyncio.to_thread(agent.start, "--service-endpoints")
    await dns.shows(web, "a", "198.18.96.1")
    await dns.shows(web, "aaaa", "fd00:18:96::1")
    await dns.shows(f"_http._tcp.{web}", "srv", f"0 100 80 {web}")
    await dns.shows(db, "a", "198.19.0.1", "198.19.0.2")
    await dns.shows(f"db-0.{db}", "a", "198.19.0.1")
    targets = (f"0 100 8080 db-0.{db}", f"0 100 8080 198-19-0-2.{db}")
    await dns.shows(f"_http._tcp.{db}", "srv", *targets)

    ext = "ext.default.svc.cluster.local"
    await dns.shows(ext, "cname", "db.example.org")

    statuses = {
        question("nothing.default.svc.cluster.local"): _NO_SUCH_NAME,
        question("example.org"): _REFUSED,
        question(web)[:-3]: _FORMAT_ERROR,
        question(web.upper(), _SRV): 0,
    }
    for query, status in statuses.items():
        assert await asyncio.to_thread(dns.status, query) == status, query
    by_udp = await asyncio.to_thread(dns.exchange, question(many), socket.SOCK_DGRAM)
    by_tcp = await asyncio.to_thread(dns.exchange, question(many), socket.SOCK_STREAM)
    assert (by_udp, by_tcp) == ((True, 0), (False, _MANY))

    put_pods(api, "198.19.0.3")
    await dns.shows(db, "a", "198.19.0.3")
    assert await asyncio.to_thread(dns.status, question(f"198-19-0-2.{db}")) == _NO_SUCH_NAME
    await asyncio.to_thread(agent.stop, signal.SIGKILL)
    await polling.until("a problem", lambda: "cannot read" in dns.log.read_text("utf-8"))
    await dns.shows(db, "a", "198.19.0.3")


def test_program_has_less_than_150_lines() -> None:
    assert len(_PROGRAM.read_text("utf-8").splitlines()) < 150
