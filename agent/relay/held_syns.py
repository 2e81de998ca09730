"""Openings that wait for the pod: each ends as the pod's own answer says.

connect() of the kubelet must not complete before the pod's side has, or every tcp probe would
succeed. So its SYN is held: the pod is dialled from inside its namespace, and then the SYN goes on
to the relay's own listener, is refused, or gets no answer, as the pod gave none.
"""

import errno
import socket
import time
from collections.abc import Callable

from agent.relay import segments
from agent.relay.connection import Carried
from agent.relay.epoll import WRITABLE, Poller
from agent.relay.messages import Outcome
from agent.relay.raw_sockets import Injector, Listeners
from agent.relay.stats import Tally
from agent.relay.targets import Target, Targets
from probes.netns import NetnsGone

# The kernel sends a SYN again after 1 s (RFC 6298), and each time waits up to twice as long as
# before. One that does not come means that the kubelet has given up.
_PATIENCE_SECONDS = 1.5
_PATIENCE_FACTOR = 2.5
# One sentence tells as much as a thousand.
_QUIET_SECONDS = 10.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class _Held:
    """One opening of the kubelet's, and the dial to the pod that it waits for."""

    __slots__ = (
        "_owner",
        "dialled_seconds",
        "first_seen",
        "is_released",
        "last_seen",
        "opening",
        "pod",
        "target",
    )

    def __init__(
        self,
        owner: "HeldOpenings",
        opening: segments.Opening,
        target: Target,
        pod: socket.socket,
        now: float,
    ) -> None:
        self._owner = owner
        self.opening = opening
        self.target = target
        self.pod = pod
        self.first_seen = self.last_seen = now
        self.dialled_seconds = 0.0
        self.is_released = False

    @property
    def expires(self) -> float:
        waited = self.last_seen - self.first_seen
        return self.last_seen + max(_PATIENCE_SECONDS, _PATIENCE_FACTOR * waited)

    def on_event(self, events: int) -> None:
        self._owner.dialled(self)


class HeldOpenings:
    """All of them, by flow. The owner of listeners and of what is accepted there."""

    def __init__(
        self,
        poller: Poller,
        targets: Targets,
        tally: Tally,
        *,
        most: int,
        on_full: Callable[[], None],
        on_exhausted: Callable[[], None],
        on_trouble: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """most: how many may be held and carried at once; on_full: so many are, and no more should
        come; on_exhausted: the process has no descriptor or memory left for another;
        on_trouble: told in one sentence what did not work, once in a while.
        """
        self._on_trouble = on_trouble
        self._most = most
        self._on_full = on_full
        self.connections: set[Carried] = set()
        self._poller = poller
        self._targets = targets
        self._tally = tally
        self._on_exhausted = on_exhausted
        self._now = now
        self._quiet_until = 0.0
        self._held: dict[segments.Flow, _Held] = {}
        self._injector = Injector()
        self._listeners = Listeners(poller, self)

    @property
    def count(self) -> int:
        """How many are held."""
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Whether as many are held and carried as may be."""
        return len(self._held) + len(self.connections) >= self._most

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, and nothing carried."""
        return not self._held and not self.connections

    def take(self, opening: segments.Opening) -> None:
        """A SYN was seen: a new one, or one that is sent again."""
        held = self._held.get(opening.flow)
        if held:
            if held.opening.sequence == opening.sequence:
                held.last_seen = self._now()
                if held.is_released:
                    self._release(held)
                return
            # The kubelet's port is in use for another connection already.
            self._drop(held, "unanswered")
        target = self._targets.find(opening.local)
        if target is None:
            self._refuse(opening, "", "unknown")
        elif not target.admits(opening.port):
            self._refuse(opening, target.key, "undeclared")
        else:
            self._dial(opening, target)

    def dialled(self, held: _Held) -> None:
        """The pod has answered, or the dial has failed."""
        self._poller.forget(held.pod.fileno())
        self._settle(held, held.pod.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def expire(self) -> None:
        """Drop those for which the kubelet asks no more."""
        now = self._now()
        for held in list(self._held.values()):
            if now > held.expires:
                self._drop(held, "unanswered")

    def abandon(self, target: Target) -> None:
        """The sandbox is gone: what waits for it is refused, what is carried to it is reset."""
        for held in [held for held in self._held.values() if held.target is target]:
            self._drop(held, None)
            self._refuse(held.opening, target.key, "gone")
        for connection in [one for one in self.connections if one.target is target]:
            connection.reset()

    def _dial(self, opening: segments.Opening, target: Target) -> None:
        started = self._now()
        family = socket.AF_INET if target.address.version == 4 else socket.AF_INET6
        try:
            pod = target.netns.socket(family, socket.SOCK_STREAM)
        except NetnsGone:
            self._refuse(opening, target.key, "gone")
            return
        except OSError as error:
            self._fail(target, opening.port, error)
            return
        # Who sends decides what goes together, and has done so.
        pod.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        held = _Held(self, opening, target, pod, started)
        self._held[opening.flow] = held
        if self.is_full:
            self._on_full()
        address = (str(target.address), opening.port)
        # The way goes by the pod's loopback: by the time connect returns the answer is there, and
        # asking a second time gets it.
        result = pod.connect_ex(address)
        if result == errno.EINPROGRESS:
            result = pod.connect_ex(address)
        if result == errno.EALREADY:
            self._poller.watch(pod.fileno(), WRITABLE, held)
        else:
            self._settle(held, 0 if result == errno.EISCONN else result)

    def _settle(self, held: _Held, error: int) -> None:
        held.dialled_seconds = self._now() - held.first_seen
        if error == 0:
            self._release(held)
        elif error == errno.ECONNREFUSED:
            self._drop(held, None)
            self._refuse(held.opening, held.target.key, "refused", held.dialled_seconds)
        elif error in _EXHAUSTED:
            self._drop(held, None)
            self._fail(held.target, held.opening.port, OSError(error, ""))
        else:
            # Unreachable or timed out: directly the kubelet would hear nothing either.
            self._drop(held, "unanswered")

    def _release(self, held: _Held) -> None:
        """Let the SYN go on; on a machine at rest it is accepted before this returns."""
        try:
            listener = self._listeners.prepare(held.opening.port)
            held.is_released = True
            self._injector.open_again(held.opening)
        except OSError as error:
            self._drop(held, None)
            self._fail(held.target, held.opening.port, error)
            return
        listener.accept()

    def accepted(self, sock: socket.socket, flow: segments.Flow) -> None:
        """An opening that was released is open: carry it."""
        held = self._held.pop(flow, None)
        if held is None:  # given up, or the sandbox is gone
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, segments.RESET_ON_CLOSE)
            sock.close()
            return
        self.connections.add(
            Carried(
                self._poller,
                sock,
                held.pod,
                target=held.target,
                port=held.opening.port,
                open_seconds=self._now() - held.first_seen,
                on_end=self._ended,
            )
        )

    def turned_away(self, flow: segments.Flow) -> None:
        """There is no descriptor left for an opening that was released."""
        if held := self._held.get(flow):
            self._drop(held, "failed")
        self._on_exhausted()

    def _ended(self, connection: Carried, was_reset_by_pod: bool) -> None:
        self.connections.discard(connection)
        is_gone = self._targets.get(connection.target.key) is not connection.target
        outcome: Outcome = "gone" if is_gone else "reset" if was_reset_by_pod else "carried"
        self._tally.add(connection.target.key, connection.port, outcome, connection.open_seconds)

    def _drop(self, held: _Held, outcome: Outcome | None) -> None:
        """Forget it and end its dial; None: its outcome is counted elsewhere."""
        del self._held[held.opening.flow]
        if self._poller.is_watching(held.pod.fileno()):
            self._poller.forget_closed(held.pod.fileno())
        held.pod.close()
        if outcome:
            waited = self._now() - held.first_seen
            self._tally.add(held.target.key, held.opening.port, outcome, waited)

    def _refuse(
        self, opening: segments.Opening, key: str, outcome: Outcome, seconds: float = 0.0
    ) -> None:
        self._tally.add(key, opening.port, outcome, seconds)
        try:
            self._injector.refuse(opening)
        except OSError as error:
            # The kubelet asks again, and waits until its own limit.
            self._tell(f"an opening could not be refused: {error}")

    def _fail(self, target: Target, port: int, error: OSError) -> None:
        """The relay's own trouble. The SYN comes again in a second, and is tried again then."""
        self._tally.add(target.key, port, "failed", 0.0)
        if error.errno in _EXHAUSTED:
            self._on_exhausted()
        else:
            self._tell(f"a connection to {target.key} could not be carried: {error}")

    def _tell(self, sentence: str) -> None:
        if self._now() >= self._quiet_until:
            self._quiet_until = self._now() + _QUIET_SECONDS
            self._on_trouble(sentence)
