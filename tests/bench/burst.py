"""How long 250 pods at once take to be ready on one node: bench `burst`.

A real containerd makes sandboxes and containers, ten at a time; the API server is the tests'.
Without an agent a pod counts as ready once its container runs, without any probe. With
an agent both of its conditions are True at the API server, so its readiness probe has passed.
Both kinds of starts alternate in one run.
"""

import asyncio
import functools
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agent.default_deny import table as default_deny_table
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from bpf import pins
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.bench import figures
from tests.conftest import fresh_lab
from tests.kernel import cgroups
from tests.node.node import Node
from tests.runtime import containerd
from tests.runtime.driving import Driver

T = TypeVar("T")

_PODS = int(os.environ.get("PODGATE_BENCH_PODS") or 250)
_RUNS = 3
_AT_ONCE = 10
_PATIENCE_SECONDS = 300.0


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
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver:
        for number in range(_RUNS):
            _note(f"{_PODS} pods without an agent, {number + 1} of {_RUNS}")
            without.append(await _start_without(driver, number))
            _note(f"{_PODS} pods with an agent, {number + 1} of {_RUNS}")
            seconds, cpu_seconds = await _start_with(driver, directory, runtime, number)
            ready.append(seconds)
            cpu.append(cpu_seconds * 1000 / _PODS)
    figures.emit("burst", f"burst_{_PODS}_ready_seconds", ready, "s", baseline=without)
    ratios = [one / other for one, other in zip(ready, without, strict=True)]
    figures.emit("burst", f"burst_{_PODS}_ready_ratio", ratios, "ratio")
    figures.emit("burst", f"burst_{_PODS}_agent_cpu_ms_per_pod", cpu, "ms")


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
) -> tuple[float, float]:
    """Seconds until all are ready, and of the agent's CPU time from its start."""
    run = directory / str(number)
    run.mkdir()
    installation = pins.Pins(labs.LAB_DIRECTORY / "bpf" / str(number))
    installation.bpffs.mkdir()
    operator = AgentProcess(run, installation.bpffs)
    node = Node(runtime, driver, ApiServer(), operator)
    await node.start_api()
    write_kubeconfig(node.kubeconfig, f"http://127.0.0.1:{node.server.port}")
    names = [f"with-{number}-{pod}" for pod in range(_PODS)]
    sandboxes: list[str] = []
    with cgroups.cgroup() as kubelet:
        operator.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        try:
            await node.start_agent()
            await node.serves("/readyz", 200)
            begun = time.monotonic()
            for name in names:
                node.create(name)
            sandboxes = await _at_once([functools.partial(_start, driver, name) for name in names])
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not all(node.is_ready(name) for name in names):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            seconds = time.monotonic() - begun
            cpu_seconds = _cpu_seconds(operator.pid)
        finally:
            await node.stop_agent(signal.SIGKILL)
            await _end(driver, sandboxes)
            await node.stop_api()
            await default_deny_table.remove()
            installation.remove_everything()
    return seconds, cpu_seconds


async def _start(driver: Driver, name: str) -> str:
    sandbox = await driver.run_sandbox(name)
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


def _cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
