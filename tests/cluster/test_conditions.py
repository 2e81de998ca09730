"""Conditions of pods over restarts of containers, kubelet, sandbox, agent and API server."""

import datetime
import time

import pytest

from tests import polling
from tests.cluster import containers
from tests.cluster.api import Json
from tests.cluster.containers import FRAGILE, FRAGILE_VOLUMES
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    PROBED,
    PROBES_PASSING,
    Workloads,
    condition,
    is_reachable,
    transition,
)

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)
# The probes fail, but the kubelet does not restart the container.
_UNREADY_ONLY = {**FRAGILE, "readinessProbe": {**HTTP_PROBE, "failureThreshold": 1}}


def _start(users: Workloads, *names: str) -> list[Json]:
    for name in names:
        users.run(name, PROBED, gates=BOTH)
    return users.until_isolated(*names)


def test_isolation_stays_ready_over_a_container_restart(node: OneNode, closed: Workloads) -> None:
    (before,) = _start(closed, "web")
    containers.kill_container(node.runtime, before)
    polling.wait_until("the container restarted", closed.restarts)
    (after,) = closed.until_isolated("web")
    assert condition(after, ISOLATION_READY) == condition(before, ISOLATION_READY)
    assert not is_reachable(after)
    assert closed.restarts() == {"web": 1}


def test_new_sandbox_is_gated_again_and_its_condition_names_it(
    node: OneNode, closed: Workloads
) -> None:
    (before,) = _start(closed, "web")
    old = containers.sandbox(node.runtime, before)
    containers.kill_sandbox(node.runtime, before)
    polling.wait_until(
        "the condition is about another sandbox",
        lambda: old[:12] not in condition(closed.pod("web"), ISOLATION_READY)["message"],
    )
    (after,) = closed.until_isolated("web")
    assert after["status"]["podIP"] != before["status"]["podIP"]
    assert not is_reachable(after)


def test_ten_kubelet_restarts_fail_no_probe(
    node: OneNode, podgate: Deployment, closed: Workloads
) -> None:
    names = ("a", "b", "c")
    before = _start(closed, *names)
    for _ in range(10):
        node.kubelet.restart()
        node.kubelet.wait_until_ready()
        # Each probe runs once a second.
        time.sleep(1.5)
    podgate.until("the kubelet is known", lambda report: report.kubelet)
    after = closed.until_isolated(*names)
    assert closed.restarts() == {}
    assert closed.unhealthy() == []
    for old, new in zip(before, after, strict=True):
        assert condition(new, ISOLATION_READY) == condition(old, ISOLATION_READY)
        assert not is_reachable(new)


def test_killed_agent_leaves_gates_probes_and_conditions(
    podgate: Deployment, closed: Workloads
) -> None:
    (before,) = _start(closed, "web")
    killed = podgate.kill_agent()
    assert not is_reachable(before)
    report = podgate.until("the next agent responds", lambda report: report.pid != killed)
    assert not is_reachable(before)
    assert report.programs == "pinned"
    # Some probes of each kind run.
    time.sleep(3)
    (after,) = closed.until_isolated("web")
    for kind in BOTH:
        assert condition(after, kind) == condition(before, kind)
    assert closed.restarts() == {}
    assert closed.unhealthy() == []
    podgate.wait_until_ready()


@pytest.mark.parametrize("outage", ["hung", "killed"])
def test_outage_of_the_api_server_loses_no_condition(
    node: OneNode, podgate: Deployment, closed: Workloads, outage: str
) -> None:
    users = closed
    users.run("web", PROBED, gates=BOTH)
    users.run("sick", _UNREADY_ONLY, gates=BOTH, volumes=FRAGILE_VOLUMES)
    before, sick = users.until_isolated("web", "sick")
    api_server = node.control_plane.api_server
    if outage == "hung":
        api_server.pause()
    else:
        api_server.kill()
    try:
        podgate.kill_agent()
        podgate.until("the next agent has the pods", lambda report: len(report.pods) >= 2)
        assert not is_reachable(before)
        # On a busy machine a probe may have failed before.
        polling.wait_until(
            "the next agent's probe passes", lambda: not _reason(podgate, users, "sick")
        )
        # Times in the API have whole seconds.
        failed = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        containers.set_health(sick, is_healthy=False)
        polling.wait_until(
            "the agent knows that the probe fails", lambda: _reason(podgate, users, "sick")
        )
        observed = datetime.datetime.now(datetime.UTC)
        time.sleep(3)
    finally:
        if outage == "hung":
            api_server.resume()
        else:
            api_server.start()
        node.control_plane.wait_until_ready()
    after = users.until("sick", PROBES_PASSING, "False", "ProbeFailing")
    assert failed <= transition(after, PROBES_PASSING) <= observed
    users.until("sick", "Ready", "False")
    (web,) = users.until_ready("web")
    assert condition(web, ISOLATION_READY) == condition(before, ISOLATION_READY)
    assert users.restarts() == {}
    podgate.wait_until_ready()


def _reason(podgate: Deployment, users: Workloads, name: str) -> bool:
    pod = podgate.pod_status(users.namespace, name)
    return pod is not None and any(one.reason == "ProbeFailing" for one in pod.conditions)
