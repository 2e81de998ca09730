"""httpGet probes have the kubelet's results and texts for each recorded hostile answer."""

from __future__ import annotations

import re

import pytest

from probes.engine import prober
from probes.protocols import http_get, tls
from probes.protocols.exchanges import ConnectionFailure, Exchange, Phase
from probes.spec.definitions import HttpGet, Probe
from tests.probes.conftest import Sandbox
from tests.probes.hostile import cases, recorder
from tests.probes.hostile.answers import ADDRESS, PORT, Answer, Case
from tests.probes.hostile.recorder import Outcome

PIECES = [1, 7, 16 * 1024]
"""How many bytes arrive at once; 16 KiB is what dialing.py reads."""
_IP_LITERAL = re.compile(r'(ParseAddr\("[^"]*"\): ).*')
OVER_SOCKETS = 7
"""Every seventh case is also sent over real connections; the exchange is the same as above."""
BYTEWISE_MAX = 20_000
"""Longer answers do not arrive in single bytes: they would take most of the test's time."""


def replay(case: Case, size: int) -> Outcome:
    """The outcome of a probe whose server sends this case's answers."""
    exchange: Exchange = http_get.HttpTarget(
        HttpGet(PORT, case.path, headers=case.headers), ADDRESS
    ).exchange()
    requests: list[bytes] = []
    while exchange.verdict is None:
        hop = exchange.hop
        if hop.port != PORT:
            text = f"dial tcp {ADDRESS}:{hop.port}: connect: connection refused"
            exchange.fail(ConnectionFailure(Phase.DIAL, text))
            continue
        answer = case.answers[min(len(requests), len(case.answers) - 1)]
        if hop.tls:
            tunnel = tls.TlsTunnel(hop.alpn)
            requests.append(tunnel.start())
            with pytest.raises(tls.TlsError) as caught:
                tunnel.receive(answer.data)
            exchange.fail(ConnectionFailure(Phase.TLS, str(caught.value)))
            continue
        requests.append(exchange.start())
        receive(exchange, answer, size)
    verdict = exchange.verdict
    return recorder.outcome(
        verdict.result, verdict.message, is_error=verdict.error, requests=requests
    )


def receive(exchange: Exchange, answer: Answer, size: int) -> None:
    """One connection, as dialing.DialAttempt handles it."""
    hop = exchange.hop
    for at in range(0, len(answer.data), size):
        exchange.receive(answer.data[at : at + size])
        if exchange.verdict is not None or exchange.hop is not hop:
            return
    match answer.end:
        case "close":
            exchange.receive(b"")
        case "reset":
            text = f"read tcp {ADDRESS}:1->{ADDRESS}:{PORT}: read: connection reset by peer"
            exchange.fail(ConnectionFailure(Phase.EXCHANGE, text))
        case "hold":
            exchange.fail(ConnectionFailure(Phase.EXCHANGE, "", timeout=True))


def is_equal(seen: Outcome, expected: list[Outcome]) -> bool:
    return any(
        (seen.result, _text(seen), seen.requests) == (one.result, _text(one), one.requests)
        for one in expected
    )


def _text(outcome: Outcome) -> str:
    """The text, without the reason why an IP literal is not one: ours has one for all."""
    return _IP_LITERAL.sub(r"\1", outcome.text)


def report(found: list[str]) -> str:
    return "\n".join([f"{len(found)} cases differ", *found[:10]])


def test_record_is_one_of_these_cases() -> None:
    head, outcomes = recorder.recorded()
    all_cases = cases.cases()
    assert cases.digest(all_cases) == head["digest"], "record the cases again"
    assert len(outcomes) == len(all_cases)


@pytest.mark.parametrize("size", PIECES)
def test_results_texts_and_requests_are_the_kubelets(size: int) -> None:
    _, outcomes = recorder.recorded()
    found = [
        f"{case}\n  {seen}\n  {expected}"
        for case, expected in zip(cases.cases(), outcomes, strict=True)
        if size > 1 or sum(len(answer.data) for answer in case.answers) < BYTEWISE_MAX
        if not is_equal(seen := replay(case, size), expected)
    ]
    assert not found, report(found)


@pytest.mark.kernel
async def test_results_over_real_connections_are_the_kubelets(sandbox: Sandbox) -> None:
    _, outcomes = recorder.recorded()
    server = recorder.AnswerServer(sandbox.listen(ADDRESS, PORT))
    found = []
    try:
        for case, expected in list(zip(cases.cases(), outcomes, strict=True))[::OVER_SOCKETS]:
            # Those that wait for their timeout are replayed above, where none has to wait.
            if recorder.is_held(case):
                continue
            requests = server.expect(case)
            probe = Probe(HttpGet(PORT, case.path, headers=case.headers), timeout_seconds=30)
            made = await prober.probe(probe, netns=sandbox.netns, addresses=(ADDRESS,))
            seen = recorder.outcome(
                made.result, made.message, is_error=made.error, requests=requests
            )
            if not is_equal(seen, expected):
                found.append(f"{case}\n  {seen}\n  {expected}")
    finally:
        server.close()
    assert not found, report(found)
