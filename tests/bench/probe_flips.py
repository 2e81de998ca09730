"""How soon a listener that closes makes a condition False: a part of bench `probe`.

On an idle machine; beside two busy processes for each CPU; with all places for probes taken by pods
that never answer; and with both.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import structlog

from agent import labels
from agent.lab.lab import BPFFS
from agent.linux import scheduling
from agent.linux.pod_network import PodNetwork
from agent.pods.changes import Changes
from agent.pods.conditions import FALSE, TRUE, Conditions
from agent.pods.container_runs import PodContainers
from agent.pods.events import PodEvents
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes
from agent.probing.certificates import ProbeCertificates
from agent.probing.manager import ProbeManager
from agent.settings import Settings
from bpf import pins
from probes.engine.queue import MAX_IN_FLIGHT
from probes.spec.definitions import ContainerProbes, HttpGet, Probe, TcpSocket
from probes.spec.specs import PodSpec
from tests.bench import answering, figures, probe_cpu
from tests.probes.conftest import Sandbox

_PORT = answering.PORT
_FLIPS = 300
_SILENT_PODS = MAX_IN_FLIGHT * 3 // 2
_BUSY_PER_CPU = 2


def main() -> None:
    scheduling.shorten_slice()  # as `podgate run` does
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for name, busy, silent in (
        ("flip_p99_ms", False, False),
        ("flip_busy_cpu_p99_ms", True, False),
        ("flip_full_queue_p99_ms", False, True),
        ("flip_busy_p99_ms", True, True),
    ):
        probe_cpu.note(f"{_FLIPS} listeners that close, until the condition is False: {name}")
        with contextlib.ExitStack() as stack:
            if busy:
                stack.enter_context(_busy())
            milliseconds = asyncio.run(_flips(has_silent_pods=silent))
        parts = [milliseconds[start::3] for start in range(3)]
        figures.emit("probe", name, [figures.p99(part) for part in parts], "ms")
        probe_cpu.note(f"median of all flips: {statistics.median(milliseconds):.2f} ms")


class _TimedConditions(Conditions):
    """Signals a change of the status of probes-passing of one pod."""

    def __init__(self, uid: str) -> None:
        super().__init__()
        self._uid = uid
        self.changed: dict[str, asyncio.Event] = {TRUE: asyncio.Event(), FALSE: asyncio.Event()}

    def set(self, pod: Pod, kind: str, status: str, reason: str, message: str, **more: Any) -> bool:
        changed = super().set(pod, kind, status, reason, message, **more)
        if pod.uid == self._uid and kind == labels.PROBES_PASSING and status in self.changed:
            self.changed[status].set()
        return changed


class _NoRuntime:
    """Without a container runtime, containers live as long as their sandbox."""

    def __init__(self) -> None:
        self.changes = Changes()

    def containers_of(self, uid: str) -> PodContainers | None:
        return None


async def _flips(*, has_silent_pods: bool) -> list[float]:
    """From each close() to the condition; the pod has the option, and is probed hourly else."""
    conditions = _TimedConditions("flipping")
    store = PodStore(conditions)
    with probe_cpu.sandbox() as sandbox, probe_cpu.sandbox() as silent:
        async with _probing(store) as probing:
            tcp = Probe(TcpSocket(_PORT), period_seconds=3600.0, fail_when_listener_closes=True)
            _add(store, probing, "flipping", sandbox, tcp)
            if has_silent_pods:
                never = Probe(HttpGet(_PORT), period_seconds=1.0, timeout_seconds=1.0)
                for number in range(_SILENT_PODS):
                    _add(store, probing, f"silent{number}", silent, never)
            with _silent_server(silent):
                await asyncio.sleep(3)  # so that first probes are over, which are spread
                return [await _flip(sandbox, conditions) for _ in range(_FLIPS)]


async def _flip(sandbox: Sandbox, conditions: _TimedConditions) -> float:
    conditions.changed[TRUE].clear()
    sock = sandbox.listen(port=_PORT)
    async with asyncio.timeout(30):
        await conditions.changed[TRUE].wait()
    await asyncio.sleep(0.06)  # a pod that flips without end is probed less often
    conditions.changed[FALSE].clear()
    started = time.perf_counter()
    sock.close()
    async with asyncio.timeout(30):
        await conditions.changed[FALSE].wait()
    taken = time.perf_counter() - started
    await asyncio.sleep(0.06)
    return taken * 1000


@contextlib.asynccontextmanager
async def _probing(store: PodStore) -> AsyncIterator[ProbeManager]:
    installation = pins.Pins(BPFFS)
    installation.prepare()
    probing = ProbeManager(
        store,
        installation,
        containers=_NoRuntime(),
        events=PodEvents(),
        answered=AnsweredProbes(),
        connect_every=Settings().probe_connect_every,
        certificates=ProbeCertificates(None, None),
    )
    task = asyncio.create_task(probing.run())
    await probing.listening()
    yield probing
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _add(store: PodStore, probing: ProbeManager, uid: str, sandbox: Sandbox, probe: Probe) -> None:
    spec = PodSpec(containers=(ContainerProbes("app", readiness=probe),))
    pod = Pod(uid=uid, namespace="bench", name=uid, spec=spec)
    addresses = tuple(map(ipaddress.ip_address, (sandbox.v4, sandbox.v6)))
    network = PodNetwork((), addresses, (), None)
    store.pods[uid] = PodState(pod, netns=sandbox.netns, network=network)
    probing.update(store.pods[uid])


@contextlib.contextmanager
def _silent_server(sandbox: Sandbox) -> Iterator[None]:
    """The kernel accepts connections, no process answers."""
    with sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("", _PORT))
        sock.listen(4096)
        yield


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Two busy processes for each CPU."""
    count = _BUSY_PER_CPU * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
