"""PodInfo while pods come and go as on a busy node, and while its sources restart."""

import os
import time

import pytest

from tests import polling
from tests.cluster import podinfo
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.podinfo import Comparison
from tests.cluster.workloads import HTTP_PROBE, ISOLATION_READY, PROBED, PROBES_PASSING, Workloads

pytestmark = pytest.mark.kernel
# A job every fifteen seconds for an hour.
_PODS = int(os.environ.get("PODGATE_TEST_CHURN", "240"))
_AT_ONCE = 12
_EVERY = _PODS // 6
_GATES = ((), (ISOLATION_READY,), (ISOLATION_READY, PROBES_PASSING))
_PATIENT = {**PROBED, "startupProbe": {**HTTP_PROBE, "failureThreshold": 300}}


class Churn:
    """Jobs: each is created, becomes Ready and is deleted. The oldest goes first."""

    def __init__(self, users: Workloads) -> None:
        self._users = users
        self._names: list[str] = []

    def add(self, name: str, number: int) -> None:
        if len(self._names) == _AT_ONCE:
            self.remove()
        self._users.run(name, _PATIENT, gates=_GATES[number % len(_GATES)])
        self._names.append(name)

    def remove(self) -> None:
        oldest = self._names.pop(0)
        self._users.until_ready(oldest)
        self._users.delete(oldest)

    def end(self) -> None:
        while self._names:
            self.remove()


def test_states_are_complete_and_current_in_an_hour_of_changes(
    node: OneNode, podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    names = [f"kept{number}" for number in range(5)]
    for name in names:
        users.run(name, _PATIENT, gates=_GATES[-1])
    kept = {pod["metadata"]["uid"] for pod in users.until_ready(*names)}
    comparison = Comparison(node.api, kept=kept)
    churn = Churn(users)
    with comparison.running():
        for number in range(_PODS):
            churn.add(f"job{number}", number)
            if number % (2 * _EVERY) == _EVERY:
                node.kubelet.restart()
            elif number % (2 * _EVERY) == 2 * _EVERY - 1:
                node.control_plane.api_server.kill()
                time.sleep(1)
                node.control_plane.api_server.start()
                node.control_plane.wait_until_ready()
        churn.end()
        node.kubelet.wait_until_ready()
        users.until_gone(*(f"job{number}" for number in range(_PODS)))
        polling.wait_until("PodInfo has all reports", lambda: comparison.is_idle, seconds=120)
    assert comparison.problems[:5] == []
    assert comparison.states > _PODS
    with podinfo.client() as client:
        podinfo.until_as_in_the_api(client, node.api)
    assert users.restarts() == {}
