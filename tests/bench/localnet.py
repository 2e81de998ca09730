"""Service endpoints under load, for the bench `localapi`.

Whole states: 10,000 services of two ports and five endpoints, from the request of a client in
another process to its last service read. Changes: 1,000 such services; one becomes another, and a
follower in another process reports when it had the state with it. Differences: their bytes for
10,000 services, by the bytes of the full states after the same changes. Revisions:
tests/agent/services/api/churn.py in simulated time.
"""

import asyncio
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

import looptime
import structlog

from agent.services.api.objects import EndpointSlice
from agent.services.api.publisher import COALESCING_SECONDS, ServicePublisher
from agent.services.api.server import ServicesServer
from agent.services.api.store import ServiceStore
from agent.services.api.view import ServicesSnapshot
from tests.agent.services.api import churn
from tests.agent.services.api.making import NODE, endpoint_json, endpoint_slice, service
from tests.bench import figures

_SERVICES = 10_000
_FOLLOWED_SERVICES = 1_000
_RUNS = 9
_CHANGES = 300
_REVISIONS = 60
_PORTS = [{"name": "http", "port": 80}, {"name": "metrics", "port": 9090}]
_SLICE_PORTS = [{"name": "http", "port": 8080}, {"name": "metrics", "port": 9091}]
_HERE = "local-pod"

# Prints how long each whole state took, in seconds.
_ASKER = """
import sys, time
from agent.services.client.services import ServicesClient
client = ServicesClient(sys.argv[1])
client.next()
for _ in range(int(sys.argv[2])):
    client.instance_id = client.rev = 0
    began = time.monotonic()
    state = client.next()
    print(time.monotonic() - began, len(state.services), flush=True)
"""

# Prints when each revision was there, by the clock that all processes share.
_FOLLOWER = """
import sys, time
from agent.services.client.services import ServicesClient
for state in ServicesClient(sys.argv[1]):
    print(state.rev, time.monotonic(), flush=True)
"""


def run() -> None:
    """Emit all figures."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(_whole_states())
    asyncio.run(_changes())
    asyncio.run(_differences())
    _revisions()


@contextlib.asynccontextmanager
async def _served(count: int, ready: set[str]) -> AsyncIterator[tuple[ServicePublisher, str]]:
    """A publisher of `count` services and its socket. ready: pods of `_HERE` that are ready."""
    publisher = ServicePublisher(
        ServiceStore(NODE, readiness=lambda uid, address: (not ready) if uid == _HERE else None)
    )
    for number in range(count):
        name = f"service-{number:05}"
        address = f"198.18.{number // 250}.{number % 250 + 1}"
        publisher.store.set_service(
            None, service(name, clusterIP=address, clusterIPs=[address], ports=_PORTS)
        )
        publisher.store.set_slice(None, _slice(number))
    publisher.complete()
    running = asyncio.create_task(publisher.run())
    with tempfile.TemporaryDirectory() as directory:
        socket = pathlib.Path(directory) / "localnet" / "localnet.sock"
        inner = pathlib.Path(directory) / "inner" / "grpc.sock"
        async with ServicesServer(publisher, path=socket, inner=inner).serve():
            await publisher.wait_newer(0, 0)
            yield publisher, f"unix:{socket}"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _slice(number: int, last: int = 5) -> EndpointSlice:
    name = f"service-{number:05}"
    return endpoint_slice(
        *(
            endpoint_json(
                f"198.19.{number // 40 % 256}.{number % 40 * 6 + index}",
                node=NODE if index == 1 else "other",
                uid=_HERE if index == 1 and number == 0 else f"{number}-{index}",
            )
            for index in (1, 2, 3, 4, last)
        ),
        service=name,
        name=name,
        ports=_SLICE_PORTS,
    )


@contextlib.asynccontextmanager
async def _client(code: str, *arguments: str) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _whole_states() -> None:
    async with _served(_SERVICES, set()) as (publisher, target):
        assert publisher.snapshot is not None
        size = _bytes(publisher.snapshot)
        async with _client(_ASKER, target, str(_RUNS)) as told:
            lines = [(await told.readline()).split() for _ in range(_RUNS)]
        assert {int(count) for _, count in lines} == {_SERVICES}
    times_ms = [float(seconds) * 1000 for seconds, _ in lines]
    figures.emit("localapi", "full_state_10000_services_ms", times_ms, "ms")
    figures.emit("localapi", "full_state_mb", [size / 1e6], "MB")


async def _changes() -> None:
    """Changes of the API server, with their coalescing window, and changes of a local pod."""
    ill: set[str] = set()
    async with (
        _served(_FOLLOWED_SERVICES, ill) as (publisher, target),
        _client(_FOLLOWER, target) as told,
    ):
        await told.readline()
        by_api, by_probes = [], []
        for number in range(_CHANGES):
            began = time.monotonic()
            publisher.store.set_slice(None, _slice(number, last=6))
            by_api.append((await _arrival(told)) - began)
            ill ^= {_HERE}
            began = time.monotonic()
            publisher.store.pod_changed(frozenset((_HERE,)))
            by_probes.append((await _arrival(told)) - began)
    for figure, times in (("change", by_api), ("local_change", by_probes)):
        p99s = [_p99(part) * 1000 for part in _thirds(times)]
        figures.emit("localapi", f"{figure}_to_client_p99_ms", p99s, "ms")
        halves = [statistics.median(part) * 1000 for part in _thirds(times)]
        figures.emit("localapi", f"{figure}_to_client_p50_ms", halves, "ms")


async def _differences() -> None:
    """Revisions of 1 to 20 changed services each, as roll-outs make them."""
    async with _served(_SERVICES, set()) as (publisher, _):
        ratios = []
        for number in range(_REVISIONS):
            rev = publisher.views.default.rev
            for changed in range(number % 20 + 1):
                publisher.store.set_slice(None, _slice(number * 100 + changed, last=6))
            position = (publisher.instance_id, rev)
            delta = await publisher.wait_newer(*position, accepts_delta=True)
            full = await publisher.wait_newer(*position)
            assert (delta.is_delta, delta.rev) == (True, full.rev)
            ratios.append(_bytes(delta) / _bytes(full))
    means = [statistics.mean(part) for part in _thirds(ratios)]
    figures.emit("localapi", "delta_bytes_ratio", means, "1", digits=6)


def _bytes(snapshot: ServicesSnapshot) -> int:
    return sum(map(len, snapshot.messages()))


async def _arrival(told: asyncio.StreamReader) -> float:
    line = await asyncio.wait_for(told.readline(), 10)
    return float(line.split()[1])


def _thirds(times: list[float]) -> Iterator[list[float]]:
    size = len(times) // 3
    return (times[start : start + size] for start in range(0, 3 * size, size))


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def _revisions() -> None:
    # Nothing but timers wakes this loop, so it need not look around for long before it jumps.
    made = looptime.new_event_loop(noop_cycles=3, _enabled=True)
    with contextlib.closing(made) as loop:
        events, mattering, revisions = loop.run_until_complete(_churn())
    sys.stderr.write(
        f"churn: {churn.SERVICES} services, {churn.SECONDS // 60} simulated minutes, {events} "
        f"events, {mattering / events:.2%} of them made to matter here, gathered for "
        f"{COALESCING_SECONDS * 1000:.0f} ms, {revisions} revisions\n"
    )
    figures.emit("localapi", "churn_events", [events], "events")
    figures.emit("localapi", "revisions_per_event", [revisions / events], "1")


async def _churn() -> tuple[int, int, int]:
    publisher = ServicePublisher(ServiceStore("node0", readiness=lambda uid, address: None))
    first = churn.first_slices()
    for one in churn.services():
        publisher.store.set_service(None, one)
    for content in first:
        publisher.store.set_slice(None, churn.as_slice(content))
    publisher.store.set_zone("a")
    publisher.complete()
    running = asyncio.create_task(publisher.run())
    await publisher.wait_newer(0, 0)
    loop = asyncio.get_running_loop()
    began, events, mattering = loop.time(), 0, 0
    for change in churn.changes(first):
        if (wait := began + change.at - loop.time()) > 0:
            await asyncio.sleep(wait)
        publisher.store.set_slice(change.old, change.new)
        events += 1
        mattering += change.matters
    await asyncio.sleep(1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return events, mattering, publisher.rev - 1
