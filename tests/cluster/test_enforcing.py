"""From audit to enforce on a real cluster, with the plugin and a real kubectl."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.one_node import OneNode
from tests.cluster.plugin import Plugin
from tests.cluster.workloads import ISOLATION_READY, MODE, PORT, Workloads, is_reachable
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel

_PATH = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_UNIT = "podgate-test-backup.service"
_CONNECT = "import socket, sys; socket.socket().connect_ex((sys.argv[1], int(sys.argv[2])))"


@pytest.fixture
def backup() -> Iterator[Cgroup]:
    """A service of the node."""
    with cgroups.cgroup(_UNIT) as group:
        yield group


@pytest.fixture
def web(namespaces: Namespaces) -> tuple[Workloads, Json]:
    """A namespace in audit with one pod."""
    users: Workloads = namespaces("audit")
    users.run("web", gates=(ISOLATION_READY,))
    return users, users.until_ready("web")[0]


@pytest.fixture
def applied(
    node: OneNode, plugin: Plugin, backup: Cgroup, web: tuple[Workloads, Json]
) -> Iterator[None]:
    """The service has connected to the pod more than once, and what is suggested is applied."""
    users, pod = web

    def suggested() -> list[Any]:
        connect(backup, pod, PORT)
        return plugin.suggested(users)

    # An occasion lasts as long as a part of the observed time, which is minutes here.
    (policy,) = polling.wait_until("the service is suggested", suggested, seconds=300)
    assert policy["spec"]["from"] == [{"systemdUnit": {"name": _UNIT}}]
    node.api.create(_PATH, policy)
    yield
    node.api.delete(_PATH)


def connect(source: Cgroup, pod: Json, port: int) -> None:
    command = [sys.executable, "-c", _CONNECT, pod["status"]["podIP"], str(port)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        source.run(command)


def mode_label(node: OneNode, users: Workloads) -> str:
    metadata = node.api.get(f"/api/v1/namespaces/{users.namespace}")["metadata"]
    return str(metadata["labels"].get(MODE))


@pytest.mark.usefixtures("applied")
def test_suggested_policies_admit_their_source_once_the_namespace_is_enforced(
    node: OneNode, plugin: Plugin, backup: Cgroup, web: tuple[Workloads, Json]
) -> None:
    users, pod = web
    polling.wait_until("the policy is in force", lambda: not plugin.suggested(users))
    status, output = plugin.run("enforce", users.namespace)
    assert (status, mode_label(node, users)) == (1, "audit")
    assert "No node has observed a day." in output
    status, output = plugin.run("enforce", users.namespace, "--yes", "--watch", "5s")
    assert status == 0, output
    assert mode_label(node, users) == "enforce"
    users.until("web", ISOLATION_READY, "True", "Enforced")
    connected = (
        "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 30).close()"
    )
    command = [sys.executable, "-c", connected, pod["status"]["podIP"], str(PORT)]
    assert backup.run(command).returncode == 0
    assert not is_reachable(pod)


@pytest.mark.usefixtures("applied")
def test_label_is_taken_back_if_a_listed_source_is_dropped(
    node: OneNode, plugin: Plugin, backup: Cgroup, web: tuple[Workloads, Json]
) -> None:
    users, pod = web
    is_done = threading.Event()

    def connect_to_another_port() -> None:
        while not is_done.wait(0.5):
            connect(backup, pod, PORT + 1)

    connecting = threading.Thread(target=connect_to_another_port)
    connecting.start()
    try:
        status, output = plugin.run("enforce", users.namespace, "--yes", "--watch", "5m")
    finally:
        is_done.set()
        connecting.join(60)
    assert status == 1, output
    assert "a policy lists this source" in output
    assert mode_label(node, users) == "audit"
