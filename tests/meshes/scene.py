"""A node with an agent, and pods of a mesh whose applications serve every kind of probe."""

import contextlib
import dataclasses
import pathlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from agent.admin.report import AgentReport
from agent.lab.agent_process import Launch, pod_of
from agent.lab.lab import Lab, LabPod
from bpf import pins
from tests.kernel import cgroups, fleet, nodeclient, strictnode
from tests.kernel.nodeclient import NodeClient
from tests.kernel.standin import KubeletStub
from tests.meshes import ambient, meshes
from tests.meshes.meshes import InPods, Mesh
from tests.meshes.running import mesh_processes
from tests.polling import PATIENCE

# podgate runs each of them once a second; a proxy on a busy machine is late.
_OWN = {
    "periodSeconds": 1,
    "initialDelaySeconds": 0,
    "failureThreshold": 1,
    "timeoutSeconds": round(5 * PATIENCE),
}

OK, REFUSED = nodeclient.OK, nodeclient.REFUSED
WEB, PEER, PLAIN = "web", "peer", "plain"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of probe, as its author wrote it. client, port: of `nodeclient`'s target; right: what
    the kubelet gets without a mesh; path: of a request that `nodeclient` sends by itself."""

    handler: dict[str, Any]
    client: str
    port: int
    right: str = OK
    path: str = ""

    @property
    def is_success(self) -> bool:
        return self.right in (OK, "200")


KINDS = {
    "http": Kind(fleet.http_probe(fleet.HTTP), "http", fleet.HTTP),
    "http, 500": Kind(fleet.http_probe(fleet.ILL), "http", fleet.ILL, "status 500"),
    "https": Kind(
        {"httpGet": {"path": "/healthz", "port": fleet.HTTPS, "scheme": "HTTPS"}},
        "https",
        fleet.HTTPS,
    ),
    "grpc": Kind(fleet.grpc_probe(fleet.GRPC), "grpc", fleet.GRPC),
    "tcp up": Kind(fleet.tcp_probe(fleet.TCP), "tcp", fleet.TCP),
    "tcp down": Kind(fleet.tcp_probe(fleet.CLOSED), "tcp", fleet.CLOSED, REFUSED),
}
_STATUS_PORT = 15020


def _rewritten(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": _STATUS_PORT}}


REWRITTEN = {
    "rewritten": Kind(
        _rewritten(meshes.REWRITTEN), "exchange", _STATUS_PORT, "200", meshes.REWRITTEN
    ),
    "rewritten, down": Kind(
        _rewritten(meshes.REWRITTEN_CLOSED),
        *("exchange", _STATUS_PORT, "500", meshes.REWRITTEN_CLOSED),
    ),
}
"""What Istio's injector makes of probes of the application and of a closed port."""

_PORTS = (fleet.HTTP, fleet.HTTPS, fleet.GRPC, fleet.TCP, fleet.ILL)
_HOST_PORTS = (("http", fleet.HTTP), ("https", fleet.HTTPS), ("tcp", fleet.TCP))


class Scene:
    """web is the pod that is probed, peer another one of the mesh, plain one without."""

    def __init__(self, mesh: Mesh, node: strictnode.Node, clients: dict[str, NodeClient]) -> None:
        """clients: "kubelet", "host process", and pods by name."""
        self.mesh = mesh
        self.node = node
        self._clients = clients
        self.in_pods = InPods([])
        self.kinds = KINDS | (REWRITTEN if mesh.is_rewritten else {})

    @property
    def web(self) -> LabPod:
        return self.node.pods[WEB].pod

    def kubelet_results(self) -> dict[str, str]:
        """By kind, what the kubelet gets: RIGHT or what it is instead, by family if they differ."""
        client = self._clients["kubelet"]
        found = {}
        for name, kind in self.kinds.items():
            by_family = {
                family: _verdict(kind, _result(client, kind, address))
                for family, address in (("IPv4", self.web.ipv4), ("IPv6", self.web.ipv6))
            }
            found[name] = _joined(by_family)
        return found

    def host_results(self) -> dict[str, str]:
        """What a host process gets, by port of the application and of the proxy."""
        targets = {
            f"{kind},{address},{port}": str(port)
            for kind, port in (*_HOST_PORTS, *(("tcp", port) for port in self.mesh.ports))
            for address in (self.web.ipv4, self.web.ipv6)
        }
        return self._clients["host process"].probe(targets)

    def pod_results(self) -> dict[str, object]:
        """What other pods get, and which sources the application sees of their requests."""
        web = self.node.pods[WEB]
        # podgate's probes and the relay.
        own = {web.pod.ipv4, web.pod.ipv6}
        requests = web.targets("http", fleet.HTTP)
        # A proxy connects to the application some time after its client has closed a connection
        # without data: such connections come before the response to this.
        self._clients[PEER].probe(requests)
        found: dict[str, object] = {}
        results = {}
        for name in (PEER, PLAIN):
            self.node.fleet.peers()
            results[name] = self._clients[name].probe(requests)
            found[f"{name} is"] = self.node.fleet.peers().get(WEB, set()) - own
        for name in (PEER, PLAIN):
            results[name] |= self._clients[name].probe(web.targets("tcp", fleet.TCP))
            # A reset and an end are the same to a client, which sees the one or the other.
            found[name] = {target: result == OK for target, result in results[name].items()}
        return found

    def own_results(self) -> dict[str, str]:
        """Of podgate's probes, each of which has run since this was called."""
        before = {probe.container: _runs(probe) for probe in self._probes(self._report())}

        def are_new(report: AgentReport) -> bool:
            probes = self._probes(report)
            return all(_runs(probe) != before.get(probe.container) for probe in probes)

        probes = self._probes(self.node.operator.wait_for("new results", are_new))
        found = {}
        for name, probe in zip(
            self.kinds, sorted(probes, key=lambda one: one.container), strict=True
        ):
            right = "success" if self.kinds[name].is_success else "failure"
            is_right = probe.result == right
            found[name] = "right" if is_right else f"wrong ({probe.last_message.strip()})"
        return found

    def _report(self) -> AgentReport:
        return self.node.operator.wait_for("a report", lambda report: True)

    def _probes(self, report: AgentReport) -> Any:
        found = pod_of(report, WEB)
        return found.probes if found else []


def _runs(probe: Any) -> tuple[int, int]:
    return probe.successes, probe.failures


def _result(client: NodeClient, kind: Kind, address: str) -> str:
    if kind.path:
        request = f"GET {kind.path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"
        return client.exchange(address, kind.port, request.encode())
    (result,) = client.probe([f"{kind.client},{address},{kind.port}"]).values()
    return result


def _verdict(kind: Kind, result: str) -> str:
    is_success = result in (OK, "200")
    if is_success == kind.is_success and (is_success or result == kind.right or kind.path):
        return "right"
    return f"wrong ({result})"


def _joined(by_family: dict[str, str]) -> str:
    results = set(by_family.values())
    if len(results) == 1:
        return results.pop()
    return ", ".join(f"{family} {result}" for family, result in by_family.items())


@contextlib.contextmanager
def scene(
    mesh: Mesh, lab: Lab, folder: pathlib.Path, launch: Launch, installed: pins.Pins
) -> Iterator[Scene]:
    """The mesh is in force in `web` and `peer`; no agent runs yet."""
    # All users may read what the mesh's processes get; pytest's folder is root's.
    shared = pathlib.Path("/run/mesh")
    shared.mkdir(mode=0o755)
    with (
        _rules_of_the_node(),
        mesh_processes(shared) as processes,
        strictnode.strict_node(lab, folder, launch, installed) as node,
        contextlib.ExitStack() as undo,
    ):
        probes = tuple({**_OWN, **kind.handler} for kind in _kinds(mesh).values())
        # A liveness probe that fails stops until its container restarts.
        kind = "readinessProbe"
        web = node.add(WEB, 1, ports=_PORTS, probes=probes, kind=kind).pod
        peer = node.add(PEER, 2, ports=_PORTS, probes=probes[:1], kind=kind).pod
        plain = lab.add_pod(PLAIN, 3)
        clients = {}
        # Istio's rule on the node names the user of the kubelet, which it finds by its name.
        named = KubeletStub(node.kubelet, "kubelet", [])
        undo.callback(named.end)
        host = undo.enter_context(cgroups.cgroup())
        for name, group, pod in (
            ("kubelet", node.kubelet, None),
            ("host process", host, None),
            (PEER, host, peer),
            (PLAIN, host, plain),
        ):
            netns = pod.netns.path if pod else ""
            clients[name] = undo.enter_context(nodeclient.node_client(group, netns=netns))
        made = Scene(mesh, node, clients)
        pods: Sequence[LabPod] = (web, peer)
        if mesh.programs == ambient.PROGRAMS:
            pods = (*pods, lab.add_pod(ambient.ZTUNNEL_POD, 9))
        made.in_pods = mesh.start(processes, pods)
        yield made


def _kinds(mesh: Mesh) -> dict[str, Kind]:
    return KINDS | (REWRITTEN if mesh.is_rewritten else {})


@contextlib.contextmanager
def _rules_of_the_node() -> Iterator[None]:
    """Whatever the mesh leaves on the test's node is removed."""
    try:
        yield
    finally:
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        subprocess.run(["ipset", "destroy"], check=False)
