"""Pods that come and go leave nothing of the agent's: eight, or a hundred by `make test-pods`."""

import asyncio
import os
import pathlib
import time

import pytest

from bpf import abi, maps, pins
from tests.kernel import dialling
from tests.node.node import Node, reason_of

pytestmark = pytest.mark.kernel

_PODS = int(os.environ.get("PODGATE_TEST_PODS") or 8)
# The kubelet starts pods as they come; runtimes bring up some at once.
_AT_ONCE = 10
# What the agent keeps by pod, or by what a pod has.
_MAPS = (abi.GATES, abi.COUNTERS, abi.REPLIES, abi.ADDRESSES, abi.CALLERS)


async def test_pods_that_come_and_go_leave_nothing_behind(node: Node) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def start(number: int) -> str:
        async with turns:
            node.create(f"pod-{number}")
            return await node.run_pod(f"pod-{number}")

    async def end(number: int, sandbox: str) -> None:
        async with turns:
            node.delete(f"pod-{number}")
            await node.end_pod(sandbox)

    await node.start_agent()
    # What is made once, and stays, is made for the first pod.
    node.create("first")
    first = await node.run_pod("first")
    await node.ready("first")
    node.delete("first")
    await node.end_pod(first)
    await node.told("no pods", lambda report: not report.pods)
    before = held(node)

    with dialling.dialling("198.18.16.3") as dialler:
        begun = time.monotonic()
        sandboxes = await asyncio.gather(*(start(number) for number in range(_PODS)))
        started = time.monotonic()
        await node.ready(*(f"pod-{number}" for number in range(_PODS)))
        print(f"{_PODS} pods in {started - begun:.1f} s")  # noqa: T201
        print(f"all ready {time.monotonic() - started:.2f} s later")  # noqa: T201
        await asyncio.to_thread(dialler.go_on)
        assert dialler.connected == 0
        report = await node.told("all pods", lambda report: len(report.pods) == _PODS)
        assert {reason_of(report, pod.name) for pod in report.pods} == {"Enforced"}
        assert held(node) != before
        counts = [len(node.patches(f"pod-{number}")) for number in range(_PODS)]
        print(f"{sum(counts) / _PODS:.2f} patches for each")  # noqa: T201

        begun = time.monotonic()
        await asyncio.gather(*(end(number, one) for number, one in enumerate(sandboxes)))
        print(f"ended in {time.monotonic() - begun:.1f} s")  # noqa: T201
    await node.told("no pods", lambda report: not report.pods)
    await node.until("nothing left", lambda: held(node) == before)
    _, metrics = await node.get_http("/metrics")
    assert 'pod="pod-' not in metrics


def held(node: Node) -> dict[str, object]:
    """What the agent has: descriptors by what they are of, pins, entries of maps, saved pods."""
    kinds: dict[str, int] = {}
    for fd in pathlib.Path(f"/proc/{node.operator.pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        # Connections come and go; a thread that opens sockets in pods knows the way back.
        kind = target.partition(":")[0]
        if kind != "socket" and target != os.readlink("/proc/self/ns/net"):
            kinds[kind] = kinds.get(kind, 0) + 1
    installation = pins.Pins(node.operator.bpffs)
    found: dict[str, object] = {"descriptors": kinds}
    found["pins"] = sorted(str(path) for path in node.operator.bpffs.rglob("links/*"))
    for spec in _MAPS:
        with maps.Map.open(installation.map(spec), spec) as opened:
            found[spec.name] = sum(1 for _ in opened.items())
    return found
