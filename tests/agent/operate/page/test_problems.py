"""The problems of a node and of its pods: how bad each is, and the worst first."""

from typing import Any

import pytest

from agent.admin.report import HookStatus, PathStatus, PodSourceStatus, PodStatus, RawSocketStatus
from agent.labels import ISOLATION_READY, PROBES_PASSING
from agent.operate.page.problems import Problem, Severity, find, full_name, has_problem
from tests.agent.operate.page.reports import condition, pod, relay, report

OPEN, DEGRADED = Severity.OPEN, Severity.DEGRADED


@pytest.mark.parametrize(
    ("fields", "severity", "text"),
    [
        ({"open_ports": "Any host process reaches declared ports."}, OPEN, "declared ports"),
        ({"max_mode": "off"}, OPEN, "podgate is off: all pods are open."),
        ({"max_mode": "off", "max_mode_from": "a file"}, OPEN, "podgate is off by a file:"),
        ({"kubelet": None, "kubelet_problem": "two of them"}, DEGRADED, "two of them"),
        ({"is_synced": False}, DEGRADED, "pod sync is not finished"),
        ({"kubelet_unfollowed": "no BTF."}, DEGRADED, "restarts: no BTF."),
        ({"relay": relay(is_up=False, problem="no netns")}, DEGRADED, "no netns"),
        ({"relay": relay(is_bypassed=True)}, DEGRADED, "The relay is full"),
        ({"hooks": [HookStatus(name="connect6", problem="EPERM")]}, DEGRADED, "EPERM"),
        (
            {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="Not all.", sources=[])},
            DEGRADED,
            "Not all.",
        ),
        (
            {"pod_source": PodSourceStatus(pods_from="the API", problems=["The watch fails."])},
            DEGRADED,
            "The watch fails.",
        ),
    ],
)
def test_each_problem_of_the_node_is_one_sentence_with_its_severity(
    fields: dict[str, Any], severity: Severity, text: str
) -> None:
    (problem,) = find(report(pod(), **fields))
    assert (problem.severity, problem.pods) == (severity, ())
    assert text in problem.text


@pytest.mark.parametrize(
    ("fields", "severity", "text"),
    [
        (
            {"conditions": [condition(ISOLATION_READY, "False", "GateFailed", "Busy.")]},
            OPEN,
            "isolation-ready is False: Busy.",
        ),
        (
            {"conditions": [condition(PROBES_PASSING, "False", "ProbesFailing", "Timeout.")]},
            DEGRADED,
            "probes-passing is False: Timeout.",
        ),
        ({"mode_problems": ["Label [x] is no mode."]}, DEGRADED, "Label [x] is no mode."),
        ({"existing_flows": 2}, DEGRADED, "--close-existing-flows"),
    ],
)
def test_each_problem_of_a_pod_is_one_sentence_with_its_severity(
    fields: dict[str, Any], severity: Severity, text: str
) -> None:
    (problem,) = find(report(pod("web", **fields), pod("db")))
    assert (problem.severity, problem.pods) == (severity, ("shop/web",))
    assert text in problem.text
    assert has_problem(pod(**fields))


def test_pod_with_bypassed_addresses_is_open_and_named_once() -> None:
    paths = [PathStatus(address=f"198.18.1.{n}", result="bypassed") for n in (1, 2)]
    (problem,) = find(report(pod(paths=paths)))
    assert problem == Problem(
        OPEN, "Host packets reach an address of the pod past its gate.", ("shop/web",)
    )


def test_pod_as_desired_has_no_problem() -> None:
    assert find(report(pod())) == []
    assert not has_problem(pod())


def test_worst_problem_is_first_and_pods_with_the_same_share_it() -> None:
    label = {"mode_problems": ["Label [x] is no mode."]}
    failed = condition(ISOLATION_READY, "False", "GateFailed", "Busy.")
    pods = [pod("a", **label), pod("b", **label), pod("c", conditions=[failed])]
    first, *_, last = find(report(*pods, is_synced=False))
    assert (first.severity, first.pods) == (OPEN, ("shop/c",))
    assert (last.severity, last.pods) == (DEGRADED, ("shop/a", "shop/b"))


def test_pod_of_a_manifest_has_a_name_without_namespace() -> None:
    static: PodStatus = pod("etcd", namespace="")
    assert full_name(static) == "etcd"
