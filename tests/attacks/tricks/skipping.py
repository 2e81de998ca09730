"""A process sends by a socket whose frames pass no gate at all: options for that are rejected."""

import contextlib
import errno
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator

from tests.attacks.site import Shows, attacker, to_port
from tests.attacks.trick import Attack, Trick, with_raw_sockets
from tests.kernel import frames, links, uring, wire, xsk

SOL_PACKET, PACKET_QDISC_BYPASS = 263, 20
_ETH_P_ALL = 3
_FRAME_BYTES = 1 << 17

Send = Callable[[bytes], None]
Open = Callable[[str], contextlib.AbstractContextManager[Send]]


@contextlib.contextmanager
def without_queue(interface: str) -> Iterator[Send]:
    with links.packet_socket(interface) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)
        yield lambda frame: wire.send(sock, frame)


@contextlib.contextmanager
def without_queue_by_ring(interface: str) -> Iterator[Send]:
    """The option set by io_uring instead of setsockopt(2), since Linux 6.7."""
    with uring.ring() as ring, links.packet_socket(interface) as sock:
        code = ring.set_option(sock, SOL_PACKET, PACKET_QDISC_BYPASS, struct.pack("=i", 1))
        if code == -errno.EOPNOTSUPP:
            raise OSError(errno.ENOSYS, "setsockopt by io_uring")
        if code < 0:
            raise OSError(-code, os.strerror(-code))
        yield lambda frame: wire.send(sock, frame)


@contextlib.contextmanager
def by_xdp(interface: str) -> Iterator[Send]:
    with xsk.xsk_socket(interface) as sender:
        yield sender.send


WAYS: dict[str, Open] = {
    "packet-without-queue": without_queue,
    "packet-without-queue-by-ring": without_queue_by_ring,
    "xdp": by_xdp,
}


def skip(attack: Attack, opened: Open) -> Shows:
    """Such a frame passes no tap either, so a socket of the pod's own shows it."""
    site = attack.site
    with site.pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
        inside.bind(("eth0", _ETH_P_ALL))
        inside.setblocking(False)
        with attacker(attack.rights), opened(site.pod.interface) as send:
            send(frames.segment(site.from_stranger(attack.version), frames.SYN))
        site.arrived()
        return any(map(to_port(site.port), _received(inside)))


def _received(sock: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield sock.recv(_FRAME_BYTES)


TRICKS = tuple(
    Trick(
        name,
        "sends past all queues, and so past all gates",
        functools.partial(skip, opened=opened),
        # A queue has room for the next ring only some time after the last one has ended.
        with_raw_sockets(*((4,) if opened is by_xdp else (4, 6))),
    )
    for name, opened in WAYS.items()
)
