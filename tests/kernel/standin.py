"""A stand-in for the kubelet: `python -m tests.kernel.standin NAME TARGET...`, one round of probes
for each line that it reads, each round answered by a line of JSON.

A target is KIND,ADDRESS,PORT; failureThreshold is 1, so each failure is reported with its reason.
The clients are foreign code: http.client, grpcio, and connect(2).
"""

import ctypes
import json
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kernel.cgroups import Cgroup

WITHOUT_CAPABILITIES = "without-capabilities:"
"""Before a name: the process drops all capabilities, and stays root."""

_PR_SET_NAME = 15
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
# The kubelet's default timeoutSeconds.
_TIMEOUT_SECONDS = 1.0


class KubeletStub:
    """The process, in a cgroup of the test's, and its results."""

    def __init__(self, group: "Cgroup", name: str, targets: Iterable[str]) -> None:
        self._process = group.popen(
            [sys.executable, "-m", "tests.kernel.standin", name, *targets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def probe(self, rounds: int = 1) -> dict[str, list[str]]:
        """Probe all targets `rounds` times. Returns the results by target; "" is a success."""
        found: dict[str, list[str]] = {}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for _ in range(rounds):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            for target, problem in json.loads(self._process.stdout.readline()).items():
                found.setdefault(target, []).append(problem)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _http(host: str, port: int) -> str:
    # Follows redirects, to other ports too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{port}/healthz", timeout=_TIMEOUT_SECONDS) as answer:
            return "" if answer.status == 200 else f"status {answer.status}"
    except urllib.error.URLError as error:
        return str(error.reason)


def _tcp(host: str, port: int) -> str:
    try:
        socket.create_connection((host.strip("[]"), port), _TIMEOUT_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def _grpc(host: str, port: int) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return str(error.code())
        is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if is_serving else f"status {answer.status}"


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    name, *targets = sys.argv[1:]
    libc = ctypes.CDLL(None)
    if name.startswith(WITHOUT_CAPABILITIES):
        name = name.removeprefix(WITHOUT_CAPABILITIES)
        assert libc.capset(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), bytes(24)) == 0
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    probes = {"http": _http, "tcp": _tcp, "grpc": _grpc}
    _print_line("ready")
    for _ in sys.stdin:
        results = {}
        for target in targets:
            kind, host, port = target.split(",")
            results[target] = probes[kind](host, int(port))
        _print_line(json.dumps(results))


if __name__ == "__main__":
    main()
