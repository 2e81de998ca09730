"""What services cost who connects, with ten thousand of them: figures of bench `localapi`.

Connections to a pod by its service's cluster IP with ten thousand services, by each backend and by
rules as kube-proxy has them, against connections to the pod itself without any proxy; all of these
take turns.
"""

import asyncio
import contextlib
import pathlib
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy import nftables
from agent.services.proxy.backend import Backend
from agent.services.proxy.combined import CombinedBackend
from agent.services.proxy.ebpf import EbpfBackend
from agent.services.proxy.frontends import FrontendTable
from bpf import pins
from bpf.services import links as service_links
from tests.bench import figures, kube_proxy_rules
from tests.kernel import cgroups
from tests.proxy import dying, scene
from tests.proxy.conftest import within

_PROXIES = ("ebpf", "nft", "kube_proxy")
_SERVICES = 10_000
_RUNS = 9
_CONNECTS = 1500
_PORT = 8080
# The kernel frees what was removed later, on the same CPUs.
_SETTLING_SECONDS = 3.0
_DEATHS = 10
# Ends with RST: no TIME-WAIT takes the ports of the next run.
_NO_LINGER = struct.pack("ii", 1, 0)


def main() -> None:
    labs.isolate()
    sys.stderr.write(f"bench: connects to one of {_SERVICES} services and to the pod, in turn\n")
    with labs.Lab() as network, scene.routed():
        pod = network.add_pod("served", 1)
        with pod.listen(_PORT) as listener:
            listener.listen(4096)
            _measure(pod, listener)
        network.remove_pod(pod.name)
        _measure_deaths(network)


def _measure(pod: labs.LabPod, listener: socket.socket) -> None:
    """All in turn, so that each ratio is of neighbours in time."""
    place = scene.cluster_ip(4, _SERVICES // 2)
    plain: list[float] = []
    translated: dict[str, list[float]] = {name: [] for name in _PROXIES}
    with cgroups.cgroup() as cgroup, within(cgroup):
        _rate(listener, pod.ipv4, _PORT)  # to warm up
        for _ in range(_RUNS):
            plain.append(_rate(listener, pod.ipv4, _PORT))
            for name, rates in translated.items():
                with _proxied(name, cgroup, pod):
                    rates.append(_rate(listener, place, scene.SERVICE_PORT))
    for name, rates in translated.items():
        figures.emit("localapi", f"{name}_connects_per_cpu_s", rates, "1/s", baseline=plain)
        _emit_ratios(f"{name}_connect_ratio", rates, plain)
    for name in ("ebpf", "nft"):
        _emit_ratios(f"{name}_to_kube_proxy_ratio", translated[name], translated["kube_proxy"])


def _emit_ratios(name: str, rates: list[float], others: list[float]) -> None:
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    figures.emit("localapi", name, ratios, figures.RATIO)


def _measure_deaths(network: labs.Lab) -> None:
    sys.stderr.write(f"bench: {_DEATHS} of {_DEATHS + 1} pods' listeners are closed in turn\n")
    pods = [network.add_pod(f"web-{number}", number + 1) for number in range(_DEATHS + 1)]

    async def end_all_but_one(directory: pathlib.Path, backend: str) -> list[float]:
        installation = pins.Pins(labs.BPFFS)
        async with dying.chain(directory, installation, pods, cgroup, backend=backend) as chain:
            return [await chain.end(pod) for pod in pods[:-1]]

    for backend, name in (("ebpf", ""), ("nft", "nft_")):
        with cgroups.cgroup() as cgroup, tempfile.TemporaryDirectory() as directory:
            milliseconds = asyncio.run(end_all_but_one(pathlib.Path(directory), backend))
        figures.emit("localapi", f"{name}listener_end_to_avoided_ms", milliseconds, "ms")


@contextlib.contextmanager
def _proxied(name: str, cgroup: cgroups.Cgroup, pod: labs.LabPod) -> Iterator[None]:
    services = [
        scene.service(f"s{number}", scene.endpoints(pod), number=number)
        for number in range(_SERVICES)
    ]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if name == "kube_proxy":
            kube_proxy_rules.install(services)
            stack.callback(kube_proxy_rules.remove)
        else:
            stack.enter_context(_backed(name, cgroup, services))
        sys.stderr.write(f"bench: {name} took {(time.monotonic() - began) * 1000:.0f} ms for all\n")
        yield
    time.sleep(_SETTLING_SECONDS)


@contextlib.contextmanager
def _backed(
    name: str, cgroup: cgroups.Cgroup, services: list[endpoints_pb2.ServiceEndpoints]
) -> Iterator[None]:
    async def open_backend() -> Backend:
        packets = nftables.NftBackend()
        if name == "nft":
            return packets
        sockets = await EbpfBackend.open(labs.BPFFS, cgroup.directory)
        return await CombinedBackend.open(sockets, packets)

    backend = asyncio.run(open_backend())
    asyncio.run(backend.apply(FrontendTable().update(services, ())))
    try:
        yield
    finally:
        asyncio.run(nftables.remove())
        if name == "ebpf":
            service_links.detach(pins.Pins(labs.BPFFS))
        asyncio.run(backend.close())


def _rate(listener: socket.socket, address: str, port: int) -> float:
    """Connections, one after the other, each accepted, in a second of this process' CPU time: other
    load on the machine has little effect on it."""
    began = time.process_time()
    for _ in range(_CONNECTS):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            sock.connect((address, port))
            listener.accept()[0].close()
    return _CONNECTS / (time.process_time() - began)


if __name__ == "__main__":
    main()
