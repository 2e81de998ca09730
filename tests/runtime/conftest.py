"""A containerd for each test, and who drives it."""

import contextlib
import os
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.conftest import fresh_lab
from tests.runtime import containerd, containerd2
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver


@pytest.fixture
def runtime(own_node: None, request: pytest.FixtureRequest) -> Iterator[Containerd]:
    """containerd with routed IPv4 pods, or with the network that the test is parametrized with."""
    network: dict[str, Any] = getattr(request, "param", None) or containerd.ptp()
    binaries = pathlib.Path(os.environ.get("PODGATE_TEST_BIN") or os.devnull)
    with fresh_lab(), _running(network, binaries.absolute()) as made:
        yield made


def _running(
    network: dict[str, Any], binaries: pathlib.Path
) -> contextlib.AbstractContextManager[Containerd]:
    """containerd 2.x, if BIN has its programs, or else Debian's."""
    if (binaries / "containerd").is_file():
        return containerd2.running(network, binaries)
    return containerd.running(network)


@pytest.fixture
async def driver(runtime: Containerd) -> AsyncIterator[Driver]:
    """Plays the kubelet on the test's runtime."""
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as made:
        yield made
