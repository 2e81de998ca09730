"""A reboot: tasks, pins and what is in /run are gone when the kubelet starts."""

import contextlib
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import ISOLATION_READY, PORT, PROBED, PROBES_PASSING, is_reachable
from tests.image.node import BPFFS, RUN_DIRECTORY

pytestmark = pytest.mark.kernel
_CONNECT_SECONDS = 0.05


@pytest.fixture
def strict_start(node: OneNode, podgate: Deployment) -> Iterator[None]:
    """podgate-cni is installed, and after a reboot pods wait for the agent."""
    directories = (node.runtime.cni_directory, node.runtime.plugins)
    podgate.set_arguments(
        [
            f"--cni-conf-dir={directories[0]}",
            f"--cni-bin-dir={directories[1]}",
            "--cni-strict-start",
        ],
        directories=directories,
    )
    polling.wait_until("podgate-cni is installed", lambda: _is_installed(directories[0]))
    yield
    podgate.set_arguments([])
    remove = [sys.executable, "-m", "agent", "cni", "remove"]
    where = [f"--cni-conf-dir={directories[0]}", f"--cni-bin-dir={directories[1]}"]
    subprocess.run([*remove, *where], check=True, timeout=60)


def _is_installed(directory: pathlib.Path) -> bool:
    return any("podgate-cni" in file.read_text() for file in directory.glob("*.conflist"))


class Attempts:
    """Connects to every address of a pod, again and again, as a host process."""

    def __init__(self, addresses: pathlib.Path) -> None:
        """addresses: the directory in which host-local has a file for each one in use."""
        self.reached: set[str] = set()
        self.tried: set[str] = set()
        self._addresses = addresses
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attempts")

    def __enter__(self) -> "Attempts":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(0.005):
            for file in self._addresses.glob("*.*.*.*"):
                self.tried.add(file.name)
                with contextlib.suppress(OSError):
                    socket.create_connection((file.name, PORT), _CONNECT_SECONDS).close()
                    self.reached.add(file.name)


def _reboot(node: OneNode) -> None:
    node.kubelet.stop()
    node.end_containers()
    shutil.rmtree(BPFFS / "podgate")
    for path in RUN_DIRECTORY.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.kubelet.start()
    node.kubelet.wait_until_ready()


def test_with_strict_start_no_pod_is_ever_open(
    node: OneNode, podgate: Deployment, strict_start: None, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    names = [f"web{number}" for number in range(4)]
    for name in names:
        users.run(name, PROBED, gates=(ISOLATION_READY, PROBES_PASSING))
    old = {pod["status"]["podIP"] for pod in users.until_isolated(*names)}
    with Attempts(node.runtime.directory / "ipam" / "pods") as attempts:
        _reboot(node)
        polling.wait_until(
            "the pods have new addresses",
            lambda: not old & {pod["status"].get("podIP") for pod in users.pods()},
        )
        pods = users.until_isolated(*names)
        podgate.wait_until_ready()
    assert {pod["status"]["podIP"] for pod in pods} <= attempts.tried
    assert attempts.reached == set()
    assert not any(is_reachable(pod) for pod in pods)
