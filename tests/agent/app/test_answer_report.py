"""People see of each answered probe its verdict and its age, or why there is none."""

import msgspec
import prometheus_client
import pytest

from agent.admin.report import AnswerStatus
from agent.app.answer_report import AnswerReport
from agent.pods.conditions import Conditions
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes
from agent.probing.answers import ProbeName
from tests.agent.probing.answering import (
    ADDRESS,
    HEALTHZ,
    LIVENESS,
    OWN_CHECK,
    READINESS,
    check,
    http,
    spec,
)
from tests.agent.strict.strict_pods import strict_pod

SECOND = 10**9
APP_LIVENESS, APP_READINESS = ProbeName("app", LIVENESS), ProbeName("app", READINESS)
TLS = http("/", scheme="HTTPS", httpHeaders=[{"name": "X-Probe", "value": "readiness"}])
SPEC = spec(
    {"livenessProbe": HEALTHZ, "readinessProbe": TLS},
    {"liveness": OWN_CHECK, "readiness": OWN_CHECK},
)


class Node:
    """One pod whose liveness probe is answered, and whose readiness probe cannot be."""

    def __init__(self) -> None:
        self.store = PodStore(Conditions())
        self.answered = AnsweredProbes()
        self.now_ns = 0
        self.problem: str | None = None
        state = strict_pod("web", ADDRESS)
        state.pod = msgspec.structs.replace(state.pod, spec=SPEC)
        self.state: PodState = state
        self.store.pods[state.pod.uid] = state
        self.answered.set_pod(state.pod.uid, SPEC, (ADDRESS,), {"app": "c1"})
        self.report = AnswerReport(
            self.store, self.answered, lambda _: self.problem, now_ns=lambda: self.now_ns
        )

    def liveness(self) -> AnswerStatus:
        return self.report.of(self.state)[APP_LIVENESS]

    def series(self) -> dict[str, float]:
        registry = prometheus_client.CollectorRegistry()
        registry.register(self.report)
        text = prometheus_client.generate_latest(registry).decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize(("passes", "verdict"), [(True, "healthy"), (False, "unhealthy")])
def test_verdict_is_shown_with_its_age(node: Node, passes: bool, verdict: str) -> None:
    node.answered.record(check("uid-web", passes=passes, finished_ns=SECOND))
    node.now_ns = 3 * SECOND
    assert node.liveness() == AnswerStatus(verdict=verdict, age_seconds=2.0)
    assert node.series()[f'podgate_verdicts{{result="{verdict}"}}'] == 1


def test_probe_without_a_verdict_is_proxied(node: Node) -> None:
    assert node.liveness().obstacle == "no_verdict"
    node.answered.record(check("uid-web", valid_seconds=2))
    node.now_ns = 2 * SECOND
    assert (node.liveness().obstacle, node.liveness().age_seconds) == ("stale", 2.0)
    assert node.series()['podgate_probes_not_answered{reason="stale"}'] == 1


def test_probe_that_bypasses_the_relay_is_not_answered(node: Node) -> None:
    node.answered.record(check("uid-web"))
    node.problem = "Mode is not strict."
    assert node.liveness() == AnswerStatus(
        obstacle="not_relayed",
        problem='Container "app": liveness probe: '
        "the kubelet's probe goes to the pod itself: Mode is not strict.",
    )
    assert node.series()['podgate_verdicts{result="healthy"}'] == 0


def test_probe_that_cannot_be_answered_names_its_obstacle(node: Node) -> None:
    found = node.report.of(node.state)[APP_READINESS]
    assert found.obstacle == "tls"
    assert "is encrypted" in found.problem
    assert node.series()['podgate_probes_not_answered{reason="tls"}'] == 1
