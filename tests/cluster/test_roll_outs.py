"""Roll-outs of the DaemonSet by its real controller: of versions that work, and that break."""

import sys
import threading

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import NAME, OneNode
from tests.cluster.workloads import ISOLATION_READY, PROBED, Workloads, condition, is_reachable

pytestmark = pytest.mark.kernel

# A version that fails once it has the node.
_BREAKS = """
from agent.app.agent import Agent

def fail(*_, **__):
    raise ZeroDivisionError("this version is broken")

Agent.__init__ = fail
from agent.operate.cli.main import main

main(prog_name="podgate")
"""
BROKEN = (f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-c", _BREAKS)
REASONS = {"enforce": "Enforced", "strict": "Strict"}
# A version that is slower than this to be restarted has failed differently.
_SECONDS = 240
# Longer than the limit of the agent's and the controllers' requests.
_HANG_SECONDS = 40


@pytest.fixture(params=REASONS)
def users(request: pytest.FixtureRequest, namespaces: Namespaces, podgate: Deployment) -> Workloads:
    """Of a pod with each kind of probe."""
    made = namespaces(request.param)
    made.run("web", PROBED, gates=(ISOLATION_READY,))
    made.until("web", ISOLATION_READY, "True", REASONS[request.param])
    made.until_ready("web")
    return made


def assert_unharmed(users: Workloads) -> None:
    assert users.restarts() == {}
    assert users.unhealthy() == []


def pid(podgate: Deployment) -> int | None:
    report = podgate.report()
    return report.pid if report else None


def is_ready(pod: Json) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def restarts(pod: Json) -> int:
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", []))


def test_roll_out_harms_no_pod(podgate: Deployment, users: Workloads) -> None:
    before = pid(podgate)
    podgate.set_arguments(("--dead-man-hours=23",))
    assert pid(podgate) != before
    assert not is_reachable(users.pod("web"))
    podgate.set_arguments(())
    assert podgate.restarts() == 0
    assert_unharmed(users)


def test_undo_before_the_end_returns_the_node(podgate: Deployment, users: Workloads) -> None:
    before = pid(podgate)
    podgate.start_roll_out(("--dead-man-hours=23",))
    try:
        polling.wait_until("the new agent", lambda: pid(podgate) not in (None, before))
    finally:
        podgate.set_arguments(())
    assert pid(podgate) == before
    assert not is_reachable(users.pod("web"))
    assert_unharmed(users)


def test_version_that_breaks_stops_the_roll_out_and_the_previous_agent_has_the_node(
    podgate: Deployment, users: Workloads
) -> None:
    before = pid(podgate)
    (first,) = podgate.pods()
    podgate.start_roll_out((), command=BROKEN)
    try:
        was_ready: list[str] = []

        def has_failed_twice() -> bool:
            later = [pod for pod in podgate.pods() if pod["metadata"]["uid"] != uid_of(first)]
            was_ready.extend(pod["metadata"]["name"] for pod in later if is_ready(pod))
            return any(restarts(pod) >= 2 for pod in later)

        polling.wait_until("the second failure", has_failed_twice, seconds=_SECONDS)
        assert was_ready == []
        assert uid_of(first) in [uid_of(pod) for pod in podgate.pods()]
        polling.wait_until("the previous agent", lambda: pid(podgate) == before)
        assert not is_reachable(users.pod("web"))
    finally:
        podgate.set_arguments(())
    (remaining,) = podgate.pods()
    assert uid_of(remaining) == uid_of(first)
    assert pid(podgate) == before
    assert_unharmed(users)


def test_roll_out_ends_within_a_minute_after_the_api_server_hung(
    node: OneNode, podgate: Deployment, users: Workloads
) -> None:
    before = pid(podgate)
    podgate.start_roll_out(("--dead-man-hours=23",))
    try:
        polling.wait_until("the new agent", lambda: pid(podgate) not in (None, before))
        node.control_plane.api_server.pause()
        try:
            threading.Event().wait(_HANG_SECONDS)
        finally:
            node.control_plane.api_server.resume()
        podgate.wait_until_ready(seconds=60)
        assert not is_reachable(users.pod("web"))
    finally:
        podgate.set_arguments(())
    assert podgate.restarts() == 0
    assert_unharmed(users)


def uid_of(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def test_kubelet_that_is_not_found_is_no_outage_and_stops_the_roll_out(
    node: OneNode, podgate: Deployment, users: Workloads
) -> None:
    (first,) = podgate.pods()
    podgate.start_roll_out(("--kubelet=unit:podgate-nosuch.service",))
    try:
        report = podgate.until("open ports", lambda report: report.open_ports)
        assert "/system.slice/podgate-nosuch.service" in report.open_ports
        # A probe of each kind and more, all by the real kubelet.
        polling.wait_until("the event", lambda: events(node))
        event = events(node)[0]
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Node", NAME)
        assert event["message"] == report.open_ports
        message = "Kubelet not identified"
        polling.wait_until(
            "the condition",
            lambda: message in condition(users.pod("web"), ISOLATION_READY)["message"],
        )
        assert is_reachable(users.pod("web"))
        # It is not ready, and hands the node back.
        polling.wait_until("the previous agent", lambda: is_closed(podgate), seconds=_SECONDS)
        assert uid_of(first) in [uid_of(pod) for pod in podgate.pods()]
    finally:
        podgate.set_arguments(())
    assert not is_reachable(users.pod("web"))
    assert_unharmed(users)


def is_closed(podgate: Deployment) -> bool:
    # The API server closes a connection without requests.
    podgate.pods()
    report = podgate.report()
    return report is not None and report.is_synced and report.open_ports == ""


def events(node: OneNode) -> list[Json]:
    path = "/api/v1/namespaces/default/events"
    return node.api.items(path, fieldSelector="reason=DeclaredPortsOpen")
