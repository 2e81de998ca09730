"""The rows of `podgate probes`: podgate's results, and what the relay knows of the kubelet's."""

import pytest

from agent.admin.report import AnswerStatus, RelayedPortStatus
from agent.operate.cli.views import probes
from tests.agent.operate.page.reports import pod, probe


def relayed(**changes: object) -> RelayedPortStatus:
    defaults: dict[str, object] = {
        "container": "app",
        "handler": "http :8080/healthz",
        "port": 8080,
        "last_outcome": "proxied",
        "outcomes": {"rejected": 2, "proxied": 5, "timeout": 1},
        "open_ms": 0.254,
    }
    return RelayedPortStatus(**defaults | changes)  # type: ignore[arg-type]


def test_probes_of_podgate_precede_the_kubelets_of_the_same_pod() -> None:
    pods = [pod("a", probes=[probe()], relayed=[relayed()]), pod("b", probes=[probe()])]
    assert [(row.pod, row.by) for row in probes.rows(pods)] == [
        *(("shop/a", "podgate"), ("shop/a", "kubelet"), ("shop/b", "podgate"))
    ]


def test_result_of_podgate_has_the_first_line_of_its_response() -> None:
    found = probe(result="failure", last_message="first\nsecond", successes=3, failures=4)
    (row,) = probes.rows([pod(probes=[found])])
    assert (row.probe, row.handler, row.last_response) == ("readiness", found.handler, "first")
    assert (row.result, row.is_success, row.successes, row.failures) == ("failure", False, 3, 4)
    (row,) = probes.rows([pod(probes=[probe(last_message="")])])
    assert (row.last_response, row.is_success, row.answer) == ("", True, "")


def test_connections_of_the_kubelet_are_successes_if_they_are_proxied() -> None:
    (row,) = probes.rows([pod(probes=[], relayed=[relayed()])])
    assert (row.successes, row.failures, row.is_success) == (5, 3, True)
    assert row.last_response == "proxied 5, rejected 2, timeout 1"
    assert (row.probe, row.handler, row.connect) == ("http :8080/healthz", "port 8080", "0.25 ms")


def test_port_that_no_probe_declares_and_none_that_was_reached() -> None:
    unknown = relayed(handler="", port=0, last_outcome="rejected", outcomes={"rejected": 1})
    (row,) = probes.rows([pod(probes=[], relayed=[unknown])])
    assert (row.probe, row.handler) == ("undeclared", "undeclared ports")
    assert (row.successes, row.failures, row.is_success) == (0, 1, False)
    (row,) = probes.rows([pod(probes=[], relayed=[relayed(open_ms=None)])])
    assert row.connect == ""


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (AnswerStatus(verdict="healthy", age_seconds=0.24), "healthy, 0.2 s old"),
        (AnswerStatus(verdict="healthy", age_seconds=None), "healthy, 0.0 s old"),
        (
            AnswerStatus(verdict="", obstacle="stale", problem="It is old."),
            "none (stale): It is old.",
        ),
    ],
)
def test_answer_to_the_kubelet_has_its_age_or_why_there_is_none(
    answer: AnswerStatus, text: str
) -> None:
    (row,) = probes.rows([pod(probes=[probe(answer=answer)])])
    assert row.answer == text
