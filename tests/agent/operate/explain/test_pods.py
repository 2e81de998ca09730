"""Pods by name: what is known of them from the agent's report and its saved state."""

import ipaddress

from agent.admin.observations import ObservedPod
from agent.operate.explain.pods import NamedPods
from tests.agent.operate.cli import reports

ADDRESS = ipaddress.ip_address("198.18.1.7")


def test_pod_of_a_manifest_has_the_labels_that_the_agent_saved() -> None:
    """Else its suggested policy would select the whole namespace."""
    (status, *_) = reports.STATUS.pods
    labels = {"app": "web"}
    saved = ObservedPod(namespace=status.namespace, name=status.name, labels=labels)
    found = NamedPods(reports.STATUS, None, [(saved, (ADDRESS,))])
    pod = found.find(f"{status.namespace}/{status.name}")
    assert (pod.labels, pod.status) == (labels, status)


def test_pod_that_only_the_saved_state_has_is_found_by_its_address() -> None:
    saved = ObservedPod(namespace="shop", name="gone", labels={"app": "web"})
    found = NamedPods(None, None, [(saved, (ADDRESS,))]).with_address(ADDRESS)
    assert found is not None
    assert (found.full_name, found.labels) == ("shop/gone", {"app": "web"})
