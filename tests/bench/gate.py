"""What the gate costs: bench `gate`. Every comparison is interleaved within one run.

Packets are timed by BPF_PROG_TEST_RUN against an empty program, in nanoseconds above it. Traffic is
real: TCP between two pods over the node, with gates and without, in turn.
"""

import asyncio
import contextlib
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable

from agent.demo import lab
from agent.demo.lab import BPFFS, Lab, LabPod
from bpf import abi, loader, pins, syscalls
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests.bench import figures
from tests.kernel import foreign, frames, skb

_RUNS = 9
_REPEAT = 200_000
_BULK_BYTES = 256 << 20
_REQUESTS = 10_000
_CONNECTS = 2_000
_PORT, _CONNECT_PORT = 8080, 8081
_GOOD_IFINDEX, _FOREIGN_IFINDEX = 1, 4242


def main() -> None:
    lab.isolate()
    with Lab() as network:
        installation = pins.Pins(BPFFS)
        loaded = asyncio.run(loader.load(installation))
        try:
            _nanoseconds(loaded)
            _traffic(network, Gates(loaded, installation))
        finally:
            loaded.close()
            installation.remove_everything()


def _nanoseconds(loaded: loader.Loaded) -> None:
    _note("nanoseconds per packet above an empty program")
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address("198.18.1.1"))
    syn = frames.segment(ends, frames.SYN)
    key = _GOOD_IFINDEX.to_bytes(4, "little")
    config = GateConfig(Mode.ENFORCE, (frames.address("198.18.1.1"),))
    loaded.map(abi.GATES).set(key, bytes(config.pack()))
    loaded.map(abi.COUNTERS).set(key, bytes(loaded.map(abi.COUNTERS).value_size))
    empty = foreign.load_program(skb.TCX_NEXT)
    gate = loaded.programs[abi.GATE_EGRESS]
    samples: dict[str, list[float]] = {"ns_forwarded": [], "ns_node_sent": []}
    baselines: list[float] = []
    for _ in range(_RUNS):
        baseline = _run_ns(empty, syn, 0)
        baselines.append(baseline)
        samples["ns_forwarded"].append(_run_ns(gate, syn, _FOREIGN_IFINDEX) - baseline)
        samples["ns_node_sent"].append(_run_ns(gate, syn, 0) - baseline)
    for name, values in samples.items():
        figures.emit("gate", f"{name}_over_empty", values, "ns")
    _note(f"the empty program itself: {statistics.median(baselines)} ns")
    loaded.map(abi.GATES).delete(key)
    loaded.map(abi.COUNTERS).delete(key)


def _run_ns(program_fd: int, frame: bytes, ingress_ifindex: int) -> int:
    context = skb.context(_GOOD_IFINDEX, ingress_ifindex)
    return syscalls.run_program(program_fd, frame, context, _REPEAT)[1]


def _traffic(network: Lab, gates: Gates) -> None:
    server, client = network.add_pod("server", 1), network.add_pod("client", 2)
    with (
        server.listen(_PORT) as talking,
        server.listen(_CONNECT_PORT) as accepting,
        _listen_on_node() as node_accepting,
    ):
        for serve, sock in ((_talk, talking), (_accept, accepting), (_accept, node_accepting)):
            threading.Thread(target=serve, args=(sock,), daemon=True).start()
        for figure, measure in (
            ("throughput", lambda: _throughput(client, server.ipv4)),
            ("request_rate", lambda: _request_rate(client, server.ipv4)),
            ("connect_rate", lambda: _connect_rate(_pod_socket(client), server.ipv4)),
            ("node_connect_rate", lambda: _connect_rate(_node_socket, "127.0.0.1")),
        ):
            _note(f"{figure}, with gates and without in turn")
            _compare(figure, measure, gates, (server, client))
    gates.close()


def _compare(
    figure: str, measure: Callable[[], float], gates: Gates, pods: tuple[LabPod, ...]
) -> None:
    """Ratios of with over without, each from two neighbouring measurements."""
    measure()
    ratios = []
    for _ in range(_RUNS):
        for pod in pods:
            gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
            gates.remember(pod.ifindex)
        gated = measure()
        for pod in pods:
            gates.remove(pod.ifindex)
        ratios.append(gated / measure())
    figures.emit("gate", figure, ratios, "ratio to no podgate")


def _talk(listener: socket.socket) -> None:
    """Answer one connection after the other: one byte for one byte, and nothing for more."""
    listener.settimeout(None)
    while True:
        peer, _ = listener.accept()
        with peer:
            while data := peer.recv(1 << 18):
                if len(data) == 1:
                    peer.sendall(data)


def _accept(listener: socket.socket) -> None:
    """Take connections and reset them, so that none lingers."""
    listener.settimeout(None)
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()


def _throughput(client: LabPod, address: str) -> float:
    """Bytes a second over one connection, until the server has read all."""
    block = bytes(1 << 20)
    with _pod_socket(client)() as sock:
        sock.settimeout(30)
        sock.connect((address, _PORT))
        started = time.perf_counter()
        for _ in range(_BULK_BYTES // len(block)):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)
        return _BULK_BYTES / (time.perf_counter() - started)


def _request_rate(client: LabPod, address: str) -> float:
    """Bytes there and back a second, one after the other."""
    with _pod_socket(client)() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((address, _PORT))
        started = time.perf_counter()
        for _ in range(_REQUESTS):
            sock.sendall(b"x")
            sock.recv(1)
        return _REQUESTS / (time.perf_counter() - started)


def _connect_rate(make: Callable[[], socket.socket], address: str) -> float:
    """Connections a second, one after the other, each ended by the server."""
    started = time.perf_counter()
    for _ in range(_CONNECTS):
        # The reset may come before connect() has looked.
        with make() as sock, contextlib.suppress(ConnectionResetError):
            sock.connect((address, _CONNECT_PORT))
            sock.recv(1)
    return _CONNECTS / (time.perf_counter() - started)


def _pod_socket(pod: LabPod) -> Callable[[], socket.socket]:
    return lambda: pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)


def _node_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _listen_on_node() -> socket.socket:
    sock = _node_socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", _CONNECT_PORT))
    sock.listen(128)
    return sock


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
