"""A hub of many nodes, and the restart of an agent without its source; for the bench `localapi`.

Hub: one process serves 1,000 services of ten endpoints to 1,000 simulated nodes, each with a
connection of its own by mutual TLS and the request that agents send, while ten services change per
second. The nodes are in another process, and decode only headers. CPU time is that of the hub's
process, by getrusage, so what runs beside it hardly counts.
"""

import asyncio
import contextlib
import json
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

import grpc
import structlog

from agent.api.tls import CurrentTls, TlsFiles
from agent.client import base
from agent.lab import lab
from agent.lab.agent_process import AgentProcess
from agent.services.api import decode
from agent.services.api.nodes_server import NodesServer
from agent.services.api.publisher import ServicePublisher
from agent.services.api.store import ServiceStore
from agent.services.client.services import METHOD, ServicesClient, ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.settings import localnet_socket
from tests import polling
from tests.agent.api.certificates import Authority
from tests.agent.services.api.making import (
    endpoint_json,
    endpoint_slice,
    no_readiness,
    service,
    service_json,
    slice_json,
)
from tests.bench import figures

_NODES = 1000
_SERVICES = 1000
_CHANGES_PER_SECOND = 10
_SECONDS = 20.0
_RUNS = 3
_RESTARTS = 5
_WAIT_SECONDS = 300.0


def run() -> None:
    """Emit all figures."""
    _hub()
    # In namespaces of its own.
    subprocess.run([sys.executable, "-m", "tests.bench.hubs", "restart"], check=True)


def _hub() -> None:
    percents, rates = [], []
    with tempfile.TemporaryDirectory() as directory:
        Authority.make().files(pathlib.Path(directory))
        for _ in range(_RUNS):
            made = subprocess.run(
                [sys.executable, "-m", "tests.bench.hubs", "serve", directory],
                check=True,
                stdout=subprocess.PIPE,
                timeout=_WAIT_SECONDS,
            )
            found = json.loads(made.stdout)
            percents.append(found["cpu_seconds"] / found["seconds"] * 100)
            rates.append(found["states"] / found["seconds"] / _NODES)
    figures.emit("localapi", "central_1000_nodes_cpu_percent", percents, "%")
    figures.emit("localapi", "central_1000_nodes_states_per_node_second", rates, "1/s")


def _files(directory: str) -> TlsFiles:
    path = pathlib.Path(directory)
    return TlsFiles(path / "ca.crt", path / "tls.crt", path / "tls.key")


def _addresses(number: int, last: int) -> list[str]:
    return [f"198.19.{number // 25}.{number % 25 * 10 + index}" for index in (*range(9), last)]


async def _serve(directory: str) -> None:
    """The hub's process. Prints what it used."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    store = ServiceStore("", readiness=no_readiness)
    publisher = ServicePublisher(store, is_for_all_nodes=True)
    for number in range(_SERVICES):
        store.set_service(None, service(f"service-{number}"))
        _change(store, number, 9)
    publisher.complete()
    running = asyncio.create_task(publisher.run())
    # All simulated nodes have one address.
    served = NodesServer(
        publisher,
        ("127.0.0.1", 0),
        CurrentTls(_files(directory)),
        inner=pathlib.Path(directory, "inner", "nodes.sock"),
        connections_of_address=2 * _NODES,
        burst=1 << 30,
        calls_per_user=2 * _NODES,
    )
    async with served.serve() as port:
        nodes = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.hubs", "nodes", directory, str(port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert nodes.stdout is not None
        assert nodes.stdin is not None
        try:
            await nodes.stdout.readline()
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            count_before = await _count(nodes)
            for step in range(int(_SECONDS * _CHANGES_PER_SECOND)):
                _change(store, step * 7 % _SERVICES, 9 - step % 2)
                await asyncio.sleep(
                    max(0, began + (step + 1) / _CHANGES_PER_SECOND - time.monotonic())
                )
            after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
            states = await _count(nodes) - count_before
        finally:
            with contextlib.suppress(ProcessLookupError):
                nodes.kill()
            await nodes.wait()
    running.cancel()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stdout.write(json.dumps({"cpu_seconds": used, "seconds": seconds, "states": states}))


async def _count(nodes: asyncio.subprocess.Process) -> int:
    """How many states all nodes have received."""
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    nodes.stdin.write(b"\n")
    return int(await nodes.stdout.readline())


def _change(store: ServiceStore, number: int, last: int) -> None:
    name = f"service-{number}"
    found = [
        endpoint_json(address, node=f"node-{index}", uid=f"{number}-{index}")
        for index, address in enumerate(_addresses(number, last))
    ]
    store.set_slice(None, endpoint_slice(*found, name=name, service=name))


async def _nodes(directory: str, port: int) -> None:
    """The nodes' process: prints a line once all have a state, and the number of received states
    for each line that it reads."""
    content = await asyncio.to_thread(_files(directory).read)
    credentials = content.channel_credentials()
    received = [0] * _NODES
    # As many handshakes at once as a cluster's agents would hardly make.
    room = asyncio.Semaphore(20)
    async with asyncio.TaskGroup() as group:
        for node in range(_NODES):
            group.create_task(_node(node, f"127.0.0.1:{port}", credentials, received, room))
        await polling.until("a state at each node", lambda: min(received), seconds=_WAIT_SECONDS)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(f"{sum(received)}\n")
            sys.stdout.flush()


async def _node(
    number: int,
    target: str,
    credentials: grpc.ChannelCredentials,
    received: list[int],
    room: asyncio.Semaphore,
) -> None:
    # A connection of its own for each channel.
    options = [("grpc.use_local_subchannel_pool", 1)]
    request = decode.complete_filter()
    request.accepts_delta = True
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        method = channel.unary_stream(METHOD)
        async with room:
            await _receive(method, request)
        received[number] += 1
        while True:
            await _receive(method, request)
            received[number] += 1


async def _receive(method: grpc.aio.UnaryStreamMultiCallable, request: pb.NextFilter) -> None:
    is_first = True
    async for item in method(request.SerializeToString()):
        if is_first:
            header = pb.NextItem.FromString(item)
            request.instance_id, request.rev = header.next.instance_id, header.next.rev
        is_first = False


def _restart() -> None:
    """From the start of an agent, whose source is away, to the saved state at a client."""
    times_ms = []
    with tempfile.TemporaryDirectory() as directory, lab.Lab():
        agent = AgentProcess(pathlib.Path(directory))
        path = pathlib.Path(directory) / "services.json"
        items = []
        for number in range(_SERVICES):
            name = f"service-{number}"
            found = slice_json(
                *(endpoint_json(address) for address in _addresses(number, 9)),
                name=name,
                service=name,
            )
            items.append({"apiVersion": "v1", "kind": "Service", **service_json(name)})
            items.append({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **found})
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        target = f"unix://{localnet_socket(agent.run_directory)}"
        for run in range(_RESTARTS + 1):
            began = time.monotonic()
            agent.start("--services-from", str(path))
            client = ServicesClient(target)
            state = _first_state(client, began + _WAIT_SECONDS)
            seconds = time.monotonic() - began
            client.close()
            assert len(state.services) == _SERVICES
            if run:
                assert state.saved_at is not None
                times_ms.append(seconds * 1000)
            agent.stop(signal.SIGTERM)
            path.unlink(missing_ok=True)
    figures.emit("localapi", "restart_without_api_ms", times_ms, "ms")


def _first_state(client: ServicesClient, until: float) -> ServicesState:
    while True:
        try:
            return client.once()
        except base.StreamError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


if __name__ == "__main__":
    if sys.argv[1] == "restart":
        lab.isolate()
        _restart()
    elif sys.argv[1] == "serve":
        asyncio.run(_serve(sys.argv[2]))
    else:
        asyncio.run(_nodes(sys.argv[2], int(sys.argv[3])))
