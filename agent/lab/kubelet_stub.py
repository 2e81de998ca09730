"""A kubelet stub, `python -m agent.lab.kubelet_stub`: it runs one probe for each line of input.

A line is KIND ADDRESS PORT; the response is a line: "success" and the server's text, or the error.
Like the kubelet, the stub runs in the host's network namespace and in a cgroup of its own. Its
clients share no code with podgate: connect(2), http.client and grpcio.
"""

import http.client
import pathlib
import socket
import subprocess
import sys

from agent.lab.attempts import DROPPED, REFUSED

# The kubelet's default timeoutSeconds.
_TIMEOUT_SECONDS = 1.0
_MAX_BYTES = 64


class KubeletStub:
    """The process and its responses."""

    def __init__(self, cgroup: pathlib.Path) -> None:
        """cgroup: its directory; the process is in it from its first instruction on."""
        self._process = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup)),
                *(sys.executable, "-m", "agent.lab.kubelet_stub"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def probe(self, kind: str, address: str, port: int) -> str:
        """Run one probe. kind: http, tcp or grpc."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind} {address} {port}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _tcp(address: str, port: int) -> str:
    socket.create_connection((address, port), _TIMEOUT_SECONDS).close()
    return "success"


def _http(address: str, port: int) -> str:
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/whoami")
        response = connection.getresponse()
        return f"success: {response.read(_MAX_BYTES).decode(errors='replace')}"
    finally:
        connection.close()


def _grpc(address: str, port: int) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    host = f"[{address}]" if ":" in address else address
    with grpc.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return str(error.code())
    return "success"


def main() -> None:
    probes = {"http": _http, "tcp": _tcp, "grpc": _grpc}
    for line in sys.stdin:
        kind, address, port = line.split()
        try:
            response = probes[kind](address, int(port))
        except PermissionError:
            response = REFUSED
        except TimeoutError:
            response = DROPPED
        except OSError as error:
            response = error.strerror or str(error)
        sys.stdout.write(f"{response}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
