"""Checks of `podgate explain pod` on reports of an agent."""

import ipaddress

from agent.explain.pod_checks import PodFacts, check
from agent.explain.pods import NamedPod
from tests.agent.page import reports


def kubelet_text(**fields: str | None) -> tuple[str, str]:
    """State and text of the check of the kubelet, for a pod in enforce."""
    status = reports.pod()
    addresses = (ipaddress.ip_address("198.18.1.1"),)
    pod = NamedPod("shop", "web", status.uid, addresses, status=status)
    found = check(PodFacts(pod, reports.report(status, **fields)))
    (one,) = (check for check in found.checks if check.name == "kubelet")
    return one.state, one.text


def test_cgroup_of_an_identified_kubelet_is_named() -> None:
    text = "identified, in /system.slice/kubelet.service"
    assert kubelet_text() == ("ok", text)


def test_kubelet_that_is_not_identified_is_a_problem_where_ports_are_open() -> None:
    text = "Declared ports are open."
    assert kubelet_text(kubelet=None, open_ports=text) == ("problem", text)


def test_kubelet_that_is_not_identified_is_not_reported_as_identified() -> None:
    state, text = kubelet_text(kubelet=None, kubelet_problem="no process named kubelet.")
    assert state == "ok"
    assert text == "not identified, and no port is open for it: no process named kubelet."
