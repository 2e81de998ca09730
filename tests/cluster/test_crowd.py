"""Many pods at once, and relays that are killed, under a real kubelet."""

import os
import pathlib
import signal
import time

import pytest
from prometheus_client import parser

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
# After each one the next relay is started later, up to 8 s.
_KILLS = int(os.environ.get("PODGATE_TEST_KILLS", "6"))
# A probe that is open when the relay is killed is lost, since its bytes were in the relay's memory.
# Twenty kills beside a load of 35 lost six.
_LOST_PROBES = _KILLS
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
    # Servers that do not listen yet fail probes, too.
    assert [message for message in users.unhealthy() if "Startup probe" not in message] == []


def _are_ready(pods: list[Json]) -> bool:
    return all(condition(pod, "Ready").get("status") == "True" for pod in pods)


def _relays(agent: int) -> list[int]:
    """Processes that this agent started."""
    found = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [pid for pid in map(int, found) if b"agent.relay" in _command(pid)]


def _command(pid: int) -> bytes:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def _patches(podgate: Deployment) -> float:
    """Conditions that the agent has written, when none is left to write."""

    def read() -> dict[str, float]:
        families = parser.text_string_to_metric_families(podgate.metrics())
        samples = [sample for family in families for sample in family.samples]
        return {
            name: sum(sample.value for sample in samples if sample.name == name)
            for name in ("podgate_api_pods_pending", "podgate_api_patches_total")
        }

    polling.wait_until("nothing is pending", lambda: not read()["podgate_api_pods_pending"])
    return read()["podgate_api_patches_total"]


def _until_a_relay_serves(podgate: Deployment) -> int:
    """The agent's process."""
    report = podgate.until("a relay serves", lambda report: report.relay and report.relay.is_up)
    return report.pid


def test_relay_that_is_back_within_seconds_changes_no_condition(
    podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("strict")
    users.run("web", PROBED, gates=BOTH)
    (before,) = users.until_isolated("web")
    killed = podgate.kill_agent()
    podgate.until("the next agent has the node", lambda report: report.pid != killed)
    agent = _until_a_relay_serves(podgate)
    users.until_isolated("web")
    patches = _patches(podgate)
    (relay,) = _relays(agent)
    os.kill(relay, signal.SIGKILL)
    polling.wait_until("another relay", lambda: relay not in _relays(agent) and _relays(agent))
    _until_a_relay_serves(podgate)
    (after,) = users.until_isolated("web")
    assert condition(after, ISOLATION_READY) == condition(before, ISOLATION_READY)
    assert _patches(podgate) == patches


def test_killed_relays_restart_no_container(podgate: Deployment, namespaces: Namespaces) -> None:
    users = namespaces("strict")
    names = ("a", "b", "c")
    for name in names:
        users.run(name, PROBED, gates=BOTH)
    users.until_ready(*names)
    pods = [users.until(name, ISOLATION_READY, "True", "Strict") for name in names]
    for _ in range(_KILLS):
        (relay,) = _relays(_until_a_relay_serves(podgate))
        os.kill(relay, signal.SIGKILL)
        assert not is_reachable(pods[0])
        time.sleep(0.5)
    _until_a_relay_serves(podgate)
    for name in names:
        users.until(name, ISOLATION_READY, "True", "Strict")
    users.until_ready(*names)
    assert users.restarts() == {}
    assert len(users.unhealthy()) <= _LOST_PROBES, users.unhealthy()
