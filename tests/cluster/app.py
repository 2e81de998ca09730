"""The server of a pod: HTTP, HTTPS, gRPC and TCP on a port each. `python3 app.py DIRECTORY`.

It runs with the image's Python, from a ConfigMap. Each request is one line of output: its kind, the
client's address and the path. DIRECTORY has tls.crt and tls.key.
"""

import http.server
import os
import pathlib
import socket
import ssl
import sys
import threading
from concurrent import futures
from typing import Any

import grpc

HTTP, HTTPS, GRPC, TCP, REDIRECTED = 8080, 8443, 9090, 7070, 9191
# HealthCheckResponse{status: SERVING}
_SERVING = b"\x08\x01"


def report(kind: str, client: str, path: str = "") -> None:
    # In one call, since several threads report.
    os.write(1, f"{kind} {client.removeprefix('::ffff:')} {path}\n".encode())


class Handler(http.server.BaseHTTPRequestHandler):
    """/redirect leads to another port of the same host, which no probe declares; others are 200."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind = {HTTPS: "https", REDIRECTED: "redirected"}.get(self.server.server_port, "http")  # type: ignore[attr-defined]
        report(kind, self.client_address[0], self.path)
        host = self.headers["Host"].rpartition(":")[0]
        self.send_response(302 if self.path == "/redirect" else 200)
        if self.path == "/redirect":
            self.send_header("Location", f"http://{host}:{REDIRECTED}/target")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are reported already."""


def serve_http(port: int, tls: ssl.SSLContext | None = None) -> None:
    server = http.server.ThreadingHTTPServer(("", port), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever).start()


def serve_tcp() -> None:
    listener = socket.create_server(("", TCP))

    def accept() -> None:
        while True:
            connection, client = listener.accept()
            report("tcp", client[0])
            connection.close()

    threading.Thread(target=accept).start()


class Health(grpc.GenericRpcHandler):  # type: ignore[misc]
    """grpc.health.v1.Health of any service."""

    def service(self, details: Any) -> Any:
        if details.method != "/grpc.health.v1.Health/Check":
            return None

        def check(request: bytes, context: Any) -> bytes:
            report("grpc", context.peer().removeprefix("ipv4:").rpartition(":")[0])
            return _SERVING

        return grpc.unary_unary_rpc_method_handler(check)


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    serve_http(HTTP)
    serve_http(HTTPS, tls)
    serve_http(REDIRECTED)
    serve_tcp()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Health(),))
    server.add_insecure_port(f"0.0.0.0:{GRPC}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
