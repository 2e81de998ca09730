"""Probes that the relay answers: the answers of each port, and their verdicts."""

import pytest

from agent.relay.answers import NO_ANSWERS, TargetAnswers
from agent.relay.messages import (
    Answer,
    AnswerOutcome,
    GrpcRequest,
    HttpRequest,
    TcpConnect,
    Verdict,
)
from agent.relay.probe_requests import grpc_request

HTTP = HttpRequest(b"GET / HTTP/1.1\r\n\r\n")
ENDS_NS = 1000


def _verdict(answer: int, *, is_healthy: bool = True, ends_ns: int | None = ENDS_NS) -> Verdict:
    return Verdict("key", answer, is_healthy, "", ends_ns)


@pytest.mark.parametrize(
    ("verdict", "now_ns", "outcome", "missing"),
    [
        (None, 0, "no_verdict", ["no_verdict"]),
        (_verdict(1), ENDS_NS - 1, "healthy", []),
        (_verdict(1, is_healthy=False), ENDS_NS - 1, "unhealthy", []),
        (_verdict(1), ENDS_NS, "stale", ["stale"]),
        (_verdict(1, ends_ns=None), 0, "no_verdict", ["no_verdict"]),
    ],
)
def test_answer_is_the_verdict_while_it_is_fresh(
    verdict: Verdict | None, now_ns: int, outcome: AnswerOutcome, missing: list[AnswerOutcome]
) -> None:
    answers = TargetAnswers()
    answers.set_answers((Answer(1, 80, HTTP),))
    if verdict:
        answers.set_verdict(verdict)
    port = answers.by_port[80]
    assert port.http[HTTP.sent].outcome(now_ns) == outcome
    assert port.missing(now_ns) == missing


def test_answers_are_found_by_port_and_by_what_the_kubelet_sends() -> None:
    answers = TargetAnswers()
    sent = (
        Answer(1, 80, HTTP, needs_pod=False),
        Answer(2, 80, GrpcRequest("db"), needs_pod=True),
        Answer(3, 90, TcpConnect()),
    )
    answers.set_answers(sent)
    first, second = answers.by_port[80], answers.by_port[90]
    assert [probe.answer for probe in first.probes] == [*sent[:2]]
    assert {request: probe.answer for request, probe in first.http.items()} == {HTTP.sent: sent[0]}
    assert {request: probe.answer for request, probe in first.grpc.items()} == {
        grpc_request("db"): sent[1]
    }
    assert first.tcp is None
    assert second.tcp is not None
    assert second.tcp.answer == sent[2]
    assert answers.by_port.keys() == {80, 90}


@pytest.mark.parametrize(
    ("needs", "expected"), [((False, False), False), ((False, True), True), ((True, True), True)]
)
def test_port_needs_the_pod_if_one_of_its_answers_does(
    needs: tuple[bool, bool], expected: bool
) -> None:
    answers = TargetAnswers()
    answers.set_answers(
        Answer(number, 80, HttpRequest(bytes([number])), needs_pod=needs_pod)
        for number, needs_pod in enumerate(needs)
    )
    assert answers.by_port[80].needs_pod is expected


def test_replaced_answers_lose_their_verdicts_and_others_keep_them() -> None:
    answers = TargetAnswers()
    same, changed, removed = Answer(1, 80, HTTP), Answer(2, 81, HTTP), Answer(3, 82, HTTP)
    answers.set_answers((same, changed, removed))
    for answer in (same, changed, removed):
        answers.set_verdict(_verdict(answer.id))
    before = {port: found.http[HTTP.sent] for port, found in answers.by_port.items()}
    answers.set_answers((same, Answer(2, 81, HTTP, needs_pod=False)))
    assert answers.by_port[80].http[HTTP.sent] is before[80]
    assert answers.by_port[81].http[HTTP.sent].outcome(0) == "no_verdict"
    # Also for requests that are under way.
    assert [before[port].outcome(0) for port in (80, 81, 82)] == [
        "healthy",
        "no_verdict",
        "no_verdict",
    ]
    answers.set_verdict(_verdict(removed.id))
    assert before[82].outcome(0) == "no_verdict"
    assert answers.by_port.keys() == {80, 81}


def test_port_without_answers_has_none() -> None:
    assert NO_ANSWERS.missing(0) == []
    assert not NO_ANSWERS.needs_pod
