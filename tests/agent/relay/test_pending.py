"""Accepted connections that may bring a probe, between real sockets on the loopback."""

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.relay import pending
from agent.relay.answers import TargetAnswers
from agent.relay.epoll import EpollPoller
from agent.relay.messages import (
    Answer,
    GrpcRequest,
    HttpRequest,
    Outcome,
    RelayTargetSpec,
    TcpConnect,
    Verdict,
)
from agent.relay.outcomes import AnswerCounter
from agent.relay.pending import PendingRequest, PendingRequests
from agent.relay.targets import RelayTarget
from probes.netns import BareSocket, NetnsGoneError
from tests.agent.relay.recordings import GRPC, HTTP

_HTTP_PORT, _GRPC_PORT, _TCP_PORT = 80, 90, 70
_ENDS_NS = 1000
_HTTP_ID, _GRPC_ID, _TCP_ID = 1, 2, 3
_LIMIT_ROUNDS = 1000
_SERVING, _NOT_SERVING = b"\0\0\0\0\2\x08\1", b"\0\0\0\0\2\x08\2"
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Port:
    """Connections to a target's ports with answers, with a clock of the test's own."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.poller = stack.enter_context(contextlib.closing(EpollPoller()))
        self.counter = AnswerCounter()
        self.seconds = 100.0
        self.boottime_ns = 0
        self.proxied: list[tuple[bytes, BareSocket]] = []
        self.failed: list[Outcome] = []
        self.accepted = socket.socket
        """The class of accepted sockets."""
        self.pod: socket.socket | None = None
        """The pod's end of the last connection, if the pod was dialled before."""
        answers = (
            Answer(_HTTP_ID, _HTTP_PORT, HttpRequest(HTTP), needs_pod=False),
            Answer(_GRPC_ID, _GRPC_PORT, GrpcRequest("db"), needs_pod=False),
            Answer(_TCP_ID, _TCP_PORT, TcpConnect()),
        )
        spec = RelayTargetSpec("key", "", 1, 1, "198.18.1.1", (), (), answers=answers)
        self.target = RelayTarget(spec, ipaddress.ip_address("198.18.64.16"))
        self.requests = PendingRequests(
            self.poller,
            self.counter,
            on_proxied=self._on_proxied,
            on_failed=lambda _, outcome: self.failed.append(outcome),
            now=lambda: self.seconds,
            now_ns=lambda: self.boottime_ns,
        )
        stack.callback(self.requests.abandon, self.target)

    def _on_proxied(self, request: PendingRequest, pod: BareSocket) -> None:
        assert not self.poller.is_registered(request.kubelet.fileno())
        assert not self.poller.is_registered(pod.fileno())
        self.proxied.append((request.reader.received, pod))
        self._stack.callback(pod.close)
        self._stack.callback(request.kubelet.close)

    def set_verdict(self, answer: int, *, is_healthy: bool, ends_ns: int | None = _ENDS_NS) -> None:
        self.target.answers.set_verdict(Verdict("key", answer, is_healthy, "a reason", ends_ns))

    def connect(
        self, port: int, *, dialled: bool = False, received: bytes | None = None
    ) -> socket.socket:
        """The kubelet's end. dialled: the pod has accepted before."""
        kubelet, ours = self.pair()
        self.pod, pod = self.pair() if dialled else (None, None)
        ours = self.accepted(fileno=ours.detach())
        self._stack.callback(ours.close)
        ours.setblocking(False)
        self.requests.add(
            ours,
            pod,
            target=self.target,
            port=port,
            answers=self.target.answers.by_port[port],
            open_seconds=0.0,
            received=received,
        )
        kubelet.settimeout(0)
        return kubelet

    def pair(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = self._stack.enter_context(socket.create_connection(listener.getsockname()))
            return client, self._stack.enter_context(listener.accept()[0])

    def turn(self, until: Callable[[], bool]) -> None:
        for _ in range(_LIMIT_ROUNDS):
            if until():
                return
            self.poller.poll(0.03)
        raise AssertionError("the condition never became true")

    def read(self, sock: socket.socket, expected: Callable[[bytes], bool]) -> bytes:
        """What the kubelet receives, until it is as expected."""
        got = bytearray()

        def receive() -> bool:
            with contextlib.suppress(BlockingIOError):
                got.extend(sock.recv(1 << 16))
            return expected(bytes(got))

        self.turn(receive)
        return bytes(got)

    def read_all(self, sock: socket.socket) -> bytes:
        """Until the relay closes the connection."""
        self.turn(lambda: not len(self.requests))
        sock.settimeout(30)
        got = b""
        while data := sock.recv(1 << 16):
            got += data
        return got

    def counts(self) -> dict[str, int]:
        return {sample.outcome: sample.count for sample in self.counter.drain()}


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.ExitStack() as stack:
        yield Port(stack)


def _dial_to(
    monkeypatch: pytest.MonkeyPatch, result: Callable[[], tuple[socket.socket, int]]
) -> None:
    monkeypatch.setattr(pending, "dial", lambda target, port: result())


@pytest.mark.parametrize(("is_healthy", "status"), [(True, b"200 OK"), (False, b"503 Service")])
def test_http_probe_is_answered_and_closed(port: Port, is_healthy: bool, status: bytes) -> None:
    port.set_verdict(_HTTP_ID, is_healthy=is_healthy)
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(HTTP)
    answer = port.read_all(kubelet)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.endswith(b"\r\n\r\na reason")
    assert port.counts() == {"healthy" if is_healthy else "unhealthy": 1}
    assert not port.proxied


@pytest.mark.parametrize("number", [_HTTP_PORT, _GRPC_PORT])
def test_probe_in_pieces_gets_no_more_than_its_answer(port: Port, number: int) -> None:
    port.set_verdict(_HTTP_ID, is_healthy=True)
    port.set_verdict(_GRPC_ID, is_healthy=True)
    kubelet = port.connect(number)
    got = b""
    pieces = [HTTP[:20], HTTP[20:]]
    if number == _GRPC_PORT:
        preface, request = GRPC["db"]
        kubelet.send(preface)
        got = port.read(kubelet, lambda got: len(got) >= 9)
        pieces = [request[:20], request[20:]]
    (pending_request,) = port.requests._pending
    for piece in pieces:
        kubelet.send(piece)
        before = len(pending_request.reader.received)
        port.turn(lambda before=before: len(pending_request.reader.received) > before)  # type: ignore[misc]
    kubelet.shutdown(socket.SHUT_WR)
    got += port.read_all(kubelet)
    if number == _GRPC_PORT:
        assert got.count(_SETTINGS) == 1
        assert got.startswith(_SETTINGS)
    else:
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("is_healthy", "message"), [(True, _SERVING), (False, _NOT_SERVING)])
def test_grpc_probe_is_answered_and_then_read_until_the_kubelet_closes(
    port: Port, is_healthy: bool, message: bytes
) -> None:
    """grpc-go sends more before it closes: a reset could fail the probe."""
    port.set_verdict(_GRPC_ID, is_healthy=is_healthy)
    kubelet = port.connect(_GRPC_PORT)
    preface, request = GRPC["db"]
    kubelet.send(preface)
    assert port.read(kubelet, lambda got: len(got) >= 9) == _SETTINGS
    kubelet.send(request)
    port.read(kubelet, lambda got: message in got and got.endswith(b"grpc-status\x010"))
    assert len(port.requests) == 1
    kubelet.send(bytes(64))
    kubelet.shutdown(socket.SHUT_WR)
    assert port.read_all(kubelet) == b""
    assert port.counts() == {"healthy" if is_healthy else "unhealthy": 1}


class _Unwritable(socket.socket):
    def send(self, *_: object) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize(
    ("number", "sent"), [(_HTTP_PORT, HTTP), (_GRPC_PORT, GRPC["db"][0])], ids=["http", "grpc"]
)
def test_connection_that_takes_no_answer_is_closed(port: Port, number: int, sent: bytes) -> None:
    port.accepted = _Unwritable
    port.set_verdict(_HTTP_ID, is_healthy=True)
    kubelet = port.connect(number, dialled=True)
    kubelet.send(sent)
    assert port.read_all(kubelet) == b""
    assert port.pod is not None
    port.pod.settimeout(30)
    assert port.pod.recv(1) == b""
    assert not port.failed


def test_answered_connection_that_stays_open_is_closed(port: Port) -> None:
    port.set_verdict(_GRPC_ID, is_healthy=True)
    kubelet = port.connect(_GRPC_PORT)
    for data in GRPC["db"]:
        kubelet.send(data)
        port.read(kubelet, lambda got: len(got) >= 9)
    port.seconds += 4.9
    port.requests.expire()
    assert len(port.requests) == 1
    port.seconds += 0.2
    port.requests.expire()
    assert len(port.requests) == 0


def test_accepted_tcp_probe_ends_when_the_kubelet_closes(port: Port) -> None:
    port.set_verdict(_TCP_ID, is_healthy=True)
    kubelet = port.connect(_TCP_PORT)
    kubelet.close()
    port.turn(lambda: not len(port.requests))
    assert not port.proxied


@pytest.mark.parametrize("number", [_HTTP_PORT, _GRPC_PORT])
def test_answered_probe_closes_the_connection_to_the_pod(port: Port, number: int) -> None:
    port.set_verdict(_HTTP_ID, is_healthy=True)
    port.set_verdict(_GRPC_ID, is_healthy=True)
    kubelet = port.connect(number, dialled=True)
    for data in GRPC["db"] if number == _GRPC_PORT else [HTTP]:
        kubelet.send(data)
        port.read(kubelet, lambda got: len(got) >= 9)
    assert port.pod is not None
    port.pod.settimeout(30)
    assert port.pod.recv(1) == b""
    kubelet.close()
    port.turn(lambda: not len(port.requests))
    assert not port.proxied


def test_request_that_was_read_before_is_answered_or_proxied_at_once(port: Port) -> None:
    """The connection was to a port of several pods."""
    port.set_verdict(_HTTP_ID, is_healthy=True)
    assert port.read_all(port.connect(_HTTP_PORT, received=HTTP)).startswith(b"HTTP/1.1 200")
    for received in (b"POST ", b""):
        port.connect(_HTTP_PORT, dialled=True, received=received)
    assert [sent for sent, _ in port.proxied] == [b"POST ", b""]
    assert port.counts() == {"healthy": 1, "not_probe": 2}
    port.connect(_HTTP_PORT, dialled=True, received=HTTP[:20])
    assert len(port.requests) == 1
    port.requests.abandon(port.target)


@pytest.mark.parametrize("number", [_HTTP_PORT, _GRPC_PORT, _TCP_PORT])
def test_other_request_goes_to_the_pod_that_was_dialled(port: Port, number: int) -> None:
    kubelet = port.connect(number, dialled=True)
    kubelet.send(b"POST /drain HTTP/1.1\r\n\r\n")
    port.turn(lambda: bool(port.proxied))
    assert port.proxied[0][0] == b"POST /drain HTTP/1.1\r\n\r\n"
    assert len(port.requests) == 0
    assert port.counts() == {"not_probe": 1}


def test_end_before_a_request_is_proxied_as_well(port: Port) -> None:
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    kubelet.send(HTTP[:20])
    kubelet.shutdown(socket.SHUT_WR)
    port.turn(lambda: bool(port.proxied))
    assert port.proxied[0][0] == HTTP[:20]


def test_request_that_takes_too_long_is_proxied_with_what_came(port: Port) -> None:
    port.set_verdict(_HTTP_ID, is_healthy=True)
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    kubelet.send(HTTP[:20])
    # Until it is read; nothing shows that from outside.
    port.turn(lambda: any(each.reader.received for each in port.requests._pending))
    port.seconds += 4.9
    port.requests.expire()
    assert not port.proxied
    port.seconds += 0.2
    port.requests.expire()
    assert port.proxied[0][0] == HTTP[:20]
    assert port.counts() == {"not_probe": 1}


@pytest.mark.parametrize(("ends_ns", "outcome"), [(_ENDS_NS, "stale"), (None, "no_verdict")])
def test_probe_without_a_fresh_verdict_at_its_arrival_is_proxied(
    port: Port, ends_ns: int | None, outcome: str
) -> None:
    """The verdict may have been fresh when the connection was accepted."""
    port.set_verdict(_HTTP_ID, is_healthy=True)
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    port.set_verdict(_HTTP_ID, is_healthy=True, ends_ns=ends_ns)
    port.boottime_ns = _ENDS_NS
    kubelet.send(HTTP)
    port.turn(lambda: bool(port.proxied))
    assert port.proxied[0][0] == HTTP
    assert port.counts() == {outcome: 1}


def test_last_nanosecond_of_a_verdict_counts(port: Port) -> None:
    port.set_verdict(_HTTP_ID, is_healthy=True)
    port.boottime_ns = _ENDS_NS - 1
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(HTTP)
    assert port.read_all(kubelet).startswith(b"HTTP/1.1 200")


def test_removed_answer_ends_the_verdict_for_pending_requests_too(port: Port) -> None:
    """Another container in the same pod, with the same probe, is another answer."""
    port.set_verdict(_HTTP_ID, is_healthy=True)
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    renewed = Answer(_HTTP_ID + 10, _HTTP_PORT, HttpRequest(HTTP), needs_pod=False)
    port.target.answers.set_answers((renewed,))
    kubelet.send(HTTP)
    port.turn(lambda: bool(port.proxied))
    assert port.counts() == {"no_verdict": 1}


def test_same_answer_keeps_its_verdict() -> None:
    answers = TargetAnswers()
    answer = Answer(_HTTP_ID, _HTTP_PORT, HttpRequest(HTTP))
    answers.set_answers((answer,))
    answers.set_verdict(Verdict("key", _HTTP_ID, True, "", _ENDS_NS))
    answers.set_answers((answer, Answer(_GRPC_ID, _HTTP_PORT, GrpcRequest(""))))
    assert answers.by_port[_HTTP_PORT].missing(0) == ["no_verdict"]
    assert answers.by_port[_HTTP_PORT].http[HTTP].outcome(0) == "healthy"
    answers.set_answers((Answer(_HTTP_ID, _HTTP_PORT, HttpRequest(b"other")),))
    assert answers.by_port[_HTTP_PORT].missing(0) == ["no_verdict"]


def test_tcp_answer_beside_another_is_none() -> None:
    """It has no bytes to recognise it by."""
    answers = TargetAnswers()
    request = Answer(_HTTP_ID, _HTTP_PORT, HttpRequest(HTTP))
    answers.set_answers((request, Answer(_TCP_ID, _HTTP_PORT, TcpConnect())))
    assert answers.by_port[_HTTP_PORT].tcp is None


def test_reset_by_the_kubelet_frees_both_sockets(port: Port) -> None:
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    kubelet.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    kubelet.close()
    port.turn(lambda: not len(port.requests))
    assert not port.proxied
    assert not port.failed


@pytest.mark.parametrize("is_immediate", [True, False])
def test_other_request_dials_a_pod_that_was_not_dialled(
    port: Port, monkeypatch: pytest.MonkeyPatch, is_immediate: bool
) -> None:
    _, pod = port.pair()
    _dial_to(monkeypatch, lambda: (pod, 0 if is_immediate else errno.EALREADY))
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(b"GET /hook HTTP/1.1\r\n\r\n")
    port.turn(lambda: bool(port.proxied))
    assert port.proxied == [(b"GET /hook HTTP/1.1\r\n\r\n", pod)]


def test_other_request_to_a_closed_port_is_reset(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pod = port.pair()
    _dial_to(monkeypatch, lambda: (pod, errno.ECONNREFUSED))
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(b"GET /hook HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        port.read(kubelet, lambda got: False)
    assert port.failed == ["refused"]
    assert len(port.requests) == 0


def test_other_request_to_a_port_that_refuses_later_is_reset(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    pod = socket.socket()
    pod.setblocking(False)
    pod.connect_ex(closed)
    _dial_to(monkeypatch, lambda: (pod, errno.EALREADY))
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(b"GET /hook HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        port.read(kubelet, lambda got: False)
    assert port.failed == ["refused"]
    assert pod.fileno() == -1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NetnsGoneError("/run/netns/web"), "sandbox_gone"),
        (OSError(errno.EMFILE, "Too many open files"), "failed"),
    ],
    ids=["sandbox", "descriptors"],
)
def test_other_request_to_a_pod_that_cannot_be_dialled_is_reset(
    port: Port, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    def fail() -> tuple[socket.socket, int]:
        raise error

    _dial_to(monkeypatch, fail)
    kubelet = port.connect(_HTTP_PORT)
    kubelet.send(b"GET /hook HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        port.read(kubelet, lambda got: False)
    assert port.failed == [outcome]
    assert len(port.requests) == 0


def test_other_request_to_a_silent_pod_is_reset_after_a_limit(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as full, socket.socket() as filler, socket.socket() as pod:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # accepts one connection
        filler.connect(full.getsockname())
        pod.setblocking(False)
        assert pod.connect_ex(full.getsockname()) == errno.EINPROGRESS
        _dial_to(monkeypatch, lambda: (pod, errno.EALREADY))
        kubelet = port.connect(_HTTP_PORT)
        kubelet.send(b"GET /hook HTTP/1.1\r\n\r\n")
        port.turn(lambda: port.counts() == {"not_probe": 1})
        port.seconds += 9.9
        port.requests.expire()
        assert not port.failed
        port.seconds += 0.2
        port.requests.expire()
    with pytest.raises(ConnectionResetError):
        port.read(kubelet, lambda got: False)
    assert port.failed == ["timeout"]


def test_connections_of_a_removed_target_are_reset(port: Port) -> None:
    kubelet = port.connect(_HTTP_PORT, dialled=True)
    (pending_request,) = port.requests._pending
    descriptor = pending_request.kubelet.fileno()
    assert port.poller.is_registered(descriptor)
    spec = RelayTargetSpec("other", "", 1, 1, "198.18.1.2", (), ())
    port.requests.abandon(RelayTarget(spec, ipaddress.ip_address("198.18.64.17")))
    assert len(port.requests) == 1
    port.requests.abandon(port.target)
    with pytest.raises(ConnectionResetError):
        port.read(kubelet, lambda got: False)
    assert port.failed == ["sandbox_gone"]
    assert not port.poller.is_registered(descriptor)
    assert port.pod is not None
    port.pod.settimeout(30)
    assert port.pod.recv(1) == b""
