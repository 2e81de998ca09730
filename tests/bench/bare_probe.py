"""The least that a probe in Python does: connect, a request, an answer, close; for https with TLS.

`python -m tests.bench.bare_probe http|https ADDRESS PORT COUNT 1` runs that many one after the
other, and prints the CPU time for one, user and kernel, in microseconds. No namespaces, time
limits, results or kubelet semantics.
"""

import socket
import ssl
import sys
import time

_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"
_BYTES = 4096
# The first ones fill caches, which is no cost of a probe.
_WARM_UP = 20


def main() -> None:
    kind, address, port, count, _one_at_a_time = sys.argv[1:]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    used = 0.0
    for measured in (_WARM_UP, int(count)):
        started = time.process_time()
        for _ in range(measured):
            with socket.create_connection((address, int(port))) as plain:
                if kind == "https":
                    with context.wrap_socket(plain) as secured:
                        _exchange(secured)
                else:
                    _exchange(plain)
        used = time.process_time() - started
    sys.stdout.write(f"{used / int(count) * 1e6}\n")


def _exchange(sock: socket.socket) -> None:
    sock.sendall(_REQUEST)
    if not sock.recv(_BYTES).startswith(b"HTTP/1.1 200 "):
        raise AssertionError("no answer with 200")


if __name__ == "__main__":
    main()
