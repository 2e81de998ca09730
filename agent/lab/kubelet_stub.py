"""A stand-in for the kubelet, `python -m agent.lab.kubelet_stub`: a probe for each line it reads.

A line is KIND ADDRESS PORT, the answer one line: "success" and what the server said, or what went
wrong. It stands in the node's namespace and in a cgroup of its own, as the kubelet does, and its
clients are nobody's of ours: connect(2), http.client and grpcio.
"""

import http.client
import pathlib
import socket
import subprocess
import sys

from agent.lab.attempts import DROPPED, REFUSED

# The kubelet's default timeoutSeconds.
_TIMEOUT_SECONDS = 1.0
_MOST_BYTES = 64


class StandIn:
    """The process, and what it says."""

    def __init__(self, cgroup: pathlib.Path) -> None:
        """cgroup: its directory; the process is in it before its first instruction."""
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
        """kind: http, tcp or grpc. One probe, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind} {address} {port}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _tcp(address: str, port: int) -> str:
    socket.create_connection((address, port), _TIMEOUT_SECONDS).close()
    return "success"


def _http(address: str, port: int) -> str:
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/whoami")
        answer = connection.getresponse()
        return f"success: {answer.read(_MOST_BYTES).decode(errors='replace')}"
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
            answer = probes[kind](address, int(port))
        except PermissionError:
            answer = REFUSED
        except TimeoutError:
            answer = DROPPED
        except OSError as error:
            answer = error.strerror or str(error)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
