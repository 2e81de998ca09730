"""Floods by one user: how much work they are, by counts, and that others do not notice."""

import asyncio
import contextlib
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from agent.api.paced_user import Pace
from tests import polling
from tests.agent.api import flood
from tests.agent.api.podinfo.serving import Node

_ROOT = pathlib.Path(__file__).parents[4]
NOBODY = 65534
# Nothing comes back within a test.
PACE = Pace(
    requests_per_second=0.001,
    requests_burst=50,
    connections_per_second=0.001,
    connections_burst=20,
)
# Of requests of some 140 octets, in one read of 4 KiB.
_PER_READ = 30

_AS_NOBODY = f"""
import os, sys
from agent.client import podinfo as client
asking = client.PodInfoClient(sys.argv[1])
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for _ in range(3):
    print(*[pod.pod_name for pod in asking.list(30).pods])
"""


@contextlib.asynccontextmanager
async def flooded(made: flood.Flood | flood.Connections) -> AsyncIterator[None]:
    """The flood runs inside, bounded in count and time."""
    running = asyncio.create_task(asyncio.to_thread(made.run, count=10**7, seconds=120))
    try:
        yield
    finally:
        made.is_stopped = True
        await running


def calls(node: Node) -> int:
    """Calls that reached Python."""
    return node.server.requests.total()


@pytest.mark.parametrize("kind", ["requests", "resets", "streams"])
async def test_flood_is_as_much_work_as_its_pace_admits(node: Node, kind: str) -> None:
    node.add("web")
    async with node.serving(pace=PACE):
        flooding = flood.Flood(node.path, flood.FLOODS[kind])
        async with flooded(flooding):
            await polling.until("it waits", lambda: node.server.pauses > 0)
            # More than the proxy reads fits into the kernel's buffers.
            await polling.until("more was sent", lambda: flooding.sent > PACE.requests_burst)
        assert calls(node) <= PACE.requests_burst + _PER_READ
        assert node.server.pauses == 1


@pytest.mark.parametrize("kind", ["pings", "settings"])
async def test_flood_of_control_frames_is_not_read(node: Node, kind: str) -> None:
    node.add("web")
    async with node.serving(pace=PACE):
        async with flooded(flood.Flood(node.path, flood.FLOODS[kind])):
            # gRPC closes some connections before they are paused.
            await polling.until(
                "a limit",
                lambda: node.server.pauses > 0 or node.server.rejected["connections"] > 0,
            )
        assert calls(node) == 0


async def test_flood_of_connections_is_rejected_before_grpc(node: Node) -> None:
    node.add("web")
    async with node.serving(connections=40, pace=PACE):
        flooding = flood.Connections(node.path)
        async with flooded(flooding):
            await polling.until("rejections", lambda: node.server.rejected["connections"] > 100)
        # Those that a user may have at once, and those that it may close soon. The others wait in
        # the kernel's queue until they are rejected.
        admitted = 20 + PACE.connections_burst
        await polling.until(
            "the rest is rejected",
            lambda: flooding.made - node.server.rejected["connections"] <= admitted,
        )
        await polling.until("no connection", lambda: node.server.connections == 0)


@pytest.mark.kernel
async def test_other_users_are_served_during_a_flood(node: Node) -> None:
    node.add("web")
    async with node.serving(pace=PACE), flooded(flood.Flood(node.path, flood.request)):
        await polling.until("the flood waits", lambda: node.server.pauses > 0)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _AS_NOBODY, f"unix://{node.path}"),
            cwd=_ROOT,
            stdout=subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            output, _ = await child.communicate()
        assert output.decode().split() == ["web"] * 3


async def test_what_waits_is_not_lost(node: Node) -> None:
    node.add("web")
    pace = Pace(requests_per_second=20.0, requests_burst=10)
    async with node.serving(pace=pace):
        flooding = flood.Flood(node.path, flood.request)
        # Half of them come in one read.
        await asyncio.to_thread(flooding.run, count=60, seconds=120)
        assert flooding.answered == calls(node) == 60
        assert node.server.pauses >= 1
        assert node.server.errors == {}
