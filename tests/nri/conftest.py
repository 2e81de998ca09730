"""A node whose container runtime has NRI: containerd 2.x and CRI-O, those that BIN has."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.conftest import fresh_lab
from tests.node.conftest import driver, installed, installed_pins, kubelet_cgroup, node, plugin
from tests.runtime import containerd, containerd2, crio
from tests.runtime.containerd import Containerd

__all__ = ["driver", "installed", "installed_pins", "kubelet_cgroup", "node", "plugin"]

_BIN = "PODGATE_TEST_BIN"
_PROGRAMS = {
    "containerd": ("containerd", "containerd-shim-runc-v2", "ctr"),
    "crio": ("crio", "pinns"),
}


def _binaries() -> pathlib.Path:
    return pathlib.Path(os.environ.get(_BIN, "")).absolute()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for each runtime of which all programs are there."""
    if "runtime" in metafunc.fixturenames:
        found = [
            name
            for name, programs in _PROGRAMS.items()
            if os.environ.get(_BIN) and all((_binaries() / one).is_file() for one in programs)
        ]
        metafunc.parametrize("runtime", found or ["none"], indirect=True)


@pytest.fixture
def runtime(own_node: None, request: pytest.FixtureRequest) -> Iterator[Containerd]:
    """With routed IPv4 pods."""
    if request.param == "none":
        pytest.fail("name the programs of a runtime with NRI: make test-nri BIN=DIR", pytrace=False)
    runs: contextlib.AbstractContextManager[Containerd]
    if request.param == "crio":
        runs = crio.running(containerd.ptp(), _binaries(), has_nri=True)
    else:
        runs = containerd2.running(containerd.ptp(), _binaries())
    with fresh_lab(), runs as made:
        yield made
