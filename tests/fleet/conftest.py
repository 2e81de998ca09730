"""podgate on several nodes, with flannel between them and kube-proxy on each.

`make test-fleet NET=flannel-vxlan PROXY=iptables BIN=DIR NETWORKS=DIR` names them. What ran, and
with which result, is recorded by the run itself (tests/networks/records.py).
"""

import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Generator, Iterator
from typing import Protocol

import pytest

from tests import polling
from tests.cluster import control_plane, several_nodes
from tests.cluster.conftest import image, prebuilt_programs
from tests.cluster.deployment import Deployment
from tests.cluster.machine import Machine
from tests.cluster.plugin import Plugin
from tests.cluster.several_nodes import SeveralNodes
from tests.compatibility import page as compatibility
from tests.fleet import flannel as flannels
from tests.fleet import matrix, routes, service_proxy
from tests.fleet.flannel import Backend, Flannel
from tests.fleet.matrix import Matrix
from tests.fleet.routes import Routes
from tests.fleet.service_proxy import ServiceProxy
from tests.fleet.service_rules import ServiceRules
from tests.fleet.workload import Fleet
from tests.image.node import RUN_DIRECTORY
from tests.networks import records

__all__ = ["image", "prebuilt_programs"]

_NETWORK, _PROXY = "PODGATE_TEST_NETWORK", "PODGATE_TEST_PROXY"
_PROGRAMS, _BIN = "PODGATE_TEST_NETWORKS", "PODGATE_TEST_BIN"
_NODES = "PODGATE_TEST_NODES"
_ROUTES, _RULES = "routes", "rules"
_BACKENDS = {f"flannel-{one.value}": one for one in Backend}
_NETWORK_NAMES = (*_BACKENDS, _ROUTES)
_PROXY_NAMES = (*service_proxy.MODES, _RULES)
_HOW = (
    f"name a network, NET={' or NET='.join(_NETWORK_NAMES)}, a service proxy, "
    f"PROXY={' or PROXY='.join(_PROXY_NAMES)}, the directory of the cluster's programs in BIN, and "
    "for flannel in NETWORKS the directory whose subdirectory flannel has its programs"
)
_ORDER = (
    "test_modes.py",
    "test_restarts.py",
    "test_roll_outs.py",
    "test_node_down.py",
    "test_soak.py",
)
"""Of files; the one that uninstalls is the last."""
_LAST = "test_uninstall.py"

_run = records.Run()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests are beside the machines of one cluster, in this order."""
    here = pathlib.Path(__file__).parent
    if os.environ.get(_NETWORK):
        # Reports arrive in this process, tests may run in another one.
        _begin_record()
    for item in items:
        if item.path.is_relative_to(here) and os.environ.get(_NETWORK):
            item.add_marker("kernel")
            item.add_marker("shared_node")
    items.sort(key=lambda item: _place(item.path))


def _place(path: pathlib.Path) -> int:
    if path.name in _ORDER:
        return _ORDER.index(path.name)
    return len(_ORDER) + (path.name == _LAST)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith("tests/fleet/"):
        _run.add(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Before failed tests run again, each in a run that records its own result."""
    try:
        return (yield)
    finally:
        if _run.write():
            compatibility.write()


def _begin_record() -> None:
    """Nothing where programs are missing, which fails the tests."""
    network, proxy = _chosen()
    binaries, programs = _directories()
    if control_plane.missing(binaries) or (network in _BACKENDS and flannels.missing(programs)):
        return
    command = [str(binaries / "kubelet"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    version = flannels.version(programs) if network in _BACKENDS else routes.version()
    _run.began(f"{network}-{proxy}", version, done.stdout.split()[-1])


def _chosen() -> tuple[str, str]:
    """Network and service proxy, by name. Fails without one."""
    network = os.environ.get(_NETWORK, "")
    proxy = os.environ.get(_PROXY) or (_RULES if network == _ROUTES else service_proxy.MODES[0])
    if network not in _NETWORK_NAMES or proxy not in _PROXY_NAMES:
        raise pytest.UsageError(_HOW)
    return network, proxy


def _directories() -> tuple[pathlib.Path, pathlib.Path]:
    """Of the cluster's programs, and of flannel's."""
    binaries = pathlib.Path(os.environ.get(_BIN) or "missing").absolute()
    return binaries, pathlib.Path(os.environ.get(_PROGRAMS) or "missing").absolute() / "flannel"


class Network(Protocol):
    """Between the nodes."""

    def start(self) -> None: ...

    def restart(self, name: str) -> None: ...


class Proxy(Network, Protocol):
    """Of services."""

    def update(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A cluster with its network, and its pods before podgate: who reaches them."""

    cluster: SeveralNodes
    network: Network
    proxy: Proxy
    fleet: Fleet
    before: Matrix


@pytest.fixture(scope="session")
def site(
    isolated: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """One cluster for all tests; podgate is not deployed yet."""
    network, proxy = _chosen()
    binaries, programs = _directories()
    problems = [control_plane.missing(binaries)]
    problems += [flannels.missing(programs)] if network in _BACKENDS else []
    problems += [service_proxy.missing(binaries)] if proxy in service_proxy.MODES else []
    if problem := " ".join(filter(None, problems)):
        pytest.fail(f"{problem} In all: {_HOW}.", pytrace=False)
    directory = tmp_path_factory.mktemp("site")
    names = [f"node{number + 1}" for number in range(int(os.environ.get(_NODES) or 2))]
    archive = request.getfixturevalue("image")
    with several_nodes.running(binaries, archive, directory, names) as cluster:
        made: Network = Routes(cluster)
        if backend := _BACKENDS.get(network):
            made = Flannel(cluster, programs, backend, directory)
        services: Proxy = ServiceRules(cluster)
        if proxy in service_proxy.MODES:
            services = ServiceProxy(cluster, binaries, proxy, directory)
        services.start()
        made.start()
        fleet = Fleet(cluster)
        fleet.create()
        services.update()
        outside = [one for one in fleet.sources() if not one.node]
        targets = fleet.targets()
        polling.wait_until("services translate", lambda: _is_whole(matrix.run(outside, targets)))
        yield Site(cluster, made, services, fleet, matrix.run(fleet.sources(), targets))


def _is_whole(found: Matrix) -> bool:
    """Clients outside have no route to addresses of services."""
    return all(
        matrix.is_open(result)
        for (_, target), result in found.items()
        if target.can_connect and target.by
    )


Agents = dict[str, Deployment]


@pytest.fixture(scope="session")
def podgate(site: Site) -> Agents:
    """podgate as the manifests deploy it; by node."""
    api = site.cluster.api
    made = {one.name: Deployment(api, one.path(RUN_DIRECTORY)) for one in site.cluster.machines}
    (first, *_) = made.values()
    first.apply()
    for one in made.values():
        one.wait_until_ready()
    return made


@pytest.fixture
def cluster(site: Site, podgate: Agents) -> SeveralNodes:
    """The cluster with podgate."""
    return site.cluster


@pytest.fixture
def fleet(site: Site, podgate: Agents) -> Fleet:
    """Its pods, beside podgate."""
    return site.fleet


@pytest.fixture
def last(cluster: SeveralNodes) -> Machine:
    """The node that tests take down."""
    return cluster.machines[-1]


@pytest.fixture
def plugin(
    cluster: SeveralNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Plugin:
    made = Plugin(cluster.control_plane, capsys)
    # kubectl caches the API's resources below it.
    home = str(cluster.control_plane.kubeconfig("admin").parent)
    monkeypatch.setitem(os.environ, "HOME", home)
    return made
