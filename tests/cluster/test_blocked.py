"""Another rule set of the node drops all that the node sends to pods, as some CNIs' host firewalls
do: in strict the kubelet's probes pass all the same."""

import functools

import pytest

from tests import polling
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.firewall import firewall
from tests.cluster.workloads import ISOLATION_READY, PROBED, PROBES_PASSING, is_reachable

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)


def _relayed(podgate: Deployment, namespace: str, name: str) -> int:
    """Connections that the relay has proxied to the pod."""
    status = podgate.pod_status(namespace, name)
    return sum(one.outcomes.get("proxied", 0) for one in status.relayed) if status else 0


def test_kubelet_probes_pods_in_strict_that_the_node_cannot_reach(
    podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("strict")
    names = ("a", "b")
    for name in names:
        users.run(name, PROBED, gates=BOTH)
    users.until_isolated(*names)
    failed = users.unhealthy()
    with firewall():
        before = {name: _relayed(podgate, users.namespace, name) for name in names}
        for name in names:
            polling.wait_until(
                "ten more probes",
                functools.partial(_is_probed, podgate, users.namespace, name, before[name] + 10),
            )
        assert users.unhealthy() == failed
        # A new pod's first probe may precede the relay's.
        users.run("new", PROBED, gates=BOTH)
        pods = users.until_isolated("new", *names)
        assert not any(is_reachable(pod) for pod in pods)
    assert users.restarts() == {}


def _is_probed(podgate: Deployment, namespace: str, name: str, times: int) -> bool:
    return _relayed(podgate, namespace, name) >= times
