"""A pod of which the relay answers the kubelet's probe, and a stand-in for the kubelet.

The pod has a server for the kubelet's probe (OWN) and one that podgate checks (CHECKED). The first
one responds with 204, which no verdict does: so each response shows who gave it.
"""

import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agent import labels
from agent.lab.lab import LabPod
from probes.spec.probespec import ANNOTATION, API_VERSION
from tests import polling
from tests.agent.relay import recordings
from tests.kernel import nodeclient
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import FleetPod, Node

OWN, CHECKED = 8080, 8081
GRPC, TCP = 9090, 7070
"""Ports of the kubelet's other probes; nothing listens."""
PROXIED, HEALTHY, SICK = "204", "200", "503"
"""Who responded: the pod itself, or the relay with a verdict."""
PERIOD_SECONDS, TIMEOUT_SECONDS = 0.5, 0.5
FAST = {
    "periodMilliseconds": int(PERIOD_SECONDS * 1000),
    "timeoutMilliseconds": int(TIMEOUT_SECONDS * 1000),
}
LASTING = {"periodMilliseconds": 300, "timeoutSeconds": 60}
"""Checked often, with verdicts that outlast any pause of a busy machine."""
RARE = {"periodSeconds": 3600}
"""A verdict for an hour: whatever ends it sooner is not its age."""


class Server:
    """Both servers of one pod. is_healthy: of CHECKED; requests: by port, in order."""

    def __init__(self, pod: LabPod, tls: ssl.SSLContext | None = None) -> None:
        """tls: of CHECKED, if it is https."""
        self._tls = tls
        self.is_healthy = True
        self.requests: list[int] = []
        self._servers = [self._serve(pod, port) for port in (OWN, CHECKED)]

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _serve(self, pod: LabPod, port: int) -> http.server.HTTPServer:
        switch = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                switch.requests.append(port)
                self.send_response(switch.status(port))
                self.end_headers()

            def handle(self) -> None:
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    super().handle()

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are recorded already."""

        listener = pod.listen(port)
        listener.settimeout(None)
        if self._tls and port == CHECKED:
            # Not in the thread that accepts: a client that is rejected must not end it.
            listener = self._tls.wrap_socket(
                listener, server_side=True, do_handshake_on_connect=False
            )
        made = http.server.ThreadingHTTPServer(("", port), Handler, bind_and_activate=False)
        made.socket.close()
        made.socket = listener
        threading.Thread(target=made.serve_forever, name=f"server of port {port}").start()
        return made

    def status(self, port: int) -> int:
        return 204 if port == OWN else 200 if self.is_healthy else 500


@contextlib.contextmanager
def serving(pod: LabPod, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    made = Server(pod, tls)
    try:
        yield made
    finally:
        made.close()


Probes = Sequence[tuple[dict[str, Any], dict[str, Any]]]
"""Handlers of the kubelet's probes, each with podgate's probe that answers it, or nothing."""


def http_probe(path: str = "/own") -> dict[str, Any]:
    return {"httpGet": {"port": OWN, "path": path}}


def probes(**check: Any) -> Probes:
    """The kubelet's http probe, and podgate's of CHECKED with these fields; without any, the
    kubelet's is proxied."""
    return [(http_probe(), {"http": {"port": CHECKED}, **check} if check else {})]


def manifest(pod: LabPod, probes: Probes) -> str:
    """A pod in strict with a container for each probe."""
    spec = {
        "apiVersion": API_VERSION,
        "containers": [
            {"name": f"c{number}", "readiness": {"answered": True, **check}}
            for number, (_, check) in enumerate(probes)
            if check
        ],
    }
    containers = [
        {
            "name": f"c{number}",
            "image": "none",
            "readinessProbe": {**handler, "periodSeconds": 3600},
        }
        for number, (handler, _) in enumerate(probes)
    ]
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.name,
                "namespace": "demo",
                "labels": {labels.MODE_LABEL: "strict"},
                "annotations": {
                    labels.NETNS_ANNOTATION: pod.netns.path,
                    **({ANNOTATION: json.dumps(spec)} if spec["containers"] else {}),
                },
            },
            "spec": {"containers": containers},
        }
    )


def add(node: Node, name: str, number: int, probes: Probes) -> LabPod:
    """Add a pod with these probes to the node."""
    pod = node.lab.add_pod(name, number)
    declare(node, pod, probes)
    return pod


def declare(node: Node, pod: LabPod, probes: Probes) -> None:
    """Write the manifest of a pod that the node has not had. Its annotation is read once."""
    node.pods[pod.name] = FleetPod(pod, (), "strict")
    node.operator.write_file(f"{pod.name}.yaml", manifest(pod, probes))


def remove(node: Node, name: str) -> None:
    """As when a pod ends: its namespace and interface, then its manifest."""
    del node.pods[name]
    node.lab.remove_pod(name)
    (node.operator.manifests / f"{name}.yaml").unlink()


class Kubelet:
    """Sends the probe of a pod's spec, byte by byte as a kubelet of 1.36 does."""

    def __init__(self, client: NodeClient, host: str, path: str = "/own") -> None:
        """host: the pod's IPv4 address; path: of its http probe."""
        self._client = client
        self._host = host
        self._path = path

    def tcp(self) -> str:
        """The tcp probe of TCP."""
        (result,) = self._client.probe([f"tcp,{self._host},{TCP}"]).values()
        return {nodeclient.OK: HEALTHY, nodeclient.REFUSED: SICK}.get(result, result)

    def grpc(self) -> str:
        """The gRPC probe of GRPC, as recorded."""
        result = self._client.check(self._host, GRPC, *recordings.GRPC[""])
        return {"1": HEALTHY, "2": SICK}.get(result, result)

    def probe(self, path: str = "") -> str:
        """Send the probe, or one to another path."""
        host = self._host
        request = (
            f"GET {path or self._path} HTTP/1.1\r\nHost: {host}:{OWN}\r\n"
            "User-Agent: kube-probe/1.36\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        )
        return self._client.exchange(host, OWN, request.encode())

    def until(self, *wanted: str, path: str = "") -> list[str]:
        """Probe until one of these is the result; all results."""
        found: list[str] = []

        def check() -> bool:
            found.append(self.probe(path))
            return found[-1] in wanted

        polling.wait_until(f"a probe has the result {' or '.join(wanted)}", check)
        return found

    def results_after(self, instant: float, count: int = 20) -> set[str]:
        """Of probes that begin after this time of the monotonic clock."""
        time.sleep(max(0.0, instant - time.monotonic()))
        return {self.probe() for _ in range(count)}


@contextlib.contextmanager
def kubelet(node: Node, pod: LabPod) -> Iterator[Kubelet]:
    with nodeclient.node_client(node.kubelet) as client:
        yield Kubelet(client, pod.ipv4)
