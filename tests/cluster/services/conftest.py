"""One set of pods with both address families, behind which the tests put services."""

import contextlib
import pathlib
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster import containers, families, proxies, workloads
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.proxies import RunningProxy
from tests.cluster.services import rig
from tests.cluster.services.rig import Client, Services
from tests.cluster.workloads import Workloads


@pytest.fixture(scope="package")
def dual_stack(bare_cluster: OneNode, podgate: Deployment) -> Iterator[OneNode]:
    """The cluster with dual-stack pods, whose agent publishes service endpoints."""
    with (
        families.dual_stack(bare_cluster),
        proxies.published_endpoints(bare_cluster, podgate),
        proxies.outside(),
    ):
        yield bare_cluster


@pytest.fixture(scope="package")
def users(dual_stack: OneNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workloads]:
    """The namespace with SERVERS, the pod `client`, and ELSEWHERE."""
    with workloads.namespace(dual_stack.api, "services") as made, contextlib.ExitStack() as undo:
        rig.create_files(made)
        for name in rig.SERVERS:
            rig.run_server(made, name, labels={"serves": "web"})
        made.run("client")
        process = rig.elsewhere(tmp_path_factory.mktemp("elsewhere"))
        undo.callback(process.wait, 60)
        undo.callback(process.kill)
        made.until_ready(*rig.SERVERS, "client")
        yield made


@pytest.fixture(scope="module", params=["ebpf", "nft"])
def proxy(
    request: pytest.FixtureRequest, users: Workloads, dual_stack: OneNode, directory: pathlib.Path
) -> Iterator[RunningProxy]:
    """Each proxy in turn."""
    with proxies.running(dual_stack, request.param, directory) as made:
        yield made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("proxy")


@pytest.fixture
def services(users: Workloads, proxy: RunningProxy) -> Iterator[Services]:
    made = Services(users)
    yield made
    made.delete_all()


@pytest.fixture
def own(dual_stack: OneNode, proxy: RunningProxy) -> Iterator[Workloads]:
    """A namespace for pods of one test."""
    name = f"own-{uuid.uuid4().hex[:8]}"
    with workloads.namespace(dual_stack.api, name) as made:
        rig.create_files(made)
        yield made
        for pod in made.pods():
            if "deletionTimestamp" in pod["metadata"]:
                # A second deletion with a shorter grace period does not shorten the first one.
                containers.kill_containers(dual_stack.runtime, pod)


@pytest.fixture
def own_services(own: Workloads) -> Iterator[Services]:
    made = Services(own)
    yield made
    made.delete_all()


@pytest.fixture
def pod(users: Workloads, dual_stack: OneNode) -> Client:
    """A client in the pod `client`."""
    return rig.pod_client(dual_stack, users.pod("client"))


@pytest.fixture
def host(dual_stack: OneNode) -> Client:
    """A host process."""
    return Client("the host", dual_stack)


@pytest.fixture
def outside(dual_stack: OneNode) -> Client:
    """A client beyond the uplink."""
    return Client("outside", dual_stack, is_outside=True)
