"""A containerd for each test, and who drives it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.conftest import fresh_lab
from tests.runtime import containerd
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver


@pytest.fixture
def runtime(own_node: None, request: pytest.FixtureRequest) -> Iterator[Containerd]:
    """containerd with routed IPv4 pods, or with the network that the test is parametrized with."""
    network: dict[str, Any] = getattr(request, "param", None) or containerd.ptp()
    with fresh_lab(), containerd.running(network) as made:
        yield made


@pytest.fixture
async def driver(runtime: Containerd) -> AsyncIterator[Driver]:
    """Plays the kubelet on the test's runtime."""
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as made:
        yield made
