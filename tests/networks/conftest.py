"""podgate in a cluster of one node whose network is a real network plugin.

`make test-networks NET=calico-ebpf BIN=DIR NETWORKS=DIR` names it. What ran, and with which result,
is recorded by the run itself (tests/networks/records.py).
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.cluster import control_plane, one_node
from tests.cluster.conftest import Namespaces, image, namespaces, plugin, prebuilt_programs
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import MODE
from tests.compatibility import page as compatibility
from tests.networks import aws, kube_router, records
from tests.networks import calico as calico_plugin
from tests.networks.network import Network

__all__ = ["Namespaces", "image", "namespaces", "plugin", "prebuilt_programs"]

_NETWORK = "PODGATE_TEST_NETWORK"
_PROGRAMS = "PODGATE_TEST_NETWORKS"
_BIN = "PODGATE_TEST_BIN"


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Of a network. directory: of its programs; missing: what they lack; others: files of tests
    that are not for it."""

    directory: str
    missing: Callable[[pathlib.Path], str]
    make: Callable[[OneNode, pathlib.Path], Network]
    others: tuple[str, ...]


_OF_CALICO, _OF_AWS = "test_host_endpoint.py", "test_aws.py"
_KINDS = {
    **{
        f"calico-{one.value}": _Kind(
            "calico",
            calico_plugin.missing,
            functools.partial(calico_plugin.Calico, data_plane=one),
            (_OF_AWS,),
        )
        for one in calico_plugin.DataPlane
    },
    "aws": _Kind("aws", aws.missing, aws.Aws, (_OF_CALICO,)),
    "kube-router": _Kind(
        "kube-router", kube_router.missing, kube_router.KubeRouter, (_OF_CALICO, _OF_AWS)
    ),
}
_NAME = os.environ.get(_NETWORK, "")
_HOW = (
    f"name a network, NET={' or NET='.join(_KINDS)}, the directory of the cluster's programs "
    "in BIN, and in NETWORKS the directory whose subdirectory (calico for all of Calico's) has its "
    "programs"
)

# The tests of the record are not about a network.
collect_ignore = [*_KINDS[_NAME].others, "test_records.py"] if _NAME in _KINDS else []

_run = records.Run()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests are in the namespaces of one cluster. The last ones uninstall podgate."""
    here = pathlib.Path(__file__).parent
    if _NAME:
        # Reports arrive in this process, tests may run in another one.
        _run.began(_NAME, *_versions())
    for item in items:
        if item.path.is_relative_to(here) and _NAME:
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
    file = _programs() / "VERSION"
    kubelet = pathlib.Path(os.environ.get(_BIN) or "missing", "kubelet").absolute()
    if not file.is_file() or not kubelet.is_file():
        return "", ""
    command = [str(kubelet), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return file.read_text(encoding="utf-8").strip(), done.stdout.split()[-1]


def _programs() -> pathlib.Path:
    """The directory of the network's."""
    directory = _KINDS[_NAME].directory if _NAME in _KINDS else "missing"
    return pathlib.Path(os.environ.get(_PROGRAMS) or "missing").absolute() / directory


@pytest.fixture(scope="session")
def bare_cluster(isolated: None, request: pytest.FixtureRequest) -> Iterator[OneNode]:
    """One cluster for all tests, with the network and without podgate."""
    if _NAME not in _KINDS:
        pytest.fail(_HOW, pytrace=False)
    binaries = pathlib.Path(os.environ.get(_BIN) or "missing").absolute()
    if problem := control_plane.missing(binaries) or _KINDS[_NAME].missing(_programs()):
        pytest.fail(f"{problem} In all: {_HOW}.", pytrace=False)
    with one_node.running(binaries, request.getfixturevalue("image")) as made:
        yield made


@pytest.fixture(scope="session")
def network(bare_cluster: OneNode) -> Iterator[Network]:
    """The one that NET names, whose policy engine runs."""
    made = _KINDS[_NAME].make(bare_cluster, _programs())
    made.install()
    made.start()
    yield made
    made.remove()


@pytest.fixture
def calico(network: Network) -> calico_plugin.Calico:
    assert isinstance(network, calico_plugin.Calico)
    return network


@pytest.fixture(scope="session")
def podgate(bare_cluster: OneNode, network: Network) -> Deployment:
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
