"""Messages between agent and relay survive their encoding."""

import pytest

from agent.relay import messages
from agent.relay.messages import Answer, GrpcRequest, HttpRequest, RelayTargetSpec, TcpConnect

_HTTP = HttpRequest(b"GET /\xff?full=1 HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")


def _round_trip(message: messages.ToRelay | messages.FromRelay) -> list[bytes]:
    return list(messages.Frames().feed(messages.pack(message)))


@pytest.mark.parametrize("request_", [_HTTP, GrpcRequest("db"), TcpConnect()])
def test_answers_of_a_target_survive(request_: HttpRequest | GrpcRequest | TcpConnect) -> None:
    answer = Answer(7, 8080, request_, needs_pod=False)
    spec = RelayTargetSpec("a", "/run/netns/a", 4, 5, "198.18.1.2", (), (), answers=(answer,))
    sent = messages.SetTargets(3, (spec,))
    (body,) = _round_trip(sent)
    assert messages.decode_for_relay(body) == sent


def test_verdicts_and_withdrawals_survive() -> None:
    sent = messages.SetVerdicts(
        (
            messages.Verdict("a", 7, True, "status 200", 1 << 62),
            messages.Verdict("a", 8, False, "connection refused", None),
        )
    )
    (body,) = _round_trip(sent)
    assert messages.decode_for_relay(body) == sent


def test_counts_of_answers_survive() -> None:
    sent = messages.RelayReport(
        1, 0, False, (), (messages.AnswerSample("a", 8080, "not_probe", 4),)
    )
    (body,) = _round_trip(sent)
    assert messages.decode_for_agent(body) == sent


def test_unknown_kind_of_request_is_rejected() -> None:
    spec = RelayTargetSpec(
        "a", "/run/netns/a", 4, 5, "198.18.1.2", (), (), answers=(Answer(7, 80, TcpConnect()),)
    )
    (body,) = _round_trip(messages.SetTargets(1, (spec,)))
    with pytest.raises(messages.FrameError, match="cannot be decoded"):
        messages.decode_for_relay(body.replace(b"TcpConnect", b"UdpConnect"))
