"""Two pods with one address and port: the relay proxies each request to the pod whose it is."""

import contextlib
import functools
import http.server
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import lab as labs
from agent.lab.agent_process import Launch, condition_of, pod_of
from agent.lab.lab import LabPod
from bpf import pins
from probes.engine import hooks
from probes.protocols.http_get import PROBE_CLIENT, HttpClientProfile, HttpTarget
from probes.spec.specs import HttpGet
from tests.kernel import links
from tests.kernel.strictnode import RANGE4, RANGE6, Node, strict_node
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT, ELSEWHERE = 8080, 9090

# Sends requests on one connection, and prints the body of each response.
_CLIENT = r"""
import socket, sys
host, port, *requests = sys.argv[1:]
with socket.create_connection((host, int(port)), 30) as sock:
    for request in requests:
        received = b""
        try:
            sock.sendall(bytes.fromhex(request))
            while not received.endswith(b".\n"):
                piece = sock.recv(4096)
                if not piece:
                    break
                received += piece
        except ConnectionError:
            received = b""
        print(received.partition(b"\r\n\r\n")[2].decode().strip() or "closed")
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Names the pod, the path and the peer."""

    protocol_version = "HTTP/1.1"
    pod = ""

    def do_GET(self) -> None:
        peer = self.client_address[0].removeprefix("::ffff:")
        body = f"{self.pod} {self.path} from {peer} .\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def served(pod: LabPod, *ports: int) -> Iterator[None]:
    handler = type("_PodHandler", (_Handler,), {"pod": pod.name})
    servers = []
    for port in ports:
        server = http.server.ThreadingHTTPServer(("", port), handler, bind_and_activate=False)
        server.socket.close()
        server.socket = pod.listen(port)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.socket.close()


@pytest.fixture
def node(
    lab: labs.Lab, launch: Launch, installed: pins.Pins, tmp_path: pathlib.Path
) -> Iterator[Node]:
    with strict_node(lab, tmp_path, launch, installed) as made:
        yield made


@pytest.fixture
def pods(node: Node) -> Iterator[tuple[LabPod, LabPod]]:
    """The host's route leads to the first."""
    first, twin = node.lab.add_pod("first", 1), node.lab.add_pod("twin", 2)
    links.take_addresses(twin, first)
    with served(first, PORT, ELSEWHERE), served(twin, PORT, ELSEWHERE):
        yield first, twin


def http_get(path: str) -> dict[str, Any]:
    return {"httpGet": {"port": PORT, "path": path}}


def container(probe: dict[str, Any], hook: str = "") -> dict[str, Any]:
    """podgate itself runs the probe once an hour."""
    rare = {**probe, "periodSeconds": 3600, "initialDelaySeconds": 3600}
    hooked = {"lifecycle": {"preStop": http_get(hook)}} if hook else {}
    return {"livenessProbe": rare, **hooked}


def start(
    node: Node,
    pods: tuple[LabPod, LabPod],
    *containers: dict[str, Any],
    mode: str = "strict",
) -> None:
    """With the same addresses for both in their status."""
    addresses = [pods[0].ipv4, pods[0].ipv6]
    for pod, declared in zip(pods, containers, strict=True):
        node.operator.write_manifest(pod, mode=mode, container=declared, addresses=addresses)
    node.operator.start(
        *("--kubelet", f"cgroup:{node.kubelet.path}"),
        *("--relay-range4", RANGE4, "--relay-range6", RANGE6),
    )


def has_condition(names: tuple[str, ...], reason: str, words: str, report: AgentReport) -> bool:
    found = [condition_of(report, name, labels.ISOLATION_READY) for name in names]
    return all(one and one.reason == reason and words in one.message for one in found)


def wait_until(node: Node, pods: tuple[LabPod, LabPod], reason: str, words: str = "") -> None:
    names = tuple(pod.name for pod in pods)
    node.operator.wait_for(
        f"{reason} {words}", functools.partial(has_condition, names, reason, words)
    )


def has_paths(results: dict[str, str], report: AgentReport) -> bool:
    """By pod: the result of all path tests."""
    found = {name: pod_of(report, name) for name in results}
    return all(
        (pod := found[name]) is not None and {path.result for path in pod.paths} == {result}
        for name, result in results.items()
    )


def sent(path: str, address: str, client: HttpClientProfile = PROBE_CLIENT) -> bytes:
    """The kubelet's request."""
    request = HttpTarget(HttpGet(PORT, path), address, client).request
    assert isinstance(request, bytes)
    return request


def behind(request: bytes, path: str, referer: str, address: str) -> bytes:
    """The same behind a redirect."""
    rest = request.partition(b"\r\n")[2].removesuffix(b"\r\n")
    host = f"[{address}]" if ":" in address else address
    line = f"GET {path} HTTP/1.1\r\n".encode()
    return line + rest + f"Referer: http://{host}:{PORT}{referer}\r\n\r\n".encode()


def exchange(node: Node, address: str, *requests: bytes, port: int = PORT) -> list[str]:
    """Bodies of the responses that the kubelet gets on one connection."""
    texts = [request.hex() for request in requests]
    done = node.kubelet.run([*BARE_PYTHON, "-c", _CLIENT, address, str(port), *texts])
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\n")[:-1]


def families(pod: LabPod) -> tuple[str, str]:
    return pod.ipv4, pod.ipv6


def test_probes_and_hooks_reach_their_pods(node: Node, pods: tuple[LabPod, LabPod]) -> None:
    first, twin = pods
    start(
        node,
        pods,
        container(http_get("/a"), hook="/bye-a"),
        container(http_get("/b"), hook="/bye-b"),
    )
    wait_until(node, pods, "Strict")
    for address in families(first):
        for pod, path in ((first, "/a"), (twin, "/b")):
            assert exchange(node, address, sent(path, address)) == [
                f"{pod.name} {path} from {address} ."
            ]
            bye = sent(f"/bye{path.replace('/', '-')}", address, hooks.CLIENT)
            (response,) = exchange(node, address, bye)
            assert response.startswith(f"{pod.name} /bye-")
            # Redirects, to this port and to one that neither declares, and on from there.
            login = behind(sent(path, address), f"/login{path}", path, address)
            assert exchange(node, address, login)[0].startswith(f"{pod.name} /login")
            end = behind(sent(path, address), "/end", f"/login{path}", address)
            assert exchange(node, address, end, port=ELSEWHERE)[0].startswith(f"{pod.name} /end")


def test_connection_is_not_reused_for_another_pod(node: Node, pods: tuple[LabPod, LabPod]) -> None:
    """The kubelet's client for hooks keeps connections, by address and port. When one is reset, it
    repeats the request on another."""
    first, twin = pods
    start(node, pods, container(http_get("/a"), "/bye-a"), container(http_get("/b"), "/bye-b"))
    wait_until(node, pods, "Strict")
    bye_a, bye_b = (sent(path, first.ipv4, hooks.CLIENT) for path in ("/bye-a", "/bye-b"))
    assert exchange(node, first.ipv4, bye_a, bye_b) == [
        f"{first.name} /bye-a from {first.ipv4} .",
        "closed",
    ]
    assert exchange(node, first.ipv4, bye_b) == [f"{twin.name} /bye-b from {first.ipv4} ."]


def test_other_requests_go_where_the_route_leads(node: Node, pods: tuple[LabPod, LabPod]) -> None:
    """As in enforce."""
    first, _ = pods
    start(node, pods, container(http_get("/a")), container(http_get("/b")))
    wait_until(node, pods, "Strict")
    expected = {"first": "confirmed", "twin": "unreachable"}
    node.operator.wait_for("path tests", functools.partial(has_paths, expected))
    wait_until(node, pods, "Strict", "proxies other connections to pod demo/first")
    for address in families(first):
        assert exchange(node, address, sent("/c", address)) == [f"first /c from {address} ."]


def test_other_requests_are_reset_and_counted_where_no_route_leads(
    node: Node, pods: tuple[LabPod, LabPod]
) -> None:
    first, _ = pods
    with links.blocked(first):
        start(node, pods, container(http_get("/a")), container(http_get("/b")), mode="enforce")
        wait_until(node, pods, "Enforced", "so the relay proxies the kubelet's connections")
        wait_until(node, pods, "Enforced", "resets other connections")
        for address in families(first):
            assert exchange(node, address, sent("/b", address)) == [f"twin /b from {address} ."]
            assert exchange(node, address, sent("/c", address)) == ["closed"]
        node.operator.wait_for("the count", functools.partial(has_ambiguous, 2))


def has_ambiguous(count: int, report: AgentReport) -> bool:
    return all(
        (pod := pod_of(report, name)) is not None
        and sum(port.outcomes.get("ambiguous", 0) for port in pod.relayed) == count
        for name in ("first", "twin")
    )


@pytest.mark.parametrize(
    "probe", [http_get("/a"), {"tcpSocket": {"port": PORT}}], ids=["same request", "tcp"]
)
def test_what_cannot_be_distinguished_stays_enforced(
    node: Node, pods: tuple[LabPod, LabPod], probe: dict[str, Any]
) -> None:
    first, _ = pods
    start(node, pods, container(http_get("/a")), container(probe))
    wait_until(node, pods, "Enforced", "ambiguous: 8080")
    for address in families(first):
        host_sent = [f"first /a from {peer} ." for peer in host_addresses(node, first)]
        assert exchange(node, address, sent("/a", address))[0] in host_sent


def host_addresses(node: Node, pod: LabPod) -> list[str]:
    """From which the host connects to the pod."""
    found = []
    for address in families(pod):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            found.append(sock.getsockname()[0])
    return found
