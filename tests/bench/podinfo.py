"""PodInfo on a full node: how long single requests take, and how long from a change until a
thousand watchers have the new list.

The server is a process of its own, as the agent is; each watcher has a connection of its own. What
the readers do costs as much as what the server does, and shares its processors.
"""

import asyncio
import contextlib
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from agent.api.podinfo.methods import PODINFO, WATCH
from agent.client.v1alpha1 import podinfo_pb2
from tests import polling
from tests.agent.api.podinfo.serving import Calls, Node, directory_for_all
from tests.bench.figures import emit

BENCH = "localapi"
WATCHERS = 1000
PODS = 110
CHANGES = 20
# Of each kind in a round; the rounds show the spread.
REQUESTS, ROUNDS = 100, 10
# Between two: faster, it would measure the pace of a user's requests (agent/api/paced_user.py).
_PAUSE_SECONDS = 0.015
_LONG_SECONDS = 120


def run() -> None:
    """Emit the figures."""
    with directory_for_all() as directory:
        asyncio.run(_measure(directory))


async def _measure(directory: pathlib.Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.podinfo", str(directory)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        async with asyncio.timeout(_LONG_SECONDS):
            await _measure_requests(Node(directory))
        async with asyncio.timeout(_LONG_SECONDS), _watching(Node(directory)) as watches:
            p99s, lags = [], []
            for _ in range(CHANGES):
                server.stdin.write(b"change\n")
                reading = [asyncio.create_task(_arrival(watch)) for watch in watches]
                begun = int(await server.stdout.readline())
                arrivals = sorted(await asyncio.gather(*reading))
                p99s.append((arrivals[len(arrivals) * 99 // 100] - begun) / 1e6)
                server.stdin.write(b"lag\n")
                lags.append(int(await server.stdout.readline()) / 1e6)
    finally:
        server.kill()
        await server.wait()
    emit(BENCH, "podinfo_fanout_p99_ms", p99s, "ms")
    emit(BENCH, "podinfo_fanout_loop_held_ms", lags, "ms")


async def _measure_requests(node: Node) -> None:
    """One after the other, as KEP-4188's objective has them: 99 % within 5 ms."""
    await polling.until("the socket", node.path.exists)
    async with node.channel() as channel:
        calls = Calls(channel)
        pods = await calls.listed()
        assert len(pods.pods) == PODS
        request = podinfo_pb2.GetPodConditionsRequest(pod_uid=pods.pods[0].pod_uid)
        for name, call in (
            ("get", lambda: calls.get(request)),
            ("list", calls.listed),
        ):
            p99s = []
            for _ in range(ROUNDS):
                taken = []
                for _ in range(REQUESTS):
                    await asyncio.sleep(_PAUSE_SECONDS)
                    begun = time.monotonic_ns()
                    await call()
                    taken.append((time.monotonic_ns() - begun) / 1e6)
                p99s.append(sorted(taken)[REQUESTS * 99 // 100 - 1])
            emit(BENCH, f"podinfo_{name}_p99_ms", p99s, "ms")


@contextlib.asynccontextmanager
async def _watching(node: Node) -> AsyncIterator[list[Any]]:
    await polling.until("the socket", node.path.exists)
    channels = [node.channel() for _ in range(WATCHERS)]
    # Bytes as they come: a thousand readers would decode in a thousand processes.
    watches = [
        channel.unary_stream(f"/{PODINFO}/{WATCH}")(b"", wait_for_ready=True)
        for channel in channels
    ]
    try:
        await asyncio.gather(*(watch.read() for watch in watches))
        yield watches
    finally:
        for channel in channels:
            await channel.close()


async def _arrival(watch: Any) -> int:
    assert await watch.read() is not grpc.aio.EOF
    return time.monotonic_ns()


async def _serve(directory: pathlib.Path) -> None:
    """One line in, one line out: `change` prints when it changed something, `lag` for how long the
    event loop was held at most since then, both in nanoseconds."""
    structlog.configure(processors=[_drop])
    node = Node(directory)
    pods = [node.add(f"pod{number}") for number in range(PODS)]
    loop = asyncio.get_running_loop()
    asked = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
    held = 0

    async def watch_loop() -> None:
        nonlocal held
        before = time.monotonic_ns()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic_ns()
            held, before = max(held, now - before), now

    async with node.serving(burst=2 * (WATCHERS + REQUESTS * ROUNDS)):
        watching: asyncio.Task[None] | None = None
        number = 0
        while line := await asked.readline():
            # It takes a processor, which single requests are to have.
            watching = watching or loop.create_task(watch_loop())
            if line == b"change\n":
                number += 1
                held = 0
                print(time.monotonic_ns(), flush=True)
                node.set(pods[number % PODS], False, f"readiness probe failed: {number}")
            else:
                print(held, flush=True)
        if watching:
            watching.cancel()


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


if __name__ == "__main__":
    asyncio.run(_serve(pathlib.Path(sys.argv[1])))
