"""Many pods at once, and relays that are killed, under a real kubelet."""

import os
import pathlib
import signal
import time

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    PROBED,
    PROBES_PASSING,
    WEB,
    condition,
    is_reachable,
)

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)
_PODS = 60
# After each one the next relay is started later, up to 30 s; the last fourteen of twenty take seven
# minutes.
_KILLS = int(os.environ.get("PODGATE_TEST_KILLS", "6"))
# Readiness and liveness of each pod: one of each may be open when the relay is killed, and that
# connection is lost. Its bytes were in the relay's memory.
_PROBES_OF_A_POD = 2
# The kubelet may need minutes to start all containers on two busy CPUs, whose servers then respond
# late: that fails no probe here.
_SLOW_PROBE = {**HTTP_PROBE, "timeoutSeconds": 30}
_PATIENT = {
    **WEB,
    "startupProbe": {**HTTP_PROBE, "failureThreshold": 900},
    "readinessProbe": _SLOW_PROBE,
    "livenessProbe": _SLOW_PROBE,
}
_SECONDS = 600


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_sixty_pods_at_once_are_ready_without_a_restart(namespaces: Namespaces, mode: str) -> None:
    users = namespaces(mode)
    names = [f"web{number}" for number in range(_PODS)]
    for name in names:
        users.run(name, _PATIENT, gates=BOTH)
    polling.wait_until("all are Ready", lambda: _are_ready(users.pods()), seconds=_SECONDS)
    assert not any(is_reachable(pod) for pod in users.pods()[::10])
    assert users.restarts() == {}


def _are_ready(pods: list[Json]) -> bool:
    return all(condition(pod, "Ready").get("status") == "True" for pod in pods)


def _relays(agent: int) -> list[int]:
    """Processes that this agent started."""
    found = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [pid for pid in map(int, found) if b"agent.relay" in _command(pid)]


def _command(pid: int) -> bytes:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def test_killed_relays_restart_no_container(podgate: Deployment, namespaces: Namespaces) -> None:
    users = namespaces("strict")
    names = ("a", "b", "c")
    for name in names:
        users.run(name, PROBED, gates=BOTH)
    users.until_ready(*names)
    pods = [users.until(name, ISOLATION_READY, "True", "Strict") for name in names]
    for _ in range(_KILLS):
        report = podgate.until("a relay serves", lambda report: report.relay and report.relay.is_up)
        (relay,) = _relays(report.pid)
        os.kill(relay, signal.SIGKILL)
        assert not is_reachable(pods[0])
        time.sleep(0.5)
    podgate.until("a relay serves", lambda report: report.relay and report.relay.is_up)
    for name in names:
        users.until(name, ISOLATION_READY, "True", "Strict")
    users.until_ready(*names)
    assert users.restarts() == {}
    assert len(users.unhealthy()) <= _KILLS * len(names) * _PROBES_OF_A_POD, users.unhealthy()
