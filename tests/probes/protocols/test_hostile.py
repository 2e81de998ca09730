"""Whatever a server does, each kind of probe ends in time, holds little and leaves nothing."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest

from probes.engine import prober
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import Grpc, Handler, HttpGet, Probe, TcpSocket
from tests.probes import hostile_server, servers
from tests.probes.conftest import Sandbox
from tests.probes.single_probe import Deadline

pytestmark = pytest.mark.kernel

# What the first probe of a kind imports is not what it holds.
importlib.import_module("probes.protocols.h2c")

TIMEOUT_SECONDS = 0.15
TRIES = 20
HELD_MAX_BYTES = 1_000_000

# These are healthy: the answer's head is good, and enough of the body came.
HEALTHY = {
    ("endless-body", "http"),
    ("over-tls-endless-body", "https"),
    ("h2-endless-data", "h2c"),
}


@pytest.fixture(scope="module")
def ports(
    shared_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, int]]:
    cert, key = servers.certificate(tmp_path_factory.mktemp("tls"))
    process = subprocess.Popen(
        [
            *("nsenter", f"--net={shared_sandbox.path}", sys.executable),
            *("-m", "tests.probes.hostile_server", shared_sandbox.v4, str(cert), str(key)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(timeout=10)
        process.stdout.close()


def handlers(port: int) -> dict[str, Handler]:
    return {
        "http": HttpGet(port),
        "https": HttpGet(port, scheme="HTTPS"),
        "h2c": HttpGet(port, protocol="HTTP2"),
        "grpc": Grpc(port),
        "grpc over TLS": Grpc(port, mode="TLS"),
    }


async def run_probe(sandbox: Sandbox, handler: Handler) -> ProbeOutcome:
    probe = Probe(handler, timeout_seconds=TIMEOUT_SECONDS)
    return await prober.probe(probe, netns=sandbox.netns, addresses=(sandbox.v4,))


@pytest.mark.parametrize("name", list(hostile_server.names()))
async def test_probe_ends_in_time_holds_little_and_leaves_nothing(
    shared_sandbox: Sandbox, ports: dict[str, int], name: str
) -> None:
    # The first socket of a thread leaves it a descriptor of its way home.
    await run_probe(shared_sandbox, TcpSocket(ports[name]))
    before = set(os.listdir("/proc/self/fd"))
    for kind, handler in handlers(ports[name]).items():
        # The kernel processes a flood in this thread's time, and other processes take theirs. A
        # probe that a server can delay is late at each try.
        late = []
        for _ in range(TRIES):
            tracemalloc.start()
            deadline = Deadline()
            try:
                outcome = await run_probe(shared_sandbox, handler)
                held = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            # On a busy machine what a good server sends is late, too.
            is_good = outcome.passed or (name, kind) not in HEALTHY
            if is_good and deadline.is_kept(outcome, TIMEOUT_SECONDS):
                break
            late.append(outcome.duration_seconds)
        assert len(late) < TRIES, (kind, late)
        assert held < HELD_MAX_BYTES, kind
        assert outcome.passed is ((name, kind) in HEALTHY), kind
        assert len(outcome.message) <= 10 * 1024
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("name", ["silent", "garbage", "endless-body", "half-close"])
async def test_open_port_is_enough_for_a_tcp_probe(
    shared_sandbox: Sandbox, ports: dict[str, int], name: str
) -> None:
    outcome = await run_probe(shared_sandbox, TcpSocket(ports[name]))
    assert outcome.result is ProbeResult.SUCCESS


async def test_hostile_pods_do_not_hold_up_a_good_one(
    shared_sandbox: Sandbox, ports: dict[str, int]
) -> None:
    hostile = [
        asyncio.create_task(run_probe(shared_sandbox, handler))
        for port in ports.values()
        for handler in handlers(port).values()
    ]
    answer = servers.saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    async with servers.serving(shared_sandbox.listen(), answer) as port:
        probe = Probe(HttpGet(port), timeout_seconds=30.0)
        good = await prober.probe(probe, netns=shared_sandbox.netns, addresses=(shared_sandbox.v4,))
    assert good.passed
    # Two hundred floods at once share one CPU: all end, each a little later for the others.
    async with asyncio.timeout(30):
        await asyncio.gather(*hostile)
