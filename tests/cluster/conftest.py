"""Tests against a real cluster: one that they start, or one that exists.

With BIN (`make test-cluster BIN=DIR`) they start one in namespaces of their own. Without it those
that need only an API server use the cluster that KUBECONFIG names, or none, which is reported
loudly.

In the cluster of KUBECONFIG they make one namespace with a name of its own, and leave nothing
behind. The user of the kubeconfig must be allowed to make namespaces and pods.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import pytest

from agent.kube.client import ApiClient, ApiError, NoClusterConfigError
from tests.cluster import control_plane, one_node, workloads
from tests.cluster.cluster import Cluster
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.plugin import Plugin
from tests.cluster.workloads import Workloads
from tests.compatibility import page as compatibility
from tests.image import building
from tests.networks import records

_BIN = "PODGATE_TEST_BIN"
# An archive of the image, as deploy/rootfs.py makes it, instead of one of this tree.
_IMAGE = "PODGATE_TEST_IMAGE"
# Helm installs podgate then, instead of the manifests.
_HELM = "PODGATE_TEST_HELM"
_SKIPPED = (
    "tests/cluster was SKIPPED: no cluster was named. Name the directory of its programs in BIN "
    "(make test-cluster BIN=DIR), or a cluster in KUBECONFIG."
)
# Files whose results docs/compatibility.md shows.
_RECORDED = tuple(f"tests/cluster/test_{name}.py" for name in ("modes", "handlers", "nri"))
_NO_BIN = "this test starts a cluster; run it by `make test-cluster BIN=DIR`"


_run = records.Run()

# Debian's containerd has no NRI.
collect_ignore = (
    []
    if any(
        pathlib.Path(os.environ[_BIN], name).is_file()
        for name in ("crio", "containerd")
        if os.environ.get(_BIN)
    )
    else ["test_nri.py"]
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    if any("tests/cluster/" in report.nodeid for report in reports):
        terminalreporter.write_line(_SKIPPED, yellow=True, bold=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests are in the namespaces of the cluster that they start. Those that need an API server
    alone come before that cluster, which has the same addresses, and then README's commands: they
    install podgate."""
    here = pathlib.Path(__file__).parent
    if os.environ.get(_BIN):
        # Reports arrive in this process, tests may run in another one.
        _begin_record(pathlib.Path(os.environ[_BIN]).absolute())
        for item in items:
            if item.path.is_relative_to(here):
                item.add_marker("kernel")
                item.add_marker("shared_node")
        items.sort(key=lambda item: (_needs_node(item), item.path != here / "test_walk.py"))


def _begin_record(directory: pathlib.Path) -> None:
    """Nothing without the kubelet, where the tests fail."""
    if not (directory / "kubelet").is_file():
        return
    kubernetes = _version(directory / "kubelet").split()[-1]
    package = ["dpkg-query", "-W", "-f=${Version}", "containernetworking-plugins"]
    plugins = subprocess.run(package, capture_output=True, text=True, check=False).stdout
    network, runtime = "ptp", ""
    if (directory / "crio").is_file():
        network, runtime = "ptp-crio", f"CRI-O {_version(directory / 'crio').split()[2]}"
    elif (directory / "containerd").is_file():
        version = _version(directory / "containerd").split()[2]
        network, runtime = "ptp-containerd2", f"containerd {version.removeprefix('v')}"
    _run.began(network, plugins or "unknown", kubernetes, runtime)


def _version(program: pathlib.Path) -> str:
    command = [str(program), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith(_RECORDED):
        _run.add(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Before failed tests run again, each in a run that records its own result."""
    try:
        return (yield)
    finally:
        if _run.write():
            compatibility.write()


def _needs_node(item: pytest.Item) -> bool:
    return not {"bare_cluster", "own_kubeconfig"}.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def prebuilt_programs() -> None:
    """The image has its own."""


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """podgate's image, with the name that the manifests have."""
    if given := os.environ.get(_IMAGE):
        return pathlib.Path(given)
    path = tmp_path_factory.getbasetemp() / "podgate.tar"
    building.build(path, one_node.IMAGE)
    return path


def binaries() -> pathlib.Path:
    """The directory of the cluster's programs; the test fails without them."""
    if not os.environ.get(_BIN):
        pytest.fail(_NO_BIN, pytrace=False)
    directory = pathlib.Path(os.environ[_BIN]).absolute()
    if problem := control_plane.missing(directory):
        pytest.fail(problem, pytrace=False)
    return directory


@pytest.fixture(scope="session")
def bare_cluster(isolated: None, request: pytest.FixtureRequest) -> Iterator[OneNode]:
    """One cluster for all tests; podgate is not deployed yet."""
    directory = binaries()
    with one_node.running(directory, request.getfixturevalue("image")) as made:
        yield made


@pytest.fixture(scope="session")
def helm() -> str:
    """The program that installs podgate by the chart; empty: the manifests do."""
    return os.environ.get(_HELM, "")


@pytest.fixture(scope="session")
def podgate(bare_cluster: OneNode, helm: str) -> Deployment:
    """podgate as the manifests deploy it, unless README's commands have (test_walk.py)."""
    made = Deployment(bare_cluster.api)
    if not bare_cluster.api.find("/api/v1/namespaces/podgate"):
        if helm:
            made.install(helm, bare_cluster.control_plane.kubeconfig("admin"))
        else:
            made.apply()
    made.wait_until_ready()
    return made


@pytest.fixture
def node(bare_cluster: OneNode, podgate: Deployment) -> OneNode:
    """The cluster with podgate."""
    return bare_cluster


@pytest.fixture
def plugin(
    node: OneNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Plugin:
    made = Plugin(node.control_plane, capsys)
    # kubectl caches the API's resources below it.
    monkeypatch.setitem(os.environ, "HOME", str(node.control_plane.kubeconfig("admin").parent))
    return made


Namespaces = Callable[..., Workloads]


@pytest.fixture
def namespaces(node: OneNode) -> Iterator[Namespaces]:
    """Makes namespaces for one test: `namespaces("enforce")` has that mode's label."""
    with contextlib.ExitStack() as undo:

        def make(mode: str = "", **labels: str) -> Workloads:
            name = f"test-{mode or 'plain'}-{uuid.uuid4().hex[:6]}"
            of_mode = {workloads.MODE: mode} if mode else {}
            return undo.enter_context(workloads.namespace(node.api, name, of_mode | labels))

        yield make


@pytest.fixture(params=["enforce", "strict"])
def closed(request: pytest.FixtureRequest, namespaces: Namespaces) -> Workloads:
    """A namespace of each closed mode."""
    return namespaces(request.param)


@pytest.fixture
def own_kubeconfig(request: pytest.FixtureRequest) -> str:
    """Of the cluster that the tests start, or empty."""
    if not os.environ.get(_BIN):
        return ""
    own: OneNode = request.getfixturevalue("bare_cluster")
    return str(own.control_plane.kubeconfig("admin"))


@pytest.fixture
async def cluster(own_kubeconfig: str) -> AsyncIterator[Cluster]:
    """A namespace of the test's own in the cluster."""
    kubeconfig = own_kubeconfig or os.environ.get("KUBECONFIG")
    # Where no agent runs, which would write conditions as well.
    node_name = "elsewhere" if own_kubeconfig else ""
    if not kubeconfig:
        pytest.skip(_SKIPPED)
    try:
        api = await ApiClient.open(kubeconfig)
    except NoClusterConfigError as error:
        pytest.fail(str(error), pytrace=False)
    namespace = f"podgate-test-{uuid.uuid4().hex[:8]}"
    try:
        nodes = json.loads(await api.request("GET", "/api/v1/nodes"))["items"]
        assert nodes, "the cluster has no node"
        await api.request(
            "POST",
            "/api/v1/namespaces",
            body={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        )
        try:
            made = Cluster(api, namespace, node_name or nodes[0]["metadata"]["name"])
            await made.wait_for_service_account()
            yield made
        finally:
            await asyncio.shield(api.request("DELETE", f"/api/v1/namespaces/{namespace}"))
    except ApiError as error:
        pytest.fail(f"the cluster of KUBECONFIG refuses: {error}", pytrace=False)
    finally:
        await api.aclose()
