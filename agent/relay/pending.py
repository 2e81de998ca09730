"""Connections to ports with answers: each is answered or proxied, by the first bytes it sends."""

import errno
import socket
import time
from collections.abc import Callable

from agent.relay.answers import AnsweredProbe, PortAnswers
from agent.relay.dialling import dial
from agent.relay.epoll import READABLE, WRITABLE, EpollPoller
from agent.relay.messages import Outcome
from agent.relay.outcomes import AnswerCounter
from agent.relay.probe_requests import SETTINGS, RequestReader, grpc_response, http_response
from agent.relay.segments import RESET_ON_CLOSE
from agent.relay.targets import RelayTarget
from probes.clock import boot_clock_ns
from probes.netns import BareSocket, NetnsGoneError

# For the whole request. The kubelet sends it at once; what takes longer is proxied, such as a
# client of a protocol in which the server sends first.
_REQUEST_SECONDS = 5.0
# For a pod that is dialled after its connection was accepted, since it was no probe after all.
_DIAL_SECONDS = 10.0
# For the kubelet to close an answered connection.
_CLOSE_SECONDS = 5.0
_READ_BYTES = 16384


class PendingRequest:
    """A connection of the kubelet that may bring a probe to answer."""

    __slots__ = (
        "_owner",
        "answers",
        "deadline",
        "is_answered",
        "is_single",
        "kubelet",
        "open_seconds",
        "pod",
        "port",
        "reader",
        "target",
    )

    def __init__(
        self,
        owner: "PendingRequests",
        kubelet: BareSocket,
        pod: BareSocket | None,
        *,
        target: RelayTarget,
        port: int,
        answers: PortAnswers,
        open_seconds: float,
        deadline: float,
        is_single: bool,
    ) -> None:
        self._owner = owner
        self.is_single = is_single
        self.kubelet = kubelet
        self.pod = pod
        self.target = target
        self.port = port
        self.answers = answers
        self.open_seconds = open_seconds
        self.deadline = deadline
        self.reader = RequestReader(answers.http, answers.grpc)
        self.is_answered = False

    def on_event(self, events: int) -> None:
        """The kubelet's socket: readable, or reset."""
        try:
            data = self.kubelet.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._owner.drop(self)
            return
        if self.is_answered:
            if not data:
                self._owner.drop(self)
        elif data:
            self._owner.on_received(self, data)
        elif self.answers.tcp:
            self._owner.drop(self)
        else:
            self._owner.proxy(self)


class _LateDial:
    """The connect to a pod for an accepted connection. Handles the pod's socket."""

    __slots__ = ("_owner", "_pending")

    def __init__(self, owner: "PendingRequests", pending: PendingRequest) -> None:
        self._owner = owner
        self._pending = pending

    def on_event(self, events: int) -> None:
        self._owner.on_dialled(self._pending)


class PendingRequests:
    """All connections that are neither answered nor proxied yet, and those that were answered until
    the kubelet closes them."""

    def __init__(
        self,
        poller: EpollPoller,
        counter: AnswerCounter,
        *,
        on_proxied: Callable[[PendingRequest, BareSocket], None],
        on_failed: Callable[[PendingRequest, Outcome], None],
        now: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = boot_clock_ns,
    ) -> None:
        """on_proxied: owns both sockets, and sends what `reader` received; on_failed: the pod has
        not accepted, and the kubelet's connection was reset."""
        self._poller = poller
        self._counter = counter
        self._on_proxied = on_proxied
        self._on_failed = on_failed
        self._now = now
        self._now_ns = now_ns
        self._pending: set[PendingRequest] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self,
        kubelet: BareSocket,
        pod: BareSocket | None,
        *,
        target: RelayTarget,
        port: int,
        answers: PortAnswers,
        open_seconds: float,
        received: bytes | None = None,
        is_single: bool = False,
    ) -> None:
        """Own both sockets. pod: None if it is not dialled, unless this is no probe; received: by a
        caller that has waited for it; is_single: whether another request must not follow."""
        pending = PendingRequest(
            self,
            kubelet,
            pod,
            target=target,
            port=port,
            answers=answers,
            open_seconds=open_seconds,
            deadline=self._now() + _REQUEST_SECONDS,
            is_single=is_single,
        )
        self._pending.add(pending)
        self._poller.register(kubelet.fileno(), READABLE, pending)
        if received:
            self.on_received(pending, received)
        elif received is not None:
            self.proxy(pending)

    def expire(self) -> None:
        """Proxy what took too long to send a request; drop what took too long otherwise."""
        now = self._now()
        for pending in [each for each in self._pending if now > each.deadline]:
            if pending.is_answered:
                self.drop(pending)
            elif self._poller.is_registered(pending.kubelet.fileno()):
                self.proxy(pending)
            else:
                self._fail(pending, "timeout")

    def abandon(self, target: RelayTarget) -> None:
        """Reset all connections of a target."""
        for pending in [each for each in self._pending if each.target is target]:
            self._fail(pending, "sandbox_gone")

    def on_received(self, pending: PendingRequest, data: bytes) -> None:
        reader = pending.reader
        was_grpc = reader.is_grpc
        probe = reader.feed(data)
        if probe is not None:
            self._answer(pending, probe)
        elif reader.is_other:
            self.proxy(pending)
        elif reader.is_grpc and not was_grpc:
            self._send(pending, SETTINGS)

    def proxy(self, pending: PendingRequest) -> None:
        """It is no probe: connect it to the pod."""
        if pending.answers.probes:
            self._counter.add(pending.target.key, pending.port, "not_probe")
        self._connect(pending)

    def on_dialled(self, pending: PendingRequest) -> None:
        assert pending.pod is not None
        self._poller.unregister(pending.pod.fileno())
        self._settle(pending, pending.pod.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def drop(self, pending: PendingRequest) -> None:
        """Close both sockets."""
        self._forget(pending)
        pending.kubelet.close()
        if pending.pod is not None:
            pending.pod.close()

    def _answer(self, pending: PendingRequest, probe: AnsweredProbe) -> None:
        outcome = probe.outcome(self._now_ns())
        self._counter.add(pending.target.key, pending.port, outcome)
        if outcome not in ("healthy", "unhealthy"):
            self._connect(pending)
            return
        assert probe.verdict is not None
        is_healthy = probe.verdict.is_healthy
        if pending.reader.is_grpc:
            response = grpc_response(is_healthy=is_healthy)
        else:
            response = http_response(probe.verdict.reason, is_healthy=is_healthy)
        pending.is_answered = True
        if not self._send(pending, response):
            return
        if pending.pod is not None:
            pending.pod.close()
            pending.pod = None
        if pending.reader.is_grpc:
            # grpc-go sends more before it closes, and a reset would fail the probe.
            pending.deadline = self._now() + _CLOSE_SECONDS
        else:
            self.drop(pending)

    def _send(self, pending: PendingRequest, data: bytes) -> bool:
        """Nothing was sent before, so it fits into the socket's buffer."""
        try:
            pending.kubelet.send(data, socket.MSG_DONTWAIT)
        except OSError:
            self.drop(pending)
            return False
        return True

    def _connect(self, pending: PendingRequest) -> None:
        """The socket is not read any more: what the kubelet sends next waits in it."""
        self._poller.unregister(pending.kubelet.fileno())
        if pending.pod is not None:
            self._settle(pending, 0)
            return
        pending.deadline = self._now() + _DIAL_SECONDS
        try:
            pending.pod, result = dial(pending.target, pending.port)
        except NetnsGoneError:
            self._fail(pending, "sandbox_gone")
        except OSError:
            self._fail(pending, "failed")
        else:
            if result == errno.EALREADY:
                late = _LateDial(self, pending)
                self._poller.register(pending.pod.fileno(), WRITABLE, late)
            else:
                self._settle(pending, result)

    def _settle(self, pending: PendingRequest, error: int) -> None:
        if error == 0:
            assert pending.pod is not None
            self._pending.discard(pending)
            self._on_proxied(pending, pending.pod)
        else:
            self._fail(pending, "refused" if error == errno.ECONNREFUSED else "timeout")

    def _fail(self, pending: PendingRequest, outcome: Outcome) -> None:
        pending.kubelet.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.drop(pending)
        self._on_failed(pending, outcome)

    def _forget(self, pending: PendingRequest) -> None:
        self._pending.discard(pending)
        for sock in (pending.kubelet, pending.pod):
            if sock is not None and self._poller.is_registered(sock.fileno()):
                self._poller.unregister_closed(sock.fileno())
