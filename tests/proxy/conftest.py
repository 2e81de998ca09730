"""Each backend over real pods, fed as the proxy's process feeds it."""

import asyncio
import contextlib
import itertools
import os
import pathlib
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from agent.lab import lab as labs
from agent.linux import nft as nft_commands
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.linux import iptables as iptables_commands
from agent.services.linux.iptables import IptablesVariant
from agent.services.proxy import iptables, ipvs, nftables
from agent.services.proxy.backend import Backend
from agent.services.proxy.combined import CombinedBackend
from agent.services.proxy.ebpf import EbpfBackend
from agent.services.proxy.frontends import FrontendChange, FrontendTable
from agent.services.proxy.node_addresses import NodeAddressSelection
from bpf import pins
from bpf.services import links as service_links
from tests.kernel import cgroups, offers
from tests.nodes import node
from tests.polling import PATIENCE
from tests.proxy import limits, scene

_numbers = itertools.count()


class Proxy:
    """A backend and the table that it is fed from. name: as in the table of docs/proxy.md."""

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend = backend
        self.name = name
        self._table = FrontendTable()
        self._pending = FrontendChange({}, set())

    def need(self, ability: str) -> None:
        """Ends the test if this backend cannot do it, by docs/proxy.md."""
        if reason := limits.limit(self.name, ability):
            pytest.xfail(f"docs/proxy.md, {ability}: {reason}")

    def serve(self, *services: pb.ServiceEndpoints) -> None:
        """These are all the services from now on."""
        self.serve_all(services)

    def serve_all(self, services: Sequence[pb.ServiceEndpoints]) -> None:
        change = self._table.update(services, NodeAddressSelection().read())
        self._pending = self._pending.then(change)
        asyncio.run(self.backend.apply(self._pending))
        self._pending = FrontendChange({}, set())

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Sockets that are created here pass no hook of the backend, as those of other machines."""
        with cgroups.cgroup() as elsewhere, within(elsewhere):
            yield


@pytest.fixture(autouse=True)
def unhurried_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated machine takes longer than their limit for a crowd of services."""
    for commands in (nft_commands, iptables_commands):
        limit = commands._TIMEOUT_SECONDS
        monkeypatch.setattr(commands, "_TIMEOUT_SECONDS", limit * PATIENCE)


@pytest.fixture(autouse=True)
def no_tables_of_iptables() -> Iterator[None]:
    """iptables-nft keeps the tables of iptables when their last chain of podgate's is gone."""
    yield
    if node.current is not None:
        tables = itertools.product(("ip", "ip6"), ("filter", "mangle", "nat"))
        script = "".join(f"add table {f} {t}\ndelete table {f} {t}\n" for f, t in tables)
        subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


@pytest.fixture
def fresh_pins(isolated: None) -> Iterator[pins.Pins]:
    """An installation of the test's own."""
    directory = labs.LAB_DIRECTORY / "bpf" / f"proxy{next(_numbers)}"
    directory.mkdir()
    made = pins.Pins(directory)
    yield made
    made.remove_everything()


@pytest.fixture
def own_cgroup(isolated: None) -> Iterator[cgroups.Cgroup]:
    """The test itself is in it: no other process' sockets are translated."""
    with cgroups.cgroup() as made, within(made):
        yield made


@contextlib.contextmanager
def within(cgroup: cgroups.Cgroup) -> Iterator[None]:
    with open("/proc/self/cgroup", encoding="utf-8") as lines:
        path = next(line[3:].strip() for line in lines if line.startswith("0::"))
    before = pathlib.Path(str(cgroup.directory).removesuffix(cgroup.path) + path)
    cgroup.add(os.getpid())
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def ebpf(fresh_pins: pins.Pins, own_cgroup: cgroups.Cgroup) -> Iterator[Proxy]:
    offers.need_netns_cookie()
    backend = asyncio.run(open_combined(fresh_pins, own_cgroup))
    proxy = Proxy(backend)
    with scene.routed():
        proxy.serve()
        try:
            yield proxy
        finally:
            proxy.serve()
            asyncio.run(nftables.remove())
            service_links.detach(fresh_pins)
            asyncio.run(backend.close())


async def open_combined(made: pins.Pins, cgroup: cgroups.Cgroup) -> CombinedBackend:
    """As `podgate proxy --backend ebpf` does."""
    sockets = await EbpfBackend.open(made.bpffs, cgroup.directory)
    return await CombinedBackend.open(sockets, nftables.NftBackend())


@pytest.fixture
def nft(isolated: None) -> Iterator[Proxy]:
    with scene.routed():
        proxy = Proxy(nftables.NftBackend())
        try:
            yield proxy
            proxy.serve()
        finally:
            asyncio.run(nftables.remove())


@pytest.fixture
def iptables_nft(isolated: None) -> Iterator[Proxy]:
    yield from _iptables(IptablesVariant.NFT)


@pytest.fixture
def iptables_legacy(isolated: None) -> Iterator[Proxy]:
    yield from _iptables(IptablesVariant.LEGACY)


def _iptables(variant: IptablesVariant) -> Iterator[Proxy]:
    with scene.routed():
        proxy = Proxy(asyncio.run(iptables.IptablesBackend.open(variant=variant)))
        try:
            yield proxy
            proxy.serve()
        finally:
            asyncio.run(iptables.remove())


@pytest.fixture
def ipvs_table(isolated: None) -> Iterator[Proxy]:
    offers.need_ipvs()
    with scene.routed():
        proxy = Proxy(asyncio.run(ipvs.IpvsBackend.open()))
        try:
            yield proxy
            proxy.serve()
        finally:
            asyncio.run(ipvs.remove())


@pytest.fixture(params=["ebpf", "nft", "iptables_nft", "iptables_legacy", "ipvs_table"])
def proxy(pods: list[labs.LabPod], request: pytest.FixtureRequest) -> Proxy:
    made = request.getfixturevalue(request.param)
    assert isinstance(made, Proxy)
    made.name = request.param.partition("_")[0]
    return made


@pytest.fixture
def pods(lab: labs.Lab) -> list[labs.LabPod]:
    return [lab.add_pod(name, 1 + i) for i, name in enumerate(("one", "two", "three"))]


@pytest.fixture
def servers(pods: list[labs.LabPod]) -> Iterator[scene.Servers]:
    made = scene.Servers(pods)
    yield made
    made.close()
