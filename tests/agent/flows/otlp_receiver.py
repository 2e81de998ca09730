"""A receiver of OTLP logs over HTTP, in threads, which a test makes accept, reject and hang."""

import contextlib
import gzip
import http.server
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2

PROTOBUF = "application/x-protobuf"


class Receiver:
    """What it answers, and what it has accepted. A partial success rejects the last ones."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.rejected = 0
        self.reason = "too old"
        self.page = b""
        """Of an answer that is none of OTLP."""
        self.overloaded = 0
        """The number of next requests that it answers with 503."""
        self.requests: list[dict[str, str]] = []
        """Headers of each."""
        self.paths: list[str] = []
        self.clients: set[tuple[str, int]] = set()
        """Of all connections."""
        self.logs: list[logs_pb2.LogRecord] = []
        self.resources: list[dict[str, Any]] = []
        self.passes = threading.Event()
        self.passes.set()

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.paths.append(path)
        self.requests.append(headers)
        if not self.passes.is_set():
            self.passes.wait()
            return 503, b""  # its client has given up
        if self.overloaded:
            self.overloaded -= 1
            return 503, b""
        answer = logs_service_pb2.ExportLogsServiceResponse()
        if self.status == 200:
            request = logs_service_pb2.ExportLogsServiceRequest.FromString(gzip.decompress(body))
            (of_resource,) = request.resource_logs
            (of_scope,) = of_resource.scope_logs
            self.resources.append(attributes(of_resource.resource.attributes))
            kept = len(of_scope.log_records) - self.rejected
            self.logs += of_scope.log_records[:kept]
            if self.rejected:
                answer.partial_success.rejected_log_records = self.rejected
                answer.partial_success.error_message = self.reason
        return self.status, self.page or answer.SerializeToString()

    def sum(self, name: str) -> int:
        return sum(int(attributes(one.attributes).get(name, 0)) for one in self.logs)


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: value(one.value) for one in of}


def value(of: common_pb2.AnyValue) -> Any:
    return getattr(of, of.WhichOneof("value") or "string_value")


@contextlib.contextmanager
def receiver(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Serves on loopback; with `context` by TLS."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            made.clients.add(self.client_address)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, answer = made.answer(self.path, dict(self.headers), body)
            with contextlib.suppress(OSError):  # a client that has given up
                self.send_response(status)
                self.send_header("Content-Type", PROTOBUF)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if context else "http"
    made = Receiver(f"{scheme}://127.0.0.1:{server.server_port}/v1/logs")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.passes.set()
        server.shutdown()
        thread.join()
        server.server_close()
