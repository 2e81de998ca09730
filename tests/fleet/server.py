"""The server of a pod: HTTP on TCP, and datagrams, each answered with the client's address.

`python3 server.py`; it runs with the image's Python, from a ConfigMap.
"""

import http.server
import socket
import threading
from typing import Any

TCP, UDP = 8080, 5353


def seen(address: str) -> bytes:
    return address.removeprefix("::ffff:").encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = seen(self.client_address[0])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No test reads it."""


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    # On a busy machine connections are complete before the server has its turn.
    request_queue_size = 4096

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve_datagrams() -> None:
    served = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    served.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    served.bind(("", UDP))
    while True:
        _, client = served.recvfrom(2048)
        served.sendto(seen(client[0]), client)


def main() -> None:
    threading.Thread(target=serve_datagrams, daemon=True).start()
    Server(("", TCP), Handler).serve_forever()


if __name__ == "__main__":
    main()
