"""Held SYNs: each is released, reset or dropped according to the pod's response.

A connect() of the kubelet must not complete before the pod's side has, or every tcp probe would
succeed. So its SYN is held while the relay connects to the pod from inside the pod's network
namespace. Then the SYN is injected towards the relay's own listener, answered with a reset, or
dropped if the pod did not respond.
"""

import errno
import socket
import time
from collections.abc import Callable, Container

from agent.relay.answers import NO_ANSWERS, PortAnswers
from agent.relay.choosing import Choice, Choosing, reset
from agent.relay.connection import Connection
from agent.relay.dialling import EXHAUSTED, dial
from agent.relay.epoll import WRITABLE, EpollPoller
from agent.relay.messages import Outcome
from agent.relay.outcomes import AnswerCounter, OutcomeCounter
from agent.relay.pending import PendingRequest, PendingRequests
from agent.relay.raw_sockets import PortListeners, SynInjector
from agent.relay.segments import RESET_ON_CLOSE, Flow, Syn
from agent.relay.targets import RelayTarget, Targets
from probes.clock import boot_clock_ns
from probes.netns import BareSocket, NetnsGoneError

# The kernel retransmits a SYN after 1 s (RFC 6298), and doubles the wait each time. A missing
# retransmission means that the kubelet has closed its socket.
_PATIENCE_SECONDS = 1.5
_PATIENCE_FACTOR = 2.5
# One warning per interval; the outcomes count all failures.
_WARN_INTERVAL_SECONDS = 10.0


class _HeldSyn:
    """One SYN of the kubelet, and the connect to the pod that decides about it."""

    __slots__ = (
        "_owner",
        "answers",
        "dial_seconds",
        "first_seen",
        "is_released",
        "last_seen",
        "pod",
        "syn",
        "target",
    )

    def __init__(
        self,
        owner: "HeldSyns",
        syn: Syn,
        target: RelayTarget,
        *,
        pod: BareSocket | None,
        answers: PortAnswers | None,
        now: float,
    ) -> None:
        """pod: None if it is not dialled; answers: None if there are none, or it is not known yet
        whose count."""
        self._owner = owner
        self.answers = answers
        self.syn = syn
        self.target = target
        self.pod = pod
        self.first_seen = self.last_seen = now
        self.dial_seconds = 0.0
        self.is_released = False

    @property
    def expires(self) -> float:
        waited = self.last_seen - self.first_seen
        return self.last_seen + max(_PATIENCE_SECONDS, _PATIENCE_FACTOR * waited)

    def on_event(self, events: int) -> None:
        self._owner.on_dialled(self)


class HeldSyns:
    """All held SYNs by flow. Owns the listeners and the connections accepted there."""

    def __init__(
        self,
        poller: EpollPoller,
        targets: Targets,
        outcomes: OutcomeCounter,
        answered: AnswerCounter,
        *,
        way: Container[bytes],
        maximum: int,
        on_full: Callable[[], None],
        on_exhausted: Callable[[], None],
        on_warning: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = boot_clock_ns,
    ) -> None:
        """way: packed addresses at which the agent tries the way to this relay; maximum: of held
        SYNs and connections together; on_full: the maximum is reached, and no more should arrive;
        on_exhausted: the process has no descriptor or memory left; on_warning: gets one sentence
        about a failure, at most once in 10 s.
        """
        self._on_warning = on_warning
        self._way = way
        self._maximum = maximum
        self._on_full = on_full
        self.connections: set[Connection] = set()
        self._poller = poller
        self._targets = targets
        self._outcomes = outcomes
        self._on_exhausted = on_exhausted
        self._now = now
        self._now_ns = now_ns
        self._answered = answered
        self._pending = PendingRequests(
            poller,
            answered,
            on_proxied=self._proxy,
            on_failed=self._on_late_failure,
            now=now,
            now_ns=now_ns,
        )
        self._choosing = Choosing(poller, on_request=self._choose, now=now)
        self._quiet_until = 0.0
        self._held: dict[Flow, _HeldSyn] = {}
        self._injector = SynInjector()
        self._listeners = PortListeners(poller, self)

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def open_count(self) -> int:
        """Number of accepted connections."""
        return len(self.connections) + len(self._pending) + len(self._choosing)

    @property
    def is_full(self) -> bool:
        """Whether the maximum of held SYNs and connections is reached."""
        return len(self._held) + self.open_count >= self._maximum

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a held SYN nor a connection."""
        return not self._held and not self.open_count

    def hold(self, syn: Syn) -> None:
        """Handle a SYN, new or retransmitted."""
        held = self._held.get(syn.flow)
        if held:
            if held.syn.sequence == syn.sequence:
                held.last_seen = self._now()
                if held.is_released:
                    self._release(held)
                return
            # The kubelet uses the same local port for another connection.
            self._drop(held, "timeout")
        target = self._targets.find(syn.local)
        if syn.local in self._way:
            self._send_reset(syn)
        elif target is None:
            self._reject(syn, "", "unknown_address")
        elif not target.admits(syn.port):
            self._reject(syn, target.key, "undeclared")
        elif target.shared_at(syn.port):
            self._accept(syn, target, None)
        elif answers := target.answers.by_port.get(syn.port):
            self._hold_for_answer(syn, target, answers)
        else:
            self._dial(syn, target)

    def on_dialled(self, held: _HeldSyn) -> None:
        """The connect to the pod has completed or failed."""
        assert held.pod is not None
        self._poller.unregister(held.pod.fileno())
        self._settle(held, held.pod.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def expire(self) -> None:
        """Drop SYNs that the kubelet no longer retransmits, and end what waits for too long."""
        now = self._now()
        for held in list(self._held.values()):
            if now > held.expires:
                self._drop(held, "timeout")
        self._pending.expire()
        self._choosing.expire()

    def abandon(self, target: RelayTarget) -> None:
        """The sandbox is gone: reject its held SYNs, reset its connections."""
        for held in [held for held in self._held.values() if held.target is target]:
            self._drop(held, None)
            self._reject(held.syn, target.key, "sandbox_gone")
        for connection in [each for each in self.connections if each.target is target]:
            connection.reset()
        self._pending.abandon(target)
        self._choosing.abandon(target)

    def _hold_for_answer(self, syn: Syn, target: RelayTarget, answers: PortAnswers) -> None:
        """The port has answers. Without all their verdicts, or if the kubelet connects to it for
        something else as well, the pod has to accept first."""
        if not target.netns.exists():
            # Not dialled, another pod with this address would get the verdict until the agent
            # replaces the target.
            self._reject(syn, target.key, "sandbox_gone")
            return
        now_ns = self._now_ns()
        missing = answers.missing(now_ns)
        if len(missing) == len(answers.probes):
            self._answered.add(target.key, syn.port, missing[0])
            self._dial(syn, target)
        elif answers.tcp:
            outcome = answers.tcp.outcome(now_ns)
            self._answered.add(target.key, syn.port, outcome)
            if outcome == "healthy":
                self._accept(syn, target, answers)
            else:
                self._send_reset(syn)
        elif answers.needs_pod or missing:
            self._dial(syn, target, answers)
        else:
            self._accept(syn, target, answers)

    def _accept(self, syn: Syn, target: RelayTarget, answers: PortAnswers | None) -> None:
        """Accept without the pod. answers: None for a shared port, whose pod is not known yet."""
        held = _HeldSyn(self, syn, target, pod=None, answers=answers, now=self._now())
        self._held[syn.flow] = held
        if self.is_full:
            self._on_full()
        self._release(held)

    def _dial(self, syn: Syn, target: RelayTarget, answers: PortAnswers | None = None) -> None:
        started = self._now()
        try:
            pod, result = dial(target, syn.port)
        except NetnsGoneError:
            self._reject(syn, target.key, "sandbox_gone")
            return
        except OSError as error:
            self._fail(target, syn.port, error)
            return
        held = _HeldSyn(self, syn, target, pod=pod, answers=answers, now=started)
        self._held[syn.flow] = held
        if self.is_full:
            self._on_full()
        if result == errno.EALREADY:
            self._poller.register(pod.fileno(), WRITABLE, held)
        else:
            self._settle(held, result)

    def _settle(self, held: _HeldSyn, error: int) -> None:
        held.dial_seconds = self._now() - held.first_seen
        if error == 0:
            self._release(held)
        elif error == errno.ECONNREFUSED:
            self._drop(held, None)
            self._reject(held.syn, held.target.key, "refused", held.dial_seconds)
        elif error in EXHAUSTED:
            self._drop(held, None)
            self._fail(held.target, held.syn.port, OSError(error, ""))
        else:
            # Unreachable or timed out: without a relay the kubelet gets no response either.
            self._drop(held, "timeout")

    def _release(self, held: _HeldSyn) -> None:
        """Inject the SYN; on an idle machine it is accepted before this returns."""
        try:
            listener = self._listeners.prepare(held.syn.port)
            held.is_released = True
            self._injector.reinject(held.syn)
        except OSError as error:
            self._drop(held, None)
            self._fail(held.target, held.syn.port, error)
            return
        listener.accept()

    def on_accepted(self, sock: BareSocket, flow: Flow) -> None:
        """A released SYN has become a connection: proxy it."""
        held = self._held.pop(flow, None)
        if held is None:  # it expired, or the sandbox is gone
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            sock.close()
            return
        seconds = self._now() - held.first_seen
        if held.answers is not None:
            self._pending.add(
                sock,
                held.pod,
                target=held.target,
                port=held.syn.port,
                answers=held.answers,
                open_seconds=seconds,
            )
        elif held.pod is not None:
            self._connect(sock, held.pod, held.target, held.syn.port, seconds)
        else:
            self._choosing.add(Choice(sock, held.target, held.syn.port, seconds))

    def _choose(self, choice: Choice) -> None:
        """Answer or proxy the first request to a shared port, for the pod that it belongs to."""
        shared = choice.claimant.shared_at(choice.port)
        key = shared.key_of(choice.port, choice.received) if shared else choice.claimant.key
        target = self._targets.get(key or (shared.otherwise if shared else ""))
        if target is None:
            reset(choice.kubelet)
            for each in shared.keys if shared else ():
                self._outcomes.add(each, choice.port, "ambiguous", choice.open_seconds)
            return
        if not target.netns.exists():
            reset(choice.kubelet)
            self._outcomes.add(target.key, choice.port, "sandbox_gone", choice.open_seconds)
            return
        self._pending.add(
            choice.kubelet,
            None,
            target=target,
            port=choice.port,
            answers=target.answers.by_port.get(choice.port, NO_ANSWERS),
            open_seconds=choice.open_seconds,
            received=choice.received,
            is_single=shared is not None and key is not None,
        )

    def _proxy(self, pending: PendingRequest, pod: BareSocket) -> None:
        """What was accepted for a probe is none."""
        connection = self._connect(
            pending.kubelet, pod, pending.target, pending.port, pending.open_seconds
        )
        if received := pending.reader.received:
            connection.pass_on(received)
        connection.kubelet.is_spent = pending.is_single

    def _connect(
        self,
        kubelet: BareSocket,
        pod: BareSocket,
        target: RelayTarget,
        port: int,
        open_seconds: float,
    ) -> Connection:
        connection = Connection(
            self._poller,
            kubelet,
            pod,
            target=target,
            port=port,
            open_seconds=open_seconds,
            on_closed=self._on_closed,
        )
        self.connections.add(connection)
        return connection

    def _on_late_failure(self, pending: PendingRequest, outcome: Outcome) -> None:
        self._outcomes.add(pending.target.key, pending.port, outcome, pending.open_seconds)

    def on_rejected(self, flow: Flow) -> None:
        """No descriptor was left for a released SYN."""
        if held := self._held.get(flow):
            self._drop(held, "failed")
        self._on_exhausted()

    def _on_closed(self, connection: Connection, was_reset_by_pod: bool) -> None:
        self.connections.discard(connection)
        is_gone = self._targets.get(connection.target.key) is not connection.target
        outcome: Outcome = "sandbox_gone" if is_gone else "reset" if was_reset_by_pod else "proxied"
        self._outcomes.add(connection.target.key, connection.port, outcome, connection.open_seconds)

    def _drop(self, held: _HeldSyn, outcome: Outcome | None) -> None:
        """Forget a SYN and close its socket. outcome: None if the caller counts it."""
        del self._held[held.syn.flow]
        if held.pod is not None:
            if self._poller.is_registered(held.pod.fileno()):
                self._poller.unregister_closed(held.pod.fileno())
            held.pod.close()
        if outcome:
            waited = self._now() - held.first_seen
            self._outcomes.add(held.target.key, held.syn.port, outcome, waited)

    def _reject(self, syn: Syn, key: str, outcome: Outcome, seconds: float = 0.0) -> None:
        self._outcomes.add(key, syn.port, outcome, seconds)
        self._send_reset(syn)

    def _send_reset(self, syn: Syn) -> None:
        try:
            self._injector.send_reset(syn)
        except OSError as error:
            # The kubelet retransmits its SYN, and waits until its own timeout.
            self._warn(f"a SYN cannot be rejected: {error}")

    def _fail(self, target: RelayTarget, port: int, error: OSError) -> None:
        """The relay itself failed. The SYN is retransmitted in a second, and tried again then."""
        self._outcomes.add(target.key, port, "failed", 0.0)
        if error.errno in EXHAUSTED:
            self._on_exhausted()
        else:
            self._warn(f"a connection to {target.key} cannot be proxied: {error}")

    def _warn(self, sentence: str) -> None:
        if self._now() >= self._quiet_until:
            self._quiet_until = self._now() + _WARN_INTERVAL_SECONDS
            self._on_warning(sentence)
