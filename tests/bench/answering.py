"""Cheap servers, to measure their clients.

`python -m tests.bench.answering KIND CERT KEY NETNS...`: one process serves port 8080 of each
namespace with one epoll loop. KIND is http, https, tcp, or closing: http that ends each connection
after its answer. It prints `ready`, and exits at the end of its standard input.
"""

import select
import socket
import ssl
import sys

from probes.netns import Netns

PORT = 8080
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


class _Server:
    """Answers each connection once it has sent anything; all in one thread."""

    def __init__(self, context: ssl.SSLContext | None, *, ends_first: bool) -> None:
        self._context = context
        self._ends_first = ends_first
        self._epoll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        self._connections: dict[int, socket.socket] = {}

    def listen(self, netns: Netns) -> None:
        sock = netns.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # As servers in Go and nginx do, for all connections. Otherwise an answer waits 40 ms for
        # the client to acknowledge the TLS session's ticket (RFC 896, RFC 1122 4.2.3.2).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(("::", PORT))
        sock.listen(4096)
        self._listeners[sock.fileno()] = sock
        self._epoll.register(sock, select.EPOLLIN)

    def run(self) -> None:
        self._epoll.register(sys.stdin, select.EPOLLHUP)
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == sys.stdin.fileno():
                    return
                if listener := self._listeners.get(descriptor):
                    self._accept(listener)
                else:
                    self._answer(descriptor)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                continue
            sock.setblocking(False)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            self._connections[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)

    def _answer(self, descriptor: int) -> None:
        sock = self._connections[descriptor]
        try:
            data = sock.recv(4096)
            if data:
                sock.send(_ANSWER)
                if not self._ends_first:
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        self._epoll.unregister(descriptor)
        self._connections.pop(descriptor).close()


def main(kind: str, cert: str, key: str, *paths: str) -> None:
    context = None
    if kind == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
    server = _Server(context, ends_first=kind == "closing")
    for path in paths:
        server.listen(Netns.open(path))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
