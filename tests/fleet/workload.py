"""The pods of a cluster of several nodes, their services, and who connects to them."""

import dataclasses
import inspect
import pathlib
from typing import Any

from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.machine import Machine
from tests.cluster.one_node import IMAGE
from tests.cluster.several_nodes import SeveralNodes
from tests.cluster.workloads import Workloads
from tests.fleet import server
from tests.fleet.matrix import Source, Target
from tests.fleet.server import TCP, UDP

SHOP, CLIENTS, HOSTS = "shop", "clients", "hosts"
"""Namespaces: of servers, whose mode tests change; of clients, in audit; of hostNetwork pods."""
HOST_PORT = 8088
_FIRST_NODE_PORT, _FIRST_LOCAL_PORT = 30001, 30101
_UDP_LATER = 1000
"""What a service's node port for UDP is above that for TCP."""
_PROBE: Json = {"httpGet": {"path": "/", "port": TCP}, "periodSeconds": 2, "timeoutSeconds": 5}
_TCP_PROBE: Json = {"tcpSocket": {"port": TCP}, "periodSeconds": 2, "timeoutSeconds": 5}
_PROBE_KINDS = 2
"""Of a server after its start."""
_CUT = ("EOF", "connection reset by peer")
"""The kubelet's words for a connection that the other side ended."""
_CONTAINER: Json = {
    "name": "server",
    "image": IMAGE,
    "imagePullPolicy": "Never",
    "command": ["/usr/bin/python3", "/server/server.py"],
    "volumeMounts": [{"name": "server", "mountPath": "/server"}],
    # Without a request a pod gets a five-hundredth of the CPU time of other processes.
    "resources": {"requests": {"cpu": "100m"}},
}
_SLEEP = ["/usr/bin/python3", "-c", "import signal; signal.pause()"]
_VOLUMES: list[Json] = [{"name": "server", "configMap": {"name": "server"}}]


@dataclasses.dataclass(frozen=True, slots=True)
class Web:
    """The server of one node. node_port, local_port: of its services, the second of which has
    `externalTrafficPolicy: Local`."""

    name: str
    node: str
    node_port: int
    local_port: int


class Fleet:
    """A server, a client and a hostNetwork pod on each node."""

    def __init__(self, cluster: SeveralNodes) -> None:
        self._cluster = cluster
        self.api: Api = cluster.api
        self.shop = Workloads(self.api, SHOP)
        self.clients = Workloads(self.api, CLIENTS)
        self.hosts = Workloads(self.api, HOSTS)
        self.webs = [
            Web(f"web-{one.name}", one.name, _FIRST_NODE_PORT + number, _FIRST_LOCAL_PORT + number)
            for number, one in enumerate(cluster.machines)
        ]

    def create(self) -> None:
        """All of it; waits until the pods are Ready."""
        for users in (self.shop, self.clients, self.hosts):
            self._create_namespace(users)
        for web in self.webs:
            self.run_web(web)
            self._create_services(web)
            pinned: Json = {"nodeName": web.node}
            self.clients.run(f"client-{web.node}", _CONTAINER, volumes=_VOLUMES, **pinned)
            # Its own server would take the ports of the node.
            sleeping = _CONTAINER | {"command": _SLEEP}
            self.hosts.run(
                f"agent-{web.node}", sleeping, volumes=_VOLUMES, hostNetwork=True, **pinned
            )
        self.wait_until_ready()

    def run_web(self, web: Web, **metadata: Any) -> None:
        container = _CONTAINER | {
            "ports": [{"containerPort": TCP, "hostPort": HOST_PORT}],
            "startupProbe": {**_PROBE, "periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": _PROBE,
            "livenessProbe": {**_TCP_PROBE, "failureThreshold": 2},
        }
        self.shop.run(web.name, container, nodeName=web.node, volumes=_VOLUMES, **metadata)

    def wait_until_ready(self) -> None:
        self.shop.until_ready(*(web.name for web in self.webs))
        self.clients.until_ready(*(f"client-{web.node}" for web in self.webs))
        self.hosts.until_ready(*(f"agent-{web.node}" for web in self.webs))

    def harm(self, kills: int = 0) -> str:
        """What no healthy pod may have; empty if nothing. kills: of relays, each of which cuts the
        probes in flight (docs/failures.md), one of each kind at most."""
        for users in (self.shop, self.clients, self.hosts):
            if restarts := users.restarts():
                return f"restarts: {restarts}"
        failed: list[str] = []
        for event in self.shop.events("Unhealthy"):
            if "Startup probe failed" not in event["message"]:
                name = event["involvedObject"]["name"]
                failed += [f"{name}: {event['message']}"] * event.get("count", 1)
        cut = [one for one in failed if any(text in one for text in _CUT)]
        if len(cut) < len(failed) or len(cut) > kills * _PROBE_KINDS:
            return f"failed probes: {failed}"
        return ""

    def sources(self) -> list[Source]:
        """Who connects: a process of each node, of each pod, and of a client outside."""
        found = [Source("outside", "", is_host=False)]
        for machine in self._cluster.machines:
            own = machine.cgroup / "host"
            own.mkdir(exist_ok=True)
            found.append(Source(f"host-{machine.name}", machine.name, True, machine.pid, own))
            for users, name, is_host in (
                (self.hosts, "agent", True),
                (self.clients, "client", False),
                (self.shop, "web", False),
            ):
                pod = users.pod(f"{name}-{machine.name}")
                found.append(_source_of(machine, pod, is_host))
        return found

    def targets(self) -> list[Target]:
        """Each way to each server."""
        found = []
        for web in self.webs:
            pod = self.shop.pod(web.name)
            for ip in [one["ip"] for one in pod["status"]["podIPs"]]:
                found.append(Target(f"{web.name} {ip}", ip, TCP, "tcp", web.node))
                found.append(Target(f"{web.name} {ip} udp", ip, UDP, "udp", web.node))
            service = self.api.get(f"/api/v1/namespaces/{SHOP}/services/{web.name}")
            for ip in service["spec"]["clusterIPs"]:
                name = f"service {web.name} {ip}"
                found.append(Target(name, ip, 80, "tcp", web.node))
                found.append(Target(f"{name} udp", ip, UDP, "udp", web.node))
            for machine in self._cluster.machines:
                found += self._through(machine, web)
        return found

    def set_mode(self, mode: str | None) -> None:
        """Of the servers, by their namespace's label."""
        labels = {"podgate.io/mode": mode}
        self.api.patch(f"/api/v1/namespaces/{SHOP}", {"metadata": {"labels": labels}})

    def _through(self, machine: Machine, web: Web) -> list[Target]:
        """A server's ports of a node."""
        found = []
        for ip in machine.addresses:
            name = f"{web.name} by {machine.name} {ip}"
            for port, is_local in ((web.node_port, False), (web.local_port, True)):
                for protocol, later in (("tcp", 0), ("udp", _UDP_LATER)):
                    full = f"{name} {'local ' if is_local else ''}node port {protocol}"
                    found.append(
                        Target(
                            *(full, ip, port + later, protocol),
                            *(web.node, machine.name, is_local),
                        )
                    )
            if machine.name == web.node:
                full = f"{name} host port"
                found.append(Target(full, ip, HOST_PORT, "tcp", web.node, machine.name))
        return found

    def _create_namespace(self, users: Workloads) -> None:
        self.api.create("/api/v1/namespaces", {"metadata": {"name": users.namespace}})
        path = f"/api/v1/namespaces/{users.namespace}"
        polling.wait_until(
            "the service account exists",
            lambda: self.api.find(f"{path}/serviceaccounts/default"),
        )
        source = pathlib.Path(inspect.getfile(server)).read_text(encoding="utf-8")
        data = {"metadata": {"name": "server"}, "data": {"server.py": source}}
        self.api.create(f"{path}/configmaps", data)

    def _create_services(self, web: Web) -> None:
        for name, port, policy in (
            (web.name, web.node_port, "Cluster"),
            (f"{web.name}-local", web.local_port, "Local"),
        ):
            spec: Json = {
                "type": "NodePort",
                "selector": {"app": web.name},
                "ipFamilyPolicy": "RequireDualStack",
                "externalTrafficPolicy": policy,
                "ports": [
                    {"name": "http", "port": 80, "targetPort": TCP, "nodePort": port},
                    {
                        **{"name": "dns", "port": UDP, "targetPort": UDP},
                        **{"protocol": "UDP", "nodePort": port + _UDP_LATER},
                    },
                ],
            }
            path = f"/api/v1/namespaces/{SHOP}/services"
            self.api.create(path, {"metadata": {"name": name}, "spec": spec})


def _source_of(machine: Machine, pod: Json, is_host: bool) -> Source:
    (pid, *_) = machine.containers_of(pod["metadata"]["uid"])
    cgroup = next(
        line.rpartition(":")[2].lstrip("/")
        for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )
    root = machine.cgroup.parents[1]
    return Source(pod["metadata"]["name"], machine.name, is_host, pid, root / cgroup)
