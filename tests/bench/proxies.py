"""What services cost who connects, with ten thousand of them: figures of bench `localapi`.

Connections to a pod by its service's cluster IP with ten thousand services, against connections to
the pod itself without any proxy; the two take turns.
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
from agent.proxy import nftables
from agent.proxy.backends import Backend
from agent.proxy.ebpf import EbpfBackend
from agent.proxy.frontends import FrontendTable
from bpf import pins
from bpf.services import links as service_links
from tests.bench import figures
from tests.kernel import cgroups
from tests.proxy import dying, scene
from tests.proxy.conftest import within

_SERVICES = 10_000
_RUNS = 9
_CONNECTS = 1500
_PORT = 8080
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
            for name in ("ebpf", "nft"):
                _measure(name, pod, listener)
        network.remove_pod(pod.name)
        _measure_deaths(network)


def _measure(name: str, pod: labs.LabPod, listener: socket.socket) -> None:
    place = scene.cluster_ip(4, _SERVICES // 2)
    with cgroups.cgroup() as cgroup, within(cgroup):
        plain, translated = [], []
        _rate(listener, pod.ipv4, _PORT)  # to warm up
        for _ in range(_RUNS):
            plain.append(_rate(listener, pod.ipv4, _PORT))
            with _proxied(name, cgroup, pod):
                translated.append(_rate(listener, place, scene.SERVICE_PORT))
    ratios = [one / other for one, other in zip(translated, plain, strict=True)]
    figures.emit("localapi", f"{name}_connects_per_s", translated, "1/s", baseline=plain)
    figures.emit("localapi", f"{name}_connect_ratio", ratios, "")


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
    backend: Backend
    if name == "nft":
        backend = nftables.NftBackend()
    else:
        backend = asyncio.run(EbpfBackend.open(labs.BPFFS, cgroup.directory))
    change = FrontendTable().update(
        [
            scene.service(f"s{number}", scene.endpoints(pod), number=number)
            for number in range(_SERVICES)
        ],
        (),
    )
    began = time.monotonic()
    asyncio.run(backend.apply(change))
    sys.stderr.write(f"bench: {name} took {(time.monotonic() - began) * 1000:.0f} ms for all\n")
    try:
        yield
    finally:
        if isinstance(backend, EbpfBackend):
            service_links.detach(pins.Pins(labs.BPFFS))
        else:
            asyncio.run(nftables.remove())
        asyncio.run(backend.close())


def _rate(listener: socket.socket, address: str, port: int) -> float:
    """Connections a second, one after the other, each accepted."""
    began = time.monotonic()
    for _ in range(_CONNECTS):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            sock.connect((address, port))
            listener.accept()[0].close()
    return _CONNECTS / (time.monotonic() - began)


if __name__ == "__main__":
    main()
