"""A real relay answers the kubelet's probes with verdicts, and proxies everything else.

The test connects as the kubelet would after the redirect: to the relay's address of the pod.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from agent.lab.lab import LabPod
from agent.relay.messages import Answer, GrpcRequest, HttpRequest, SharedRequest, TcpConnect
from bpf import loader, pins
from probes.clock import boot_clock_ns
from tests import polling
from tests.agent.relay.recordings import GRPC, HTTP
from tests.agent.relay.test_probe_requests import LOOKALIKES
from tests.conftest import fresh_lab
from tests.kernel.relayprocess import RelayProcess, relay_process

pytestmark = pytest.mark.kernel

ALONE, SHARED, GRPC_PORT, TCP = 8080, 8081, 9090, 7070
IDS = {ALONE: 1, SHARED: 2, GRPC_PORT: 3, TCP: 4}
ANSWERS = (
    Answer(IDS[ALONE], ALONE, HttpRequest(HTTP), needs_pod=False),
    Answer(IDS[SHARED], SHARED, HttpRequest(HTTP)),
    Answer(IDS[GRPC_PORT], GRPC_PORT, GrpcRequest("db"), needs_pod=False),
    Answer(IDS[TCP], TCP, TcpConnect()),
)
HOUR_NS = 3600 * 10**9
LIMIT_SECONDS = polling.PATIENCE_SECONDS
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SERVING, NOT_SERVING = b"\0\0\0\0\2\x08\1", b"\0\0\0\0\2\x08\2"


class Server:
    """A port of the pod that records what it receives, and responds once its client has closed."""

    def __init__(self, pod: LabPod, port: int) -> None:
        self._listener = pod.listen(port)
        self._listener.settimeout(None)
        self.received: list[bytes] = []
        """By connection that its client has closed."""
        self.latest = b""
        """What the open connection has brought so far."""
        self._thread = threading.Thread(target=self._serve, name=f"server {port}")
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(LIMIT_SECONDS)
                with connection, contextlib.suppress(OSError):
                    self.latest = b""
                    while data := connection.recv(1 << 16):
                        self.latest += data
                    self.received.append(self.latest)
                    connection.sendall(b"from the pod")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def relay(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[RelayProcess]:
    with fresh_lab() as lab, relay_process(installation, lab.add_pod("web", 1)) as made:
        yield made


@pytest.fixture(autouse=True)
def _answers_without_verdicts(relay: RelayProcess) -> None:
    relay.set_answers()
    relay.set_answers(*ANSWERS)


@contextlib.contextmanager
def serving(relay: RelayProcess, port: int) -> Iterator[Server]:
    server = Server(relay.pod, port)
    try:
        yield server
    finally:
        server.close()


def set_verdicts(relay: RelayProcess, *, is_healthy: bool = True) -> None:
    for answer in IDS.values():
        relay.set_verdict(answer, is_healthy=is_healthy, ends_ns=boot_clock_ns() + HOUR_NS)


def connect(relay: RelayProcess, port: int, *, version: int = 4) -> socket.socket:
    host = relay.ipv4 if version == 4 else relay.ipv6
    return socket.create_connection((host, port), LIMIT_SECONDS)


def read_all(sock: socket.socket) -> bytes:
    got = b""
    while data := sock.recv(1 << 16):
        got += data
    return got


def exchange(relay: RelayProcess, port: int, *pieces: bytes, version: int = 4) -> bytes:
    """Send in segments of their own, then half-close; all that comes back."""
    with connect(relay, port, version=version) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # answered and closed before the last piece
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def is_reset(relay: RelayProcess, port: int, request: bytes, *, version: int) -> bool:
    with connect(relay, port, version=version) as sock:
        sock.sendall(request)
        try:
            read_all(sock)
        except ConnectionResetError:
            return True
        return False


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(("is_healthy", "status"), [(True, b"200 OK"), (False, b"503 ")])
def test_http_probe_is_answered_without_the_pod(
    relay: RelayProcess, version: int, is_healthy: bool, status: bytes
) -> None:
    """Nothing listens in the pod: podgate may check another port or address of it."""
    set_verdicts(relay, is_healthy=is_healthy)
    answer = exchange(relay, ALONE, HTTP, version=version)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.endswith(b"\r\n\r\na reason")


@pytest.mark.parametrize("version", [4, 6])
def test_verdict_answers_no_probe_of_another_pod_with_the_same_address(
    relay: RelayProcess, version: int
) -> None:
    other = HTTP.replace(b"GET /", b"GET /other", 1)
    shared = (SharedRequest(ALONE, HTTP, ""), SharedRequest(ALONE, other, "another pod"))
    relay.set_answers(*ANSWERS, shared=shared)
    set_verdicts(relay)
    assert exchange(relay, ALONE, HTTP, version=version).startswith(b"HTTP/1.1 200 OK")
    assert is_reset(relay, ALONE, other, version=version)
    # Nor does this pod get it, if it belongs to neither.
    with serving(relay, ALONE) as server:
        neither = other.replace(b"/other", b"/neither")
        assert is_reset(relay, ALONE, neither, version=version)
        assert server.received == []


def test_answered_probe_of_a_port_that_needs_the_pod_sends_it_no_byte(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with serving(relay, SHARED) as server:
        assert exchange(relay, SHARED, HTTP).startswith(b"HTTP/1.1 200")
        polling.wait_until("the pod's server has seen an end", lambda: server.received)
        assert server.received == [b""]


@pytest.mark.parametrize("port", [ALONE, SHARED])
@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_resembles_a_probe_reaches_the_pod_byte_for_byte(
    relay: RelayProcess, name: str, port: int
) -> None:
    set_verdicts(relay)
    with serving(relay, port) as server:
        assert exchange(relay, port, LOOKALIKES[name]) == b"from the pod"
        assert server.received == [LOOKALIKES[name]]


def test_request_in_segments_of_one_byte_is_recognised_and_others_arrive_whole(
    relay: RelayProcess,
) -> None:
    set_verdicts(relay)
    pieces = [HTTP[at : at + 1] for at in range(len(HTTP))]
    assert exchange(relay, ALONE, *pieces).startswith(b"HTTP/1.1 200")
    hook = HTTP.replace(b"kube-probe", b"kube-lifecycle")
    with serving(relay, ALONE) as server:
        pieces = [hook[at : at + 1] for at in range(len(hook))]
        assert exchange(relay, ALONE, *pieces) == b"from the pod"
        assert server.received == [hook]


def test_half_of_a_probe_reaches_the_pod_when_the_rest_does_not_come(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with serving(relay, SHARED) as server, connect(relay, SHARED) as sock:
        sock.sendall(HTTP[:30])
        polling.wait_until("the relay has stopped waiting", lambda: server.latest)
        sock.sendall(b" and the rest")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b"from the pod"
        assert server.received == [HTTP[:30] + b" and the rest"]


def test_closed_port_that_needs_the_pod_refuses_as_the_pod_does(relay: RelayProcess) -> None:
    """A hook of that port gets the error that it would get without a relay."""
    set_verdicts(relay)
    with pytest.raises(ConnectionRefusedError):
        connect(relay, SHARED)


def test_silent_port_that_needs_the_pod_stays_silent(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with relay.pod.listen(SHARED) as full, contextlib.ExitStack() as stack:
        full.listen(0)
        filler = stack.enter_context(relay.pod.open_socket(socket.AF_INET, socket.SOCK_STREAM))
        filler.connect((relay.pod.ipv4, SHARED))
        with pytest.raises(TimeoutError):
            socket.create_connection((relay.ipv4, SHARED), 0.5)


def test_other_request_to_a_closed_port_of_probes_alone_is_reset(relay: RelayProcess) -> None:
    """The connection was accepted for a probe, so it can only be reset."""
    set_verdicts(relay)
    with connect(relay, ALONE) as sock:
        sock.sendall(b"GET /hook HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.parametrize("port", [ALONE, SHARED, TCP])
def test_without_a_verdict_a_closed_port_refuses(relay: RelayProcess, port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        connect(relay, port)


def test_probe_is_proxied_without_a_verdict_after_its_end_and_after_its_withdrawal(
    relay: RelayProcess,
) -> None:
    port = SHARED
    relay.counts()
    with serving(relay, port) as server:
        assert exchange(relay, port, HTTP) == b"from the pod"
        relay.set_verdict(IDS[port], is_healthy=True, ends_ns=boot_clock_ns())
        assert exchange(relay, port, HTTP) == b"from the pod"
        relay.set_verdict(IDS[port], is_healthy=True, ends_ns=boot_clock_ns() + HOUR_NS)
        assert exchange(relay, port, HTTP).startswith(b"HTTP/1.1 200")
        relay.set_verdict(IDS[port], is_healthy=True, ends_ns=None)
        assert exchange(relay, port, HTTP) == b"from the pod"
        proxied = [received for received in server.received if received]
        assert proxied == [HTTP, HTTP, HTTP]
    assert relay.counts() == {
        ("no_verdict", port): 2,
        ("stale", port): 1,
        ("healthy", port): 1,
    }


def test_verdict_that_ends_while_the_relay_is_frozen_answers_nothing(relay: RelayProcess) -> None:
    """The probe was sent before the verdict's end, and is read after it."""
    with serving(relay, SHARED) as server:
        ends_ns = boot_clock_ns() + 10**9
        relay.set_verdict(IDS[SHARED], is_healthy=True, ends_ns=ends_ns)
        sock = connect(relay, SHARED)
        relay.process.send_signal(signal.SIGSTOP)
        try:
            sock.sendall(HTTP)
            sock.shutdown(socket.SHUT_WR)
            polling.wait_until("the verdict has ended", lambda: boot_clock_ns() > ends_ns)
        finally:
            relay.process.send_signal(signal.SIGCONT)
        with sock:
            assert read_all(sock) == b"from the pod"
        assert server.received == [HTTP]


def test_tcp_probe_is_accepted_by_a_healthy_verdict_without_the_pod(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with serving(relay, TCP) as server:
        connect(relay, TCP).close()
        # Once this is answered, the pod would have got the other connection.
        assert exchange(relay, ALONE, HTTP).startswith(b"HTTP/1.1 200")
        assert server.received == []


def test_tcp_probe_is_rejected_by_an_unhealthy_verdict_though_the_port_is_open(
    relay: RelayProcess,
) -> None:
    set_verdicts(relay, is_healthy=False)
    with serving(relay, TCP), pytest.raises(ConnectionRefusedError):
        connect(relay, TCP)


def test_data_on_a_port_of_a_tcp_probe_goes_to_the_pod(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with serving(relay, TCP) as server:
        assert exchange(relay, TCP, b"hello") == b"from the pod"
        assert server.received == [b"hello"]


@pytest.mark.parametrize(("is_healthy", "message"), [(True, SERVING), (False, NOT_SERVING)])
def test_grpc_probe_is_answered_without_the_pod(
    relay: RelayProcess, is_healthy: bool, message: bytes
) -> None:
    set_verdicts(relay, is_healthy=is_healthy)
    preface, request = GRPC["db"]
    with connect(relay, GRPC_PORT) as sock:
        sock.sendall(preface)
        got = read_until(sock, SETTINGS)
        sock.sendall(request)
        got += read_until(sock, b"grpc-status\x010")
        assert got.startswith(SETTINGS)
        assert message in got


def test_grpc_probe_of_another_service_is_answered_by_the_pod_s_server(
    relay: RelayProcess,
) -> None:
    """It has received the relay's settings first; the pod's server knows nothing of these."""
    set_verdicts(relay, is_healthy=False)
    preface, request = GRPC[""]
    with grpc_server(relay), connect(relay, GRPC_PORT) as sock:
        sock.sendall(preface)
        assert read_until(sock, SETTINGS).startswith(SETTINGS)
        sock.sendall(request)
        assert SERVING in read_until(sock, b"grpc-status")


def test_grpc_client_of_another_kind_is_proxied_to_the_pod(relay: RelayProcess) -> None:
    set_verdicts(relay, is_healthy=False)
    options = (("grpc.primary_user_agent", "kube-probe/1.36"),)
    target = f"{relay.ipv4}:{GRPC_PORT}"
    with grpc_server(relay), grpc.insecure_channel(target, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="db")
        response = stub.Check(request, timeout=LIMIT_SECONDS, wait_for_ready=True)
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def read_until(sock: socket.socket, end: bytes) -> bytes:
    got = b""
    while end not in got:
        data = sock.recv(1 << 16)
        assert data, f"closed after {got!r}"
        got += data
    return got


@contextlib.contextmanager
def grpc_server(relay: RelayProcess) -> Iterator[None]:
    """A real server's Health service, behind a port of the pod: it cannot listen there itself."""
    serve = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("db", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, serve)
    number = serve.add_insecure_port("127.0.0.1:0")
    serve.start()
    with relay.pod.listen(GRPC_PORT) as listener:
        listener.settimeout(None)
        pipe = threading.Thread(target=_pipe, args=(listener, number), name="pipe")
        pipe.start()
        try:
            yield
        finally:
            serve.stop(None).wait()
            listener.shutdown(socket.SHUT_RDWR)
            pipe.join()


def _pipe(listener: socket.socket, port: int) -> None:
    """Connect each client of a listener with a port of the loopback."""
    threads = []
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        while True:
            client = stack.enter_context(listener.accept()[0])
            client.settimeout(None)
            server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for source, sink in ((client, server), (server, client)):
                threads.append(threading.Thread(target=_copy, args=(source, sink)))
                threads[-1].start()
    for thread in threads:
        thread.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def test_target_that_goes_resets_pending_requests(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with serving(relay, SHARED), connect(relay, SHARED) as sock:
        relay.remove_targets()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        with pytest.raises(ConnectionRefusedError):
            connect(relay, ALONE)


def test_probe_is_answered_beside_many_unfinished_requests(relay: RelayProcess) -> None:
    set_verdicts(relay)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            sock = stack.enter_context(connect(relay, ALONE))
            sock.sendall(HTTP[:-1])
        assert exchange(relay, ALONE, HTTP).startswith(b"HTTP/1.1 200")
