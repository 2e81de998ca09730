"""Connects to pods, from inside their network namespaces."""

import errno
import socket

from agent.relay.targets import RelayTarget
from probes.netns import BareSocket, connect_inside

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors of a process without descriptors or memory."""


def dial(target: RelayTarget, port: int) -> tuple[BareSocket, int]:
    """A socket, and the result of its connect: 0, EALREADY while it is pending, or the error.

    Raises `NetnsGoneError`, or `OSError` if there is no socket.
    """
    sock = target.netns.bare_socket(target.family, socket.SOCK_STREAM, target.user)
    # The kubelet's socket has already decided which data to send together.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock, connect_inside(sock, (target.dialled, port))
