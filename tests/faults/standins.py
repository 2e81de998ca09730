"""The agent's API server and its container runtime, each a process of its own that a test may stop:
`python -m tests.faults.standins api|runtime WHERE`.

Commands are lines of JSON on standard input. Only "report" and "ready" are answered, so a test can
send the others to a process that is stopped.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from aiohttp import web

from agent import labels
from agent.lab.lab import LabPod
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer, Json
from tests.polling import PATIENCE
from tests.runtime.labpods import PodRuntime

NODE = "node1"
# Of all containers: the same after a runtime was killed.
_BORN = (time.time_ns() - time.monotonic_ns()) // 10**9 * 10**9


class Standin:
    """The process, as a test sees it."""

    def __init__(self, kind: str, where: str) -> None:
        """kind: "api", with a port of 127.0.0.1 (0: any), or "runtime", with the path of a
        socket."""
        self.kind = kind
        self._where = where
        self._sent: list[dict[str, Any]] = []
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: dict[str, Any]) -> None:
        """Have it do something, sooner or later: when it continues, or is started again."""
        self._sent.append(command)
        if self._process.returncode is None:
            self._write(command)

    def report(self) -> Any:
        """What it has to report."""
        self._write({"do": "report"})
        return json.loads(self._output.readline())

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._process.kill()
        self._process.communicate()

    def start_again(self) -> None:
        """With all that it had, at the same place."""
        self._start()
        for command in self._sent:
            self._write(command)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.standins", self.kind, self._where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._where = json.loads(self._output.readline())

    @property
    def where(self) -> str:
        """The port, or the socket's path."""
        return self._where

    def _write(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()


@dataclasses.dataclass(frozen=True, slots=True)
class _Netns:
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Pod:
    """What a runtime has to know of a `LabPod`."""

    name: str
    ipv4: str
    ipv6: str
    netns: _Netns


async def _api(port: int) -> None:
    server = ApiServer()
    server.put({"kind": "Node", "metadata": {"name": NODE}}, path=NODES)
    for namespace in ("default", "podgate"):
        metadata: Json = {"name": namespace, "labels": {}}
        server.put({"kind": "Namespace", "metadata": metadata}, path=NAMESPACES)

    async def fail(_: web.Request) -> web.StreamResponse:
        return apiserver.error_response(503, "ServiceUnavailable")

    def obey(command: Json) -> Any:
        match command["do"]:
            case "break":
                server.faults.append(fail)
                for stream in server.streams:
                    stream.end()
            case "mend":
                server.faults.clear()
            case "add":
                server.put(_api_pod(**command["pod"]))
            case "remove":
                server.delete(command["name"])
            case "report":
                patches = server.patches()
                del server.received[:]
                return [
                    {"pod": patch.path.split("/")[-2], **one}
                    for patch in patches
                    for one in patch.body.get("status", {}).get("conditions", ())
                ]
        return None

    async with server.running(port=port):
        await _follow(server.port, obey)


def _api_pod(name: str, mode: str, port: int, addresses: list[str]) -> Json:
    made = apiserver.gated(name, labels={labels.MODE_LABEL: mode} if mode else {})
    made["status"]["podIPs"] = [{"ip": address} for address in addresses]
    made["spec"]["containers"][0] |= {
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": port},
            "periodSeconds": 1,
            "timeoutSeconds": math.ceil(PATIENCE),
            "failureThreshold": 1,
        }
    }
    return made


async def _runtime(path: str) -> None:
    pods: dict[str, LabPod] = {}

    def obey(command: Json) -> Any:
        key = f"sandbox-{command.get('name')}"
        match command["do"]:
            case "add":
                pod: Any = _Pod(
                    *(command["name"], command["ipv4"], command["ipv6"]), _Netns(command["netns"])
                )
                pods[key] = pod
            case "remove":
                pods.pop(key, None)
            case "report":
                return sorted(pods)
        return None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((PodRuntime(pods, _BORN),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await _follow(path, obey)
    await server.stop(None)


async def _follow(where: object, obey: Callable[[Json], Any]) -> None:
    """Obey the commands of the input until its end."""
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    _print(where)
    while line := await commands.readline():
        command = json.loads(line)
        result = obey(command)
        if command["do"] == "report":
            _print(result)


def _print(content: object) -> None:
    os.write(sys.stdout.fileno(), json.dumps(content).encode() + b"\n")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not run while the block does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    _kind, _where = sys.argv[1:]
    if _kind == "runtime":
        pathlib.Path(_where).unlink(missing_ok=True)
    asyncio.run(_api(int(_where)) if _kind == "api" else _runtime(_where))
