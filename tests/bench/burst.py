"""How long 250 pods at once take to be ready on one node: bench `burst`.

A real containerd makes sandboxes and containers, ten at a time; the API server is the tests'.
Without an agent a pod counts as ready once its container runs, without any probe. With
an agent both of its conditions are True at the API server, so its readiness probe has passed.
Both kinds of starts alternate in one run.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import os
import pathlib
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from agent.default_deny import table as default_deny_table
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, log_time
from agent.logs import Event
from bpf import pins
from tests.agent.kube.apiserver import ApiServer, Json
from tests.agent.kube.conftest import write_kubeconfig
from tests.bench import figures
from tests.conftest import fresh_lab
from tests.kernel import cgroups
from tests.node.node import READY, Node
from tests.runtime import containerd
from tests.runtime.driving import Driver

T = TypeVar("T")

_PODS = int(os.environ.get("PODGATE_BENCH_PODS") or 250)
_RUNS = 3
_AT_ONCE = 10
PATIENCE_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """With an agent: seconds until all are ready, of the agent's CPU time from its start, and in
    which the agent itself was not ready meanwhile, by its log and by /readyz."""

    seconds: float
    cpu_seconds: float
    unready_seconds: float
    readyz_seconds: float


def main() -> None:
    labs.isolate()
    with (
        tempfile.TemporaryDirectory() as directory,
        fresh_lab(),
        containerd.running(containerd.ptp()) as runtime,
    ):
        asyncio.run(_run(pathlib.Path(directory), runtime))


async def _run(directory: pathlib.Path, runtime: containerd.Containerd) -> None:
    without: list[float] = []
    ready: list[float] = []
    cpu: list[float] = []
    unready: list[float] = []
    failing: list[float] = []
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver:
        for number in range(_RUNS):
            _note(f"{_PODS} pods without an agent, {number + 1} of {_RUNS}")
            without.append(await _start_without(driver, number))
            _note(f"{_PODS} pods with an agent, {number + 1} of {_RUNS}")
            start = await _start_with(driver, directory, runtime, number)
            ready.append(start.seconds)
            cpu.append(start.cpu_seconds * 1000 / _PODS)
            unready.append(start.unready_seconds)
            failing.append(start.readyz_seconds)
    figures.emit("burst", f"burst_{_PODS}_ready_seconds", ready, "s", baseline=without)
    ratios = [one / other for one, other in zip(ready, without, strict=True)]
    figures.emit("burst", f"burst_{_PODS}_ready_ratio", ratios, "ratio")
    figures.emit("burst", f"burst_{_PODS}_agent_cpu_ms_per_pod", cpu, "ms")
    figures.emit("burst", f"burst_{_PODS}_agent_unready_seconds", unready, "s")
    figures.emit("burst", f"burst_{_PODS}_readyz_failing_seconds", failing, "s")


async def _start_without(driver: Driver, number: int) -> float:
    begun = time.monotonic()
    sandboxes = await _at_once(
        [functools.partial(_start, driver, f"without-{number}-{pod}") for pod in range(_PODS)]
    )
    seconds = time.monotonic() - begun
    await _end(driver, sandboxes)
    return seconds


async def _start_with(
    driver: Driver, directory: pathlib.Path, runtime: containerd.Containerd, number: int
) -> _Start:
    names = [f"with-{number}-{pod}" for pod in range(_PODS)]
    async with node_with_agent(driver, directory, runtime, str(number), "enforce") as node:
        begun, begun_at = time.monotonic(), datetime.datetime.now(datetime.UTC)
        readyz = _Readyz(node)
        async with readyz.watched(), pods_at_once(node, names):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not all(node.is_ready(name) for name in names):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return _Start(
                seconds=time.monotonic() - begun,
                cpu_seconds=cpu_seconds_of(node.operator.pid),
                unready_seconds=_unready_seconds(node.operator, begun_at),
                readyz_seconds=readyz.failing_seconds,
            )


def _unready_seconds(operator: AgentProcess, since: datetime.datetime) -> float:
    """For how long the file for the readiness probe of the agent's own pod was missing."""
    seconds, missing_at = 0.0, None
    for line in operator.log_lines():
        at = log_time(line)
        if line["event"] == Event.AGENT_NOT_READY and at >= since:
            missing_at = missing_at or at
        elif line["event"] == Event.AGENT_READY and missing_at:
            seconds += (at - missing_at).total_seconds()
            missing_at = None
    now = datetime.datetime.now(datetime.UTC)
    return seconds + ((now - missing_at).total_seconds() if missing_at else 0)


class _Readyz:
    """Reads /readyz ten times a second."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.failing_seconds = 0.0
        self._reasons: set[str] = set()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        report = await self._node.report("an agent", lambda report: True)
        watching = asyncio.create_task(self._watch(f"http://{report.http_address}/readyz"))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for reason in sorted(self._reasons):
                _note(f"/readyz: {reason}")

    async def _watch(self, url: str) -> None:
        seen_at = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            reason = await asyncio.to_thread(_unready_reason, url)
            now = time.monotonic()
            if reason:
                self.failing_seconds += now - seen_at
                self._reasons.add(reason)
            seen_at = now


def _unready_reason(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    except OSError as error:
        return str(error)


@contextlib.asynccontextmanager
async def node_with_agent(
    driver: Driver,
    directory: pathlib.Path,
    runtime: containerd.Containerd,
    name: str,
    mode: str,
) -> AsyncIterator[Node]:
    """A node whose agent is ready, with this default mode."""
    run = directory / name
    run.mkdir()
    installation = pins.Pins(labs.LAB_DIRECTORY / "bpf" / name)
    installation.bpffs.mkdir()
    operator = AgentProcess(run, installation.bpffs)
    node = Node(runtime, driver, ApiServer(), operator)
    await node.start_api()
    write_kubeconfig(node.kubeconfig, f"http://127.0.0.1:{node.server.port}")
    with cgroups.cgroup() as kubelet:
        operator.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        # A cgroup without a process is polled for one.
        process = kubelet.popen(["sleep", "infinity"])
        try:
            await node.start_agent("--mode", mode)
            await node.serves("/readyz", 200)
            yield node
        finally:
            await node.stop_agent(signal.SIGKILL)
            await node.stop_api()
            await default_deny_table.remove()
            installation.remove_everything()
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def pods_at_once(
    node: Node, names: Sequence[str], container: Json = READY
) -> AsyncIterator[None]:
    """Pods that the API has at once, and whose containers run; they end with the block."""
    # As the API server's: podgate finds the pods' cgroups by them.
    uids = {name: str(uuid.uuid4()) for name in names}
    for name, uid in uids.items():
        node.create(name, container=container, uid=uid)
    calls = [functools.partial(_start, node.driver, *pod) for pod in uids.items()]
    sandboxes = await _at_once(calls)
    try:
        yield
    finally:
        await _end(node.driver, sandboxes)


async def _start(driver: Driver, name: str, uid: str | None = None) -> str:
    sandbox = await driver.run_sandbox(name, uid=uid)
    await driver.start_container(sandbox)
    return sandbox


async def _end(driver: Driver, sandboxes: list[str]) -> None:
    async def end(sandbox: str) -> None:
        await driver.stop_sandbox(sandbox)
        await driver.remove_sandbox(sandbox)

    await _at_once([functools.partial(end, sandbox) for sandbox in sandboxes])


async def _at_once(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """As many at a time as a runtime brings up."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def run(call: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await call()

    return await asyncio.gather(*map(run, calls))


def cpu_seconds_of(pid: int) -> float:
    """Of a process, since its start."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
