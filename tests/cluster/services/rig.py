"""Pods, services and clients of the tests in this package."""

import dataclasses
import inspect
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tests import polling
from tests.cluster import containers, proxies
from tests.cluster.api import Json
from tests.cluster.one_node import IMAGE, NAME, OneNode
from tests.cluster.services import dialing, echo
from tests.cluster.workloads import Workloads
from tests.runtime import images, node_cgroups

SERVERS = ("a", "b", "c")
"""Pods with the label `serves: web`, each a server on both ports."""
ELSEWHERE = "elsewhere"
"""A server beyond the node's uplink, as if it was a pod of another node."""
TARGET, OTHER_TARGET = 8080, 8081
"""The ports of servers; their names in pods are `one` and `two`."""
PORT, OTHER_PORT = 80, 81
"""Of services."""
REFUSED = "ECONNREFUSED"
SILENT = "ETIMEDOUT"
_FILES = "echo"
_VOLUMES: list[Json] = [{"name": "echo", "configMap": {"name": _FILES}}]
# Ready when `set_ready` has written the file that it serves.
_READINESS: Json = {
    "name": "readiness",
    "image": images.POD,
    "command": ["/bin/httpd", "-f", "-p", "8090", "-h", "/www"],
    "volumeMounts": [{"name": "www", "mountPath": "/www"}],
    "readinessProbe": {
        "httpGet": {"path": "/healthz", "port": 8090},
        "periodSeconds": 1,
        "failureThreshold": 1,
    },
}
# A busy machine takes seconds to respond.
_ANSWER_SECONDS = 30.0
_SILENCE_SECONDS = 2.0
# Of three endpoints one is missed in one of 5,000 rounds, and rounds are repeated.
_CALLS = 24
_numbers = itertools.count(1)


def server(*ports: int, **more: Any) -> Json:
    """A container that listens on these ports: TARGET and OTHER_TARGET, if none is given. It
    responds with its host's name. more: fields of it."""
    numbers = ports or (TARGET, OTHER_TARGET)
    return {
        "name": "echo",
        "image": IMAGE,
        "command": ["/usr/bin/python3", "/echo/echo.py", "", *map(str, numbers)],
        "ports": [
            {"name": name, "containerPort": number}
            for name, number in zip(("one", "two"), numbers, strict=False)
        ],
        "volumeMounts": [{"name": "echo", "mountPath": "/echo"}],
        # Without a request it gets next to no CPU time beside others on a busy machine.
        "resources": {"requests": {"cpu": "100m"}},
        "startupProbe": {
            "tcpSocket": {"port": numbers[0]},
            "periodSeconds": 1,
            "failureThreshold": 120,
        },
        **more,
    }


def run_server(users: Workloads, name: str, *containers_: Json, **more: Any) -> None:
    """A pod with one server, unless containers are given. more: as for `Workloads.run`."""
    more["volumes"] = [*_VOLUMES, *more.get("volumes", [])]
    users.run(name, *(containers_ or (server(),)), **more)


def run_unready(users: Workloads, name: str, **more: Any) -> None:
    """A pod whose server responds, while the kubelet finds it unready until `set_ready`."""
    run_server(users, name, server(), _READINESS, volumes=containers.FRAGILE_VOLUMES, **more)


def run_on_host(users: Workloads, name: str, port: int) -> None:
    """A pod of the host's network, whose server responds with this name."""
    container = server(port)
    container["command"][2] = name
    run_server(users, name, container, labels={"serves": "web"}, hostNetwork=True)
    users.until_ready(name)


def set_ready(users: Workloads, name: str, *, is_ready: bool) -> None:
    containers.set_health(users.pod(name), is_healthy=is_ready)


def until_started(users: Workloads, name: str) -> Json:
    """The pod, when its server responds, ready or not."""

    def check() -> Json | None:
        pod = users.pod(name)
        found = pod["status"].get("containerStatuses", [])
        return pod if found and all(one.get("started") for one in found) else None

    found = polling.wait_until(f"the server of {name} responds", check)
    assert found is not None
    return found


def until_terminating(services: "Services", service: Json) -> None:
    """The controller has published that an endpoint of the service terminates."""
    polling.wait_until(
        "an endpoint terminates",
        lambda: any(one["conditions"].get("terminating") for one in services.endpoints(service)),
    )


def until_empty(services: "Services", service: Json) -> None:
    """The controller has published that the service has no endpoint."""

    def check() -> bool:
        found.append(services.endpoints(service))
        return not found[-1]

    found: list[list[Json]] = []
    try:
        polling.wait_until("the service has no endpoint", check)
    except polling.TimedOutError as error:
        raise AssertionError(f"{error}: {found[-1]}") from error


def create_files(users: Workloads) -> None:
    path = f"/api/v1/namespaces/{users.namespace}/configmaps"
    data = {"echo.py": inspect.getsource(echo)}
    users.api.create(path, {"metadata": {"name": _FILES}, "data": data})


@dataclasses.dataclass(frozen=True)
class Client:
    """Processes of one network namespace."""

    name: str
    node: OneNode
    pid: int = 0
    """Of a process in the namespace of a pod; 0: the node's own."""
    is_outside: bool = False
    """Beyond the uplink: no socket of this node."""

    def call(
        self,
        address: str,
        port: int = PORT,
        kind: str = "tcp",
        *,
        count: int = _CALLS,
        size: int = 1,
        seconds: float = _ANSWER_SECONDS,
        source_port: int = 0,
    ) -> list[Json]:
        """The answers to `count` calls, one after the other."""
        given = {"kind": kind, "address": address, "port": port, "count": count, "size": size}
        given |= {"seconds": seconds, "source_port": source_port}
        # -I and -S: it starts faster.
        command = [sys.executable, "-IS", dialing.__file__, json.dumps(given)]
        output = subprocess.run(
            self._prefix() + command,
            check=True,
            capture_output=True,
            text=True,
            timeout=60 + seconds * count,
        ).stdout
        found: list[Json] = json.loads(output)
        return found

    def names(self, address: str, port: int = PORT, kind: str = "tcp", **more: Any) -> set[str]:
        """The names of the servers that respond, and the errors."""
        return {one.get("name") or one["error"] for one in self.call(address, port, kind, **more)}

    def until(
        self,
        wanted: Iterable[str],
        address: str,
        port: int = PORT,
        kind: str = "tcp",
        *,
        patience: float = polling.PATIENCE_SECONDS,
        **more: Any,
    ) -> None:
        """Wait until these servers respond and no other one, or calls have this error. patience:
        in seconds; more: as for `call`."""
        names = set(wanted)
        if SILENT in names:
            more = {"seconds": _SILENCE_SECONDS, "count": 3, **more}

        def check() -> bool:
            found.append(self.names(address, port, kind, **more))
            return found[-1] == names

        found: list[set[str]] = []
        try:
            polling.wait_until(f"{names} respond to {self.name}", check, seconds=patience)
        except polling.TimedOutError as error:
            raise AssertionError(f"{error}; {kind} {address} port {port}: {found[-3:]}") from error

    def until_down(self, address: str, port: int = PORT, kind: str = "tcp") -> None:
        """Wait until no server responds, however that fails: nothing may have the address."""

        def check() -> bool:
            answers = self.call(address, port, kind, count=3, seconds=_SILENCE_SECONDS)
            return all("error" in one for one in answers)

        polling.wait_until(f"no server responds to {self.name} at {address} port {port}", check)

    def until_constant(self, address: str, port: int = PORT, kind: str = "tcp") -> str:
        """Wait until one server responds to all calls, and return its name."""

        def check() -> str | None:
            answers = self.call(address, port, kind)
            names = {one.get("name") for one in answers}
            return names.pop() if len(names) == 1 else None

        found = polling.wait_until(f"one server responds to {self.name}", check)
        assert found is not None
        return found

    def _prefix(self) -> list[str]:
        if self.is_outside:
            return ["nsenter", f"--net={proxies.OUTSIDE_NETNS}"]
        directory = self.node.kubelet.daemon.cgroup.parent / "client"
        directory.mkdir(exist_ok=True)
        within = ["nsenter", f"--net=/proc/{self.pid}/ns/net"] if self.pid else []
        return node_cgroups.command_in(directory, within)


def pod_client(node: OneNode, pod: Json) -> Client:
    """A process of the pod's network namespace."""
    name = pod["metadata"]["name"]
    return Client(name, node, containers.pid_of(node.runtime, pod))


class Services:
    """Creates services of one namespace, and deletes them."""

    def __init__(self, users: Workloads) -> None:
        self._users = users
        self._path = f"/api/v1/namespaces/{users.namespace}/services"
        self._slices = f"/apis/discovery.k8s.io/v1/namespaces/{users.namespace}/endpointslices"
        self._made: list[str] = []

    def create(
        self,
        *ports: Json,
        selector: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "",
        **spec: Any,
    ) -> Json:
        """A service of both families for the servers. ports: the first one of servers, by TCP,
        without any; selector: of SERVERS, if None, and of nothing, if empty."""
        made = name or f"web-{next(_numbers)}"
        chosen = {"serves": "web"} if selector is None else dict(selector)
        content: Json = {
            "ports": list(ports) or [port()],
            "selector": chosen or None,
            "ipFamilyPolicy": "RequireDualStack",
            **spec,
        }
        if content.get("type") == "ExternalName":
            del content["ipFamilyPolicy"]
        metadata = {"name": made, "labels": dict(labels or {})}
        self._made.append(made)
        return self._users.api.create(self._path, {"metadata": metadata, "spec": content})

    def patch(self, service: Json, *, labels: Mapping[str, Any] | None = None, **spec: Any) -> Json:
        body: Json = {"spec": spec, "metadata": {"labels": dict(labels or {})}}
        return self._users.api.patch(f"{self._path}/{service['metadata']['name']}", body)

    def set_load_balancer(self, service: Json, *ingress: Json) -> None:
        """As a cloud's controller."""
        path = f"{self._path}/{service['metadata']['name']}/status"
        self._users.api.patch(path, {"status": {"loadBalancer": {"ingress": list(ingress)}}})

    def delete(self, service: Json) -> None:
        name = service["metadata"]["name"]
        self._users.api.delete(f"{self._path}/{name}")
        self._made.remove(name)

    def delete_all(self) -> None:
        for name in self._made:
            self._users.api.delete(f"{self._path}/{name}")
        self._made.clear()

    def add_slice(
        self,
        service: Json,
        *endpoints: Json,
        ports: Iterable[Json] = (),
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """An EndpointSlice beside those of the controller; its path. It goes with its service.

        endpoints: of one family; ports: the unnamed one of servers without any.
        """
        name = service["metadata"]["name"]
        body: Json = {
            "metadata": {
                "generateName": f"{name}-own-",
                "labels": {
                    "kubernetes.io/service-name": name,
                    "endpointslice.kubernetes.io/managed-by": "podgate-tests",
                    **(labels or {}),
                },
                "ownerReferences": [
                    {
                        "apiVersion": "v1",
                        "kind": "Service",
                        "name": name,
                        "uid": service["metadata"]["uid"],
                    }
                ],
            },
            "addressType": "IPv6" if ":" in endpoints[0]["addresses"][0] else "IPv4",
            "endpoints": list(endpoints),
            "ports": list(ports) or [{"name": "", "protocol": "TCP", "port": TARGET}],
        }
        made = self._users.api.create(self._slices, body)
        return f"{self._slices}/{made['metadata']['name']}"

    def endpoints(self, service: Json) -> list[Json]:
        """Of all slices of the service."""
        name = service["metadata"]["name"]
        selector = f"kubernetes.io/service-name={name}"
        found = self._users.api.items(self._slices, labelSelector=selector)
        return [one for each in found for one in each["endpoints"] or ()]


def port(
    number: int = PORT,
    target: int | str = TARGET,
    protocol: str = "TCP",
    name: str = "",
    **more: Any,
) -> Json:
    """A port of a service."""
    return {"name": name, "port": number, "targetPort": target, "protocol": protocol, **more}


def endpoint(address: str, *, node: str = NAME, **more: Any) -> Json:
    """A ready endpoint of a slice."""
    return {"addresses": [address], "nodeName": node, "conditions": {"ready": True}, **more}


def both(service: Json) -> list[str]:
    """The service's cluster IPs."""
    found: list[str] = service["spec"]["clusterIPs"]
    return found


def node_port(service: Json) -> int:
    """Of its first port."""
    return int(service["spec"]["ports"][0]["nodePort"])


def address_of(pod: Json, family: int = 4) -> str:
    """The pod's address of a family."""
    found = [one["ip"] for one in pod["status"]["podIPs"]]
    return next(str(ip) for ip in found if (":" in ip) == (family == 6))


def same_family(address: str, *addresses: str) -> str:
    """The one of `addresses` that has the family of `address`."""
    return next(one for one in addresses if (":" in one) == (":" in address))


def never(what: str, check: Any, *, seconds: float = 3) -> None:
    """Watch for a short time what must not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not check(), what
        time.sleep(0.1)


def elsewhere(directory: pathlib.Path) -> "subprocess.Popen[bytes]":
    """The server ELSEWHERE; the caller ends it."""
    command = [sys.executable, echo.__file__, ELSEWHERE, str(TARGET), str(OTHER_TARGET)]
    with (directory / "elsewhere.log").open("wb") as log:
        return subprocess.Popen(
            ["nsenter", f"--net={proxies.OUTSIDE_NETNS}", *command], stdout=log, stderr=log
        )
