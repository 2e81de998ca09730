"""podgate on several nodes, with flannel between them and kube-proxy on each.

`make test-fleet NET=flannel-vxlan PROXY=iptables BIN=DIR NETWORKS=DIR` names them. What ran, and
with which result, is recorded by the run itself (tests/networks/records.py).
"""

import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Generator, Iterator

import pytest

from tests.cluster import control_plane, several_nodes
from tests.cluster.conftest import image, prebuilt_programs
from tests.cluster.deployment import Deployment
from tests.cluster.machine import Machine
from tests.cluster.plugin import Plugin
from tests.cluster.several_nodes import SeveralNodes
from tests.fleet import flannel as flannels
from tests.fleet import matrix, service_proxy
from tests.fleet.flannel import Backend, Flannel
from tests.fleet.matrix import Matrix
from tests.fleet.service_proxy import ServiceProxy
from tests.fleet.workload import Fleet
from tests.image.node import RUN_DIRECTORY
from tests.networks import records

__all__ = ["image", "prebuilt_programs"]

_NETWORK, _PROXY = "PODGATE_TEST_NETWORK", "PODGATE_TEST_PROXY"
_PROGRAMS, _BIN = "PODGATE_TEST_NETWORKS", "PODGATE_TEST_BIN"
_NODES = "PODGATE_TEST_NODES"
_BACKENDS = {f"flannel-{one.value}": one for one in Backend}
_HOW = (
    f"name a network, NET={' or NET='.join(_BACKENDS)}, kube-proxy's mode, "
    f"PROXY={' or PROXY='.join(service_proxy.MODES)}, the directory of the cluster's programs in "
    "BIN, and in NETWORKS the directory whose subdirectory flannel has its programs"
)
_ORDER = ("test_modes.py", "test_restarts.py", "test_roll_outs.py", "test_node_down.py")
"""Of files; the one that uninstalls is the last."""
_LAST = "test_uninstall.py"

_run = records.Run()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests are beside the machines of one cluster, in this order."""
    here = pathlib.Path(__file__).parent
    if network := os.environ.get(_NETWORK):
        # Reports arrive in this process, tests may run in another one.
        proxy = os.environ.get(_PROXY) or service_proxy.MODES[0]
        _run.began(f"{network}-{proxy}", *_versions())
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
        _run.write()


def _versions() -> tuple[str, str]:
    """Of the network and of Kubernetes; empty without programs, which fails the tests."""
    file = pathlib.Path(os.environ.get(_PROGRAMS) or "missing", "flannel", "VERSION")
    kubelet = pathlib.Path(os.environ.get(_BIN) or "missing", "kubelet").absolute()
    if not file.is_file() or not kubelet.is_file():
        return "", ""
    command = [str(kubelet), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return file.read_text(encoding="utf-8").strip(), done.stdout.split()[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A cluster with its network, and its pods before podgate: who reaches them."""

    cluster: SeveralNodes
    flannel: Flannel
    proxy: ServiceProxy
    fleet: Fleet
    before: Matrix


@pytest.fixture(scope="session")
def site(
    isolated: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """One cluster for all tests; podgate is not deployed yet."""
    backend = _BACKENDS.get(os.environ.get(_NETWORK, ""))
    mode = os.environ.get(_PROXY) or service_proxy.MODES[0]
    if backend is None or mode not in service_proxy.MODES:
        pytest.fail(_HOW, pytrace=False)
    binaries = pathlib.Path(os.environ.get(_BIN) or "missing").absolute()
    programs = pathlib.Path(os.environ.get(_PROGRAMS) or "missing").absolute() / "flannel"
    problems = (
        control_plane.missing(binaries),
        service_proxy.missing(binaries),
        flannels.missing(programs),
    )
    if problem := " ".join(filter(None, problems)):
        pytest.fail(f"{problem} In all: {_HOW}.", pytrace=False)
    directory = tmp_path_factory.mktemp("site")
    names = [f"node{number + 1}" for number in range(int(os.environ.get(_NODES) or 2))]
    archive = request.getfixturevalue("image")
    with several_nodes.running(binaries, archive, directory, names) as cluster:
        flannel = Flannel(cluster, programs, backend, directory)
        proxy = ServiceProxy(cluster, binaries, mode, directory)
        proxy.start()
        flannel.start()
        fleet = Fleet(cluster)
        fleet.create()
        yield Site(cluster, flannel, proxy, fleet, matrix.run(fleet.sources(), fleet.targets()))


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
