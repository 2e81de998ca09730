"""Connects on several nodes: as before podgate, but for what each mode closes."""

from collections.abc import Callable

import pytest

from tests import polling
from tests.cluster.workloads import ISOLATION_READY, REASONS
from tests.fleet import matrix
from tests.fleet.conftest import Agents, Site
from tests.fleet.workload import SHOP, Fleet, Web
from tests.networks.traffic import holds_for

pytestmark = pytest.mark.kernel

_HEALTHY_SECONDS = 10.0


@pytest.fixture(params=("audit", "enforce", "strict"))
def mode(request: pytest.FixtureRequest, fleet: Fleet, podgate: Agents) -> str:
    """In force for the servers of all nodes."""
    set_mode(fleet, podgate, request.param)
    return str(request.param)


def set_mode(fleet: Fleet, podgate: Agents, mode: str) -> None:
    """Label the servers' namespace, and wait until the mode is in force on all nodes."""
    fleet.set_mode(mode)
    for web in fleet.webs:
        until_in_mode(podgate, web, mode)


def until_in_mode(podgate: Agents, web: Web, mode: str) -> None:
    """By the agent of its node: without a readiness gate the pod itself has no condition."""

    def holds() -> bool:
        pod = podgate[web.node].pod_status(SHOP, web.name)
        return pod is not None and any(
            (one.type, one.status, one.reason) == (ISOLATION_READY, "True", REASONS[mode])
            for one in pod.conditions
        )

    polling.wait_until(f"{web.name} is in {mode}", holds)


def test_connects_are_as_before_podgate_but_for_those_that_are_closed(
    site: Site, fleet: Fleet, mode: str, record_property: Callable[[str, object], None]
) -> None:
    after = matrix.run(fleet.sources(), fleet.targets())
    closed = None if mode == "audit" else matrix.is_own
    assert matrix.differences(site.before, after, closed=closed) == []
    record_property("figures", matrix.summary(after))


def test_probes_hold_and_nothing_restarts(fleet: Fleet, mode: str) -> None:
    assert holds_for(_HEALTHY_SECONDS, fleet.harm) == ""


def test_matrix_before_podgate_is_whole(site: Site) -> None:
    """It would prove nothing if services had not worked. Clients outside have no route to pods."""
    closed = {
        (source.name, target.name, result)
        for (source, target), result in site.before.items()
        if not matrix.is_open(result) and target.can_connect and (source.node or target.by)
    }
    assert closed == set()


def test_each_agent_reports_its_own_pods(podgate: Agents, fleet: Fleet) -> None:
    for web in fleet.webs:
        report = podgate[web.node].report()
        assert report is not None
        names = {pod.name for pod in report.pods}
        assert {f"web-{web.node}", f"client-{web.node}"} <= names
        assert not {one.name for one in fleet.webs if one.node != web.node} & names
