"""podgate in a cluster of one node whose network is a real network plugin.

`make test-networks NET=calico-ebpf BIN=DIR NETWORKS=DIR` names it. What ran, and with which result,
is recorded by the run itself (tests/networks/records.py).
"""

import os
import pathlib
import subprocess
from collections.abc import Generator, Iterator

import pytest

from tests.cluster import control_plane, one_node
from tests.cluster.conftest import Namespaces, image, namespaces, plugin, prebuilt_programs
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import MODE
from tests.compatibility import page as compatibility
from tests.networks import calico as calicos
from tests.networks import records
from tests.networks.calico import Calico, DataPlane

__all__ = ["Namespaces", "image", "namespaces", "plugin", "prebuilt_programs"]

_NETWORK = "PODGATE_TEST_NETWORK"
_PROGRAMS = "PODGATE_TEST_NETWORKS"
_BIN = "PODGATE_TEST_BIN"
_DATA_PLANES = {f"calico-{one.value}": one for one in DataPlane}
_HOW = (
    f"name a network, NET={' or NET='.join(_DATA_PLANES)}, the directory of the cluster's programs "
    "in BIN, and in NETWORKS the directory whose subdirectory calico has its programs"
)

_run = records.Run()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests are in the namespaces of one cluster. The last ones uninstall podgate."""
    here = pathlib.Path(__file__).parent
    if network := os.environ.get(_NETWORK):
        # Reports arrive in this process, tests may run in another one.
        _run.began(network, *_versions())
    for item in items:
        if item.path.is_relative_to(here) and os.environ.get(_NETWORK):
            item.add_marker("kernel")
            item.add_marker("shared_node")
    items.sort(key=lambda item: item.path == here / "test_uninstall.py")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith("tests/networks/"):
        _run.add(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Before failed tests run again, each in a run that records its own result."""
    try:
        return (yield)
    finally:
        if _run.write():
            compatibility.write()


def _versions() -> tuple[str, str]:
    """Of the network plugin and of Kubernetes; empty without programs, which fails the tests."""
    file = pathlib.Path(os.environ.get(_PROGRAMS) or "missing", "calico", "VERSION")
    kubelet = pathlib.Path(os.environ.get(_BIN) or "missing", "kubelet").absolute()
    if not file.is_file() or not kubelet.is_file():
        return "", ""
    command = [str(kubelet), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return file.read_text(encoding="utf-8").strip(), done.stdout.split()[-1]


@pytest.fixture(scope="session")
def data_plane() -> DataPlane:
    found = _DATA_PLANES.get(os.environ.get(_NETWORK, ""))
    if found is None:
        pytest.fail(_HOW, pytrace=False)
    return found


@pytest.fixture(scope="session")
def bare_cluster(
    data_plane: DataPlane, isolated: None, request: pytest.FixtureRequest
) -> Iterator[OneNode]:
    """One cluster for all tests, with the network and without podgate."""
    binaries = pathlib.Path(os.environ.get(_BIN) or "missing").absolute()
    programs = pathlib.Path(os.environ.get(_PROGRAMS) or "missing").absolute() / "calico"
    if problem := control_plane.missing(binaries) or calicos.missing(programs):
        pytest.fail(f"{problem} In all: {_HOW}.", pytrace=False)
    with one_node.running(binaries, request.getfixturevalue("image")) as made:
        yield made


@pytest.fixture(scope="session")
def calico(bare_cluster: OneNode, data_plane: DataPlane) -> Iterator[Calico]:
    """Calico, whose felix runs."""
    programs = pathlib.Path(os.environ[_PROGRAMS]).absolute() / "calico"
    made = Calico(bare_cluster, programs, data_plane)
    made.install()
    made.start()
    yield made
    made.remove()


@pytest.fixture(scope="session")
def podgate(bare_cluster: OneNode, calico: Calico) -> Deployment:
    """podgate as the manifests deploy it."""
    made = Deployment(bare_cluster.api)
    made.apply()
    made.wait_until_ready()
    return made


@pytest.fixture
def node(bare_cluster: OneNode, podgate: Deployment) -> OneNode:
    """The cluster with podgate."""
    return bare_cluster


@pytest.fixture
def enforcing_node(node: OneNode, podgate: Deployment) -> Iterator[OneNode]:
    """The node's default is enforce: no new pod is open before its gate is attached."""
    node.label(MODE, "enforce")
    podgate.until("the node's default", lambda report: report.default_mode == "enforce")
    yield node
    node.label(MODE, None)
    podgate.until("the node's default", lambda report: report.default_mode == "audit")
