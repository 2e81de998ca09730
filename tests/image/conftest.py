"""podgate's image, built once, and a node for each test on a runtime that the tests share."""

import fcntl
import os
import pathlib
from collections.abc import AsyncIterator, Iterator

import pytest

from agent.default_deny import table as default_deny_table
from agent.strict import veth_pair
from tests.conftest import fresh_lab
from tests.image import building, foreign, role
from tests.image import node as nodes
from tests.image.node import IMAGE, Node
from tests.kernels.architectures import ARCHITECTURES, Architecture
from tests.runtime import containerd
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver


@pytest.fixture(scope="session")
def architecture() -> Architecture | None:
    """Another one than this machine's, for which `make test-image ARCH=arm64` makes the image."""
    name = os.environ.get("PODGATE_TEST_ARCHITECTURE")
    if name and name not in ARCHITECTURES:
        raise pytest.UsageError(f"ARCH is {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name] if name else None


@pytest.fixture(scope="session")
def image(
    tmp_path_factory: pytest.TempPathFactory, architecture: Architecture | None
) -> pathlib.Path:
    """The OCI archive that deploy/rootfs.py makes; one for all workers of a run."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    path = directory / "podgate.tar"
    with (directory / "podgate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            if architecture:
                foreign.build(path, IMAGE, architecture)
            else:
                building.build(path, IMAGE)
    return path


@pytest.fixture(scope="module")
def runtime(isolated: None, image: pathlib.Path) -> Iterator[Containerd]:
    """containerd with routed IPv4 pods, which has podgate's image."""
    with fresh_lab(), containerd.running(containerd.ptp()) as made:
        made.import_archive(image)
        yield made


@pytest.fixture
async def node(runtime: Containerd, tmp_path: pathlib.Path) -> AsyncIterator[Node]:
    """No agent runs yet; nothing of one is left after the test."""
    with nodes.as_on_a_node(runtime):
        async with (
            nodes.api_server(tmp_path) as server,
            Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver,
        ):
            made = Node(runtime, driver, server, tmp_path)
            try:
                yield made
            finally:
                await made.clean_up()
                await default_deny_table.remove()
                await veth_pair.remove_everything()
            assert role.needed(server.received) <= role.granted()
