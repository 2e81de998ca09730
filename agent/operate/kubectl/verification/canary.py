"""A pod that answers at one port that it declares and one that it does not, over TCP and UDP.

It runs as `python3 -m agent.operate.kubectl.verification.canary SECONDS`, and ends after that time.
"""

import contextlib
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence

DECLARED, UNDECLARED = 8080, 8081


def main(arguments: Sequence[str]) -> int:
    # As process 1 of its namespace it has no default action for signals.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(float(arguments[0]))
    return 0


def serve(seconds: float) -> None:
    """Accept connections, and answer each datagram by an equal one."""
    with contextlib.ExitStack() as undo:
        selector = undo.enter_context(selectors.DefaultSelector())
        for port in (DECLARED, UNDECLARED):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                selector.register(undo.enter_context(_listen(kind, port)), selectors.EVENT_READ)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    _answer(key.fileobj)


def _listen(kind: int, port: int) -> socket.socket:
    """On both families, or IPv4 alone where the kernel has no IPv6."""
    if socket.has_dualstack_ipv6():
        family, address = socket.AF_INET6, "::"
    else:
        family, address = socket.AF_INET, "0.0.0.0"
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setblocking(False)
    made.bind((address, port))
    if kind == socket.SOCK_STREAM:
        made.listen()
    return made


def _answer(listening: socket.socket) -> None:
    if listening.type == socket.SOCK_STREAM:
        listening.accept()[0].close()
    else:
        listening.sendto(*listening.recvfrom(64))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
