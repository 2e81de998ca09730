"""The localnet API as an agent serves it, and `podgate proxy` as a process that follows it."""

import asyncio
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from agent.lab import lab as labs
from agent.services.api import objects
from agent.services.api.publisher import ServicePublisher
from agent.services.api.server import ServicesServer
from agent.services.api.store import ServiceStore
from tests.agent.services.api import making
from tests.kernel import traffic
from tests.proxy import scene

_LIMIT_SECONDS = traffic.LIMIT_SECONDS


class ServedEndpoints:
    """A publisher, served in a thread; changes are published at once."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.target = f"unix://{directory}/localnet.sock"
        self._socket = directory / "localnet.sock"
        self._ready: dict[str, bool] = {}
        self._begun = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._begun.wait(_LIMIT_SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def put(self, number: int, pods: Iterable[labs.LabPod], **spec: Any) -> None:
        """A service of both families, its cluster IPs by number, with these pods for endpoints."""
        name = f"service-{number}"
        addresses = [scene.cluster_ip(version, number) for version in (4, 6)]
        told = making.service(
            name,
            **{
                "clusterIP": addresses[0],
                "clusterIPs": addresses,
                "ports": [{"protocol": "TCP", "port": scene.SERVICE_PORT}],
                **spec,
            },
        )
        pods = list(pods)
        slices = [
            making.endpoint_slice(
                *(making.endpoint_json(getattr(pod, kind), node=making.NODE) for pod in pods),
                name=f"{name}-{kind}",
                service=name,
                family=kind.replace("ipv", "IPv"),
                ports=[{"name": "", "protocol": "TCP", "port": scene.PORT}],
            )
            for kind in ("ipv4", "ipv6")
        ]
        self._do(lambda publisher: self._put(publisher, told, slices))

    def set_ready(self, pod: labs.LabPod, *, is_ready: bool) -> None:
        """Set a pod's readiness, as the agent's own probes do."""
        addresses = frozenset(map(str, pod.addresses))
        self._ready |= dict.fromkeys(addresses, is_ready)
        self._do(lambda publisher: publisher.store.pod_changed(addresses))

    def _put(
        self,
        publisher: ServicePublisher,
        told: objects.ApiService,
        slices: list[objects.EndpointSlice],
    ) -> None:
        publisher.store.set_service(None, told)
        for one in slices:
            publisher.store.set_slice(self._slices.get(one.metadata.name), one)
            self._slices[one.metadata.name] = one

    def _do(self, change: Callable[[ServicePublisher], None]) -> None:
        self._loop.call_soon_threadsafe(change, self._publisher)

    async def _run(self) -> None:
        self._ended = asyncio.Event()
        self._slices: dict[str, objects.EndpointSlice] = {}
        self._publisher = ServicePublisher(
            ServiceStore(making.NODE, readiness=lambda uid, address: self._ready.get(address))
        )
        running = asyncio.create_task(self._publisher.run())
        inner = self._socket.parent / "inner" / "grpc.sock"
        async with ServicesServer(self._publisher, path=self._socket, inner=inner).serve():
            self._publisher.complete()
            self._begun.set()
            await self._ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Process:
    """One `podgate proxy`; `arguments` are those of each start."""

    def __init__(self, directory: pathlib.Path, *arguments: str) -> None:
        self._directory = directory
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.log = directory / "proxy.log"

    def start(self) -> None:
        """Return when the first state is in the kernel."""
        started = self._directory / "started"
        started.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "agent", "proxy", *self._arguments),
                    *("--started-file", str(started)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(started.exists, self.log)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        status = self._process.wait(timeout=_LIMIT_SECONDS)
        self._process = None
        return status


def wait_until(is_true: Callable[[], bool], log: pathlib.Path | None = None) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, log.read_text() if log else "it does not come true"
        time.sleep(0.002)
