"""Roll-outs over several nodes, and the loss of the controller that leads."""

import datetime
from collections.abc import Callable

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.deployment import NAMESPACE
from tests.cluster.several_nodes import SeveralNodes
from tests.fleet import watching
from tests.fleet.conftest import Agents
from tests.fleet.test_modes import set_mode
from tests.fleet.workload import Fleet
from tests.networks import traffic

pytestmark = pytest.mark.kernel

_DAEMON_SET = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/podgate"
_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/podgate-controller"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_RESTARTED = "kubectl.kubernetes.io/restartedAt"


def _restart_all(cluster: SeveralNodes) -> None:
    """As `kubectl rollout restart`."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    template = {"metadata": {"annotations": {_RESTARTED: now}}}
    cluster.api.patch(_DAEMON_SET, {"spec": {"template": template}})


def test_roll_out_opens_nothing_and_breaks_nothing(
    cluster: SeveralNodes,
    fleet: Fleet,
    podgate: Agents,
    record_property: Callable[[str, object], None],
) -> None:
    set_mode(fleet, podgate, "strict")
    (first, *_) = podgate.values()
    first.wait_until_available()
    before = {name: agent.report() for name, agent in podgate.items()}
    watch = traffic.Watch(*watching.paths(cluster, fleet))
    with watch.running():
        _restart_all(cluster)
        for agent in podgate.values():
            agent.wait_until_ready()
    after = {name: agent.report() for name, agent in podgate.items()}
    for name, report in after.items():
        earlier = before[name]
        assert report is not None
        assert earlier is not None
        assert report.pid != earlier.pid, name
    record_property("figures", watch.summary)
    assert not any(watch.wrong.values()), watch.wrong
    assert fleet.harm() == ""


def test_controller_that_leads_is_lost(
    cluster: SeveralNodes, record_property: Callable[[str, object], None]
) -> None:
    """Another one leads, and writes the status of a new policy."""

    def lease() -> Json:
        return cluster.api.find(_LEASE) or {"spec": {}}

    def holder() -> str:
        return str(lease()["spec"].get("holderIdentity") or "")

    leader = polling.wait_until("a controller leads", holder)
    pods = [pod["metadata"]["name"] for pod in cluster.api.items(_PODS)]
    (name,) = [pod for pod in pods if pod in leader]
    began = datetime.datetime.now(datetime.UTC)
    cluster.api.delete(f"{_PODS}/{name}", gracePeriodSeconds="0")
    polling.wait_until("another controller leads", lambda: holder() not in ("", leader))
    seconds = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    record_property("figures", f"another one leads after {seconds:.1f} s")
