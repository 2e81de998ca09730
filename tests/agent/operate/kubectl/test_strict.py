"""`kubectl podgate strict`: what it compares, what stops it, and how it continues."""

import argparse

import pytest

from agent.operate.kubectl import main, strict
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl import reporting
from tests.agent.operate.kubectl.moved_clock import MovedClock
from tests.agent.operate.kubectl.observing import NAMESPACE
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.operate.kubectl.test_comparison import LIVENESS, of_api, reported
from tests.agent.operate.kubectl.test_enforce import Step
from tests.agent.operate.page.reports import probe


class Comparing:
    """The namespace of `Step`, with one pod and its probe."""

    def __init__(self, kubectl: KubectlStandin, cluster: Cluster) -> None:
        self.step = Step(kubectl, cluster)
        self.kubectl = kubectl
        self._cluster = cluster
        self.clock = MovedClock()
        self.pod = reported(probe(type="Liveness"))
        self.step.report_pods(self.pod)
        kubectl.respond(
            "get", "pods", f"--namespace={NAMESPACE}", output={"items": [of_api() | {"spec": {}}]}
        )

    def run(self, *, yes: bool = False) -> int:
        arguments = argparse.Namespace(namespace=NAMESPACE, compare=30.0, watch=10.0, yes=yes)
        return strict.run(arguments, self._cluster, clock=self.clock, sleep=self.clock.sleep)


@pytest.fixture
def comparing(kubectl: KubectlStandin, cluster: Cluster) -> Comparing:
    return Comparing(kubectl, cluster)


def test_namespace_without_a_difference_gets_strict(
    comparing: Comparing, capsys: pytest.CaptureFixture[str]
) -> None:
    in_strict = reporting.pod("web", "strict", "Strict")
    comparing.clock.at[31] = lambda: comparing.step.report_pods(in_strict)
    assert comparing.run() == 0
    assert comparing.step.labels() == ["podgate.io/mode=strict"]
    comparison, same, labelled, stays = capsys.readouterr().out.splitlines()
    assert comparison == (
        "Comparing podgate's results of the probes in namespace shop with the kubelet's for 30 s."
    )
    assert same == "All 1 probes have the same result from inside."
    assert labelled.startswith("Namespace shop is labelled podgate.io/mode=strict. Watching drops")
    assert stays.startswith("Namespace shop stays in strict; its gates are in force for 1 pods.")
    assert comparing.clock.now >= 40


def test_pod_that_strict_would_restart_stops_it(
    comparing: Comparing, capsys: pytest.CaptureFixture[str]
) -> None:
    comparing.step.report_pods(reported(LIVENESS))
    assert comparing.run() == 1
    assert comparing.step.labels() == []
    assert comparing.clock.now == 30
    assert capsys.readouterr().out.splitlines()[1:] == [
        "would be restarted: shop/web, container app: Liveness probe passes for the kubelet and "
        "fails from inside: dial tcp 198.18.1.1:8080: connect: connection refused.",
        "Nothing was changed. Correct these probes or pods, or use --yes; until then 'kubectl "
        "podgate enforce shop' closes the pods without a change of probes.",
    ]


def test_pod_that_would_stay_at_enforce_stops_it(
    comparing: Comparing, capsys: pytest.CaptureFixture[str]
) -> None:
    comparing.step.report_pods(reported(problem="Its loopback is down."))
    assert comparing.run() == 1
    assert "would stay at enforce: shop/web: Its loopback is down.\n" in capsys.readouterr().out


def test_yes_continues(comparing: Comparing) -> None:
    comparing.step.report_pods(reported(LIVENESS))
    in_strict = reporting.pod("web", "strict", "Strict")
    comparing.clock.at[31] = lambda: comparing.step.report_pods(in_strict)
    assert comparing.run(yes=True) == 0
    assert comparing.step.labels() == ["podgate.io/mode=strict"]


def test_node_that_does_not_answer_stops_it(
    comparing: Comparing, capsys: pytest.CaptureFixture[str]
) -> None:
    comparing.kubectl.respond("exec", "agent-two", "status", error="podgate: no agent responds\n")
    assert comparing.run() == 1
    output = capsys.readouterr().out
    assert "problem: two: podgate: no agent responds.\n" in output
    assert "All 1 probes" not in output
    assert comparing.step.labels() == []


def test_namespace_in_strict_is_not_compared(
    comparing: Comparing, capsys: pytest.CaptureFixture[str]
) -> None:
    comparing.step.label("strict")
    comparing.step.report_pods(reporting.pod("web", "strict", "Strict"))
    assert comparing.run() == 0
    assert "Comparing" not in capsys.readouterr().out
    assert comparing.clock.now == 0


def test_times_are_read_like_those_of_enforce() -> None:
    parsed = main.parser().parse_args(["strict", "shop", "--compare", "30s", "--watch", "1h"])
    assert (parsed.compare, parsed.watch, parsed.yes) == (30.0, 3600.0, False)
