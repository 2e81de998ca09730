"""Pods that come and go leave nothing of the agent's: eight, or a hundred by `make test-pods`."""

import asyncio
import contextlib
import os
import pathlib
import time
from collections import Counter

import pytest

from bpf import map_specs, maps, pins
from probes.netns import netns_cookie
from tests import polling
from tests.kernel import attached, dialling
from tests.node.node import Node, reason_of

pytestmark = pytest.mark.kernel

_PODS = int(os.environ.get("PODGATE_TEST_PODS") or 8)
# The kubelet starts pods as they come; runtimes bring up some at once.
_AT_ONCE = 10
# What the agent keeps by pod, or by what a pod has.
_MAPS = (
    map_specs.GATE_SLOTS,
    map_specs.MORE_RULES,
    map_specs.REPLIES,
    map_specs.ADDRESSES,
    map_specs.DROP_SOURCES,
)


async def test_created_and_deleted_pods_leave_nothing(node: Node) -> None:
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
    await asyncio.to_thread(
        polling.wait_until,
        "the kernel compares memory",
        lambda: attached.compares_memory(node.operator.pid),
    )
    node.delete("first")
    await node.end_pod(first)
    await node.report("no pods", lambda report: not report.pods)
    await node.until("the first one's gate gone", lambda: not held(node)["gate_slots"])
    if netns_cookie() is not None:
        # Compiled in parallel, and attached once it exists.
        await node.until("listener events", lambda: held(node)["anon_inode:bpf_link"])
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
        report = await node.report("all pods", lambda report: len(report.pods) == _PODS)
        assert {reason_of(report, pod.name) for pod in report.pods} == {"Enforced"}
        assert held(node)["gate_slots"] - before["gate_slots"] >= _PODS
        counts = [len(node.patches(f"pod-{number}")) for number in range(_PODS)]
        print(f"{sum(counts) / _PODS:.2f} patches for each")  # noqa: T201

        begun = time.monotonic()
        await asyncio.gather(*(end(number, one) for number, one in enumerate(sandboxes)))
        print(f"ended in {time.monotonic() - begun:.1f} s")  # noqa: T201
    await node.report("no pods", lambda report: not report.pods)
    await node.until("no more left than before", lambda: held(node) <= before)
    _, metrics = await node.get_http("/metrics")
    assert 'pod="pod-' not in metrics


def held(node: Node) -> Counter[str]:
    """How much the agent has: entries of maps, pinned links, and descriptors by what they are of.

    Of those not connections and pipes, which come and go with requests and programs, and not its
    own namespace, to which threads go back from a pod's.
    """
    installation = pins.Pins(node.operator.bpffs)
    found = Counter(links=sum(1 for _ in node.operator.bpffs.rglob("links/*")))
    for spec in _MAPS:
        with maps.Map.open(installation.map(spec), spec) as opened:
            found[spec.name] = sum(1 for _ in opened.items_by_key())
    own = os.readlink("/proc/self/ns/net")
    for fd in pathlib.Path(f"/proc/{node.operator.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(fd)
            if not target.startswith(("socket:", "pipe:")) and target != own:
                found[target] += 1
    return found
