"""What a relay does for itself while it has no agent: it watches what its agent watched before.

Its agent was killed, is restarted or upgraded, and the next one starts a relay of its own and then
sends this one SIGTERM. Until then this relay continues with the targets it has. It ends by itself
when its time is over, when its hooks were detached (`podgate off`, `podgate cleanup`), and when
packets of the host no longer reach it: then the kubelet's next connection goes to the gate.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable

from agent.relay.hooks import RelayHooks
from agent.relay.interfaces import WAY_PORT
from bpf.abi import IPAddress
from probes.netns import OWN_NETNS, Netns

WATCH_SECONDS = 0.25

# With the one that ends it, a period of the shortest probe. On a busy node responses are late, and
# there is no agent to start another relay.
_MOST_UNANSWERED = 3


class HostNetns:
    """The host's network namespace, kept by a process that leaves it."""

    def __init__(self) -> None:
        """To be created in it."""
        self._descriptor = os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self.netns = Netns(f"/proc/self/fd/{self._descriptor}", status.st_dev, status.st_ino)

    def close(self) -> None:
        os.close(self._descriptor)


class OwnWay:
    """Tries the way from the host to this relay, as `agent.strict.way` does for an agent."""

    def __init__(self, host: Netns, addresses: Iterable[IPAddress]) -> None:
        """addresses: at which this relay rejects each SYN."""
        self._host = host
        self._addresses = tuple(addresses)
        self._pending: list[socket.socket] = []
        """Of the last try, not rejected at once."""
        self._unanswered = 0

    def close(self) -> None:
        while self._pending:
            self._pending.pop().close()

    def is_blocked(self) -> bool:
        """Whether the last tries were not answered. To be called every `WATCH_SECONDS`: it
        judges the last try and starts the next one."""
        is_answered = all(map(_is_rejected, self._pending))
        self._unanswered = 0 if is_answered else self._unanswered + 1
        self.close()
        # Without IPv6, or a descriptor or memory, nothing more is tried, which shows nothing.
        with contextlib.suppress(OSError):
            for address in self._addresses:
                self._try(address)
        return self._unanswered > _MOST_UNANSWERED

    def _try(self, address: IPAddress) -> None:
        """An error at once, but for a rejection, stays with the socket, which is not rejected."""
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = self._host.socket(family, socket.SOCK_STREAM)
        if sock.connect_ex((str(address), WAY_PORT)) == errno.ECONNREFUSED:
            sock.close()
        else:
            self._pending.append(sock)


class Orphanhood:
    """The time of a relay without its agent."""

    def __init__(
        self,
        seconds: float,
        way: OwnWay | None,
        hooks: RelayHooks,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: how long it lasts; way: None if it cannot be tried."""
        self._ends_at = now() + seconds
        self._way = way
        self._hooks = hooks
        self._now = now

    def close(self) -> None:
        if self._way is not None:
            self._way.close()

    def is_over(self) -> bool:
        """Whether the relay is to release itself. To be called every `WATCH_SECONDS`."""
        self._hooks.check()
        if self._now() >= self._ends_at or not self._hooks.are_attached:
            return True
        return self._way is not None and self._way.is_blocked()


def _is_rejected(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
