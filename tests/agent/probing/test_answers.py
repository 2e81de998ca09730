"""A probe is answered if the kubelet sends its request for nothing else, otherwise proxied."""

import json
from typing import Any

import pytest

from agent.probing.answers import AnswerPlan, Obstacle, ProbeName, plan
from agent.relay.messages import Answer, GrpcRequest, HttpRequest, TcpConnect
from probes.spec.specs import PodSpec, with_annotation
from tests.agent.probing.answering import (
    ADDRESS,
    HEALTHZ,
    LIVENESS,
    OWN_CHECK,
    READINESS,
    STARTUP,
    http,
    spec,
)
from tests.agent.relay import recordings

APP_LIVENESS = ProbeName("app", LIVENESS)
AGENT = "User-Agent: kube-probe/1.36"


def answers(found: PodSpec, address: str = ADDRESS) -> list[Answer]:
    return [request.answer(address) for request in plan(found, (address,)).requests]


def obstacle(found: PodSpec, name: ProbeName = APP_LIVENESS) -> Obstacle | None:
    planned = plan(found, (ADDRESS,))
    is_planned = any(name in request.probes for request in planned.requests)
    assert is_planned is (name not in planned.obstacles)
    return planned.obstacles.get(name)


def liveness(sent: dict[str, Any], **more: Any) -> PodSpec:
    return spec({"livenessProbe": sent, **more}, {"liveness": OWN_CHECK})


def sent_bytes(*lines: str) -> HttpRequest:
    return HttpRequest("".join(f"{line}\r\n" for line in (*lines, "")).encode())


def test_answers_of_a_pod_have_numbers_of_their_own_that_other_probes_do_not_change() -> None:
    checks = {"liveness": OWN_CHECK, "readiness": OWN_CHECK}
    both = {"livenessProbe": HEALTHZ, "readinessProbe": http("/ready")}
    assert [answer.id for answer in answers(spec(both, checks))] == [1, 2]
    assert [answer.id for answer in answers(liveness(HEALTHZ))] == [2]


def test_nothing_is_answered_unless_the_pod_requests_it() -> None:
    found = spec({"livenessProbe": HEALTHZ}, {"liveness": {"tcp": {"port": 9000}}})
    assert plan(found, (ADDRESS,)) == AnswerPlan()


def test_request_is_that_of_the_pods_spec_not_the_annotations() -> None:
    sent = http("/live?x=1", httpHeaders=[{"name": "x-a", "value": "1"}])
    (answer,) = answers(liveness(sent))
    request = sent_bytes(
        "GET /live?x=1 HTTP/1.1",
        f"Host: {ADDRESS}:8080",
        AGENT,
        "Accept: */*",
        "X-A: 1",
        "Connection: close",
    )
    assert (answer.port, answer.request) == (8080, request)


def test_request_is_what_a_kubelet_was_recorded_to_send() -> None:
    address, _, port = recordings.HOST.partition(":")
    (answer,) = answers(liveness(http("/a?b=c%20d", int(port))), address)
    assert answer.request == HttpRequest(recordings.HTTP)


def test_host_is_that_of_the_address_or_of_the_spec() -> None:
    (answer,) = answers(liveness(HEALTHZ), "fd00:18::1")
    assert isinstance(answer.request, HttpRequest)
    assert b"\r\nHost: [fd00:18::1]:8080\r\n" in answer.request.sent
    named = http("/", httpHeaders=[{"name": "Host", "value": "shop.example"}])
    (answer,) = answers(liveness(named))
    assert isinstance(answer.request, HttpRequest)
    assert b"\r\nHost: shop.example\r\n" in answer.request.sent


def test_named_port_is_that_of_the_container() -> None:
    ports = [{"name": "web", "containerPort": 8088}]
    found = liveness({"httpGet": {"port": "web"}}, ports=ports)
    (answer,) = answers(found)
    assert answer.port == 8088


def test_grpc_probe_is_recognised_by_its_service() -> None:
    (answer,) = answers(liveness({"grpc": {"port": 9090, "service": "db"}}))
    assert (answer.port, answer.request) == (9090, GrpcRequest("db"))


def test_tcp_probe_is_answered_where_the_kubelet_connects_for_nothing_else() -> None:
    (answer,) = answers(liveness({"tcpSocket": {"port": 5432}}))
    assert (answer.port, answer.request) == (5432, TcpConnect())


@pytest.mark.parametrize(
    "other",
    [
        {"readinessProbe": {"tcpSocket": {"port": 5432}}},
        {"readinessProbe": {"grpc": {"port": 5432}}},
        {"readinessProbe": http("/", 5432)},
        {"readinessProbe": http("/", 80)},  # it may redirect the kubelet
        {"lifecycle": {"preStop": http("/", 80)}},
        {"lifecycle": {"postStart": http("/", 5432)}},
    ],
)
def test_tcp_probe_is_proxied_where_the_kubelet_may_connect_for_more(other: dict[str, Any]) -> None:
    assert obstacle(liveness({"tcpSocket": {"port": 5432}}, **other)) is Obstacle.SHARED_PORT


def test_tcp_probe_of_another_container_shares_the_port() -> None:
    sent = {"livenessProbe": {"tcpSocket": {"port": 5432}}}
    found = spec(sent, {"liveness": OWN_CHECK}, others=(sent,))
    assert obstacle(found) is Obstacle.SHARED_PORT


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (http("/", scheme="HTTPS"), Obstacle.TLS),
        ({"grpc": {"port": 1, "mode": "TLS"}}, Obstacle.TLS),
        (http("/", protocol="HTTP2"), Obstacle.HTTP2),
        ({"exec": {"command": ["true"]}}, Obstacle.EXEC),
        # Go's client does not send it, so nothing is known of it.
        (http("/", httpHeaders=[{"name": "X", "value": "a\nb"}]), Obstacle.INVALID_SPEC),
    ],
)
def test_probe_that_cannot_be_recognised_is_proxied(
    sent: dict[str, Any], expected: Obstacle
) -> None:
    assert obstacle(liveness(sent)) is expected


def test_probe_that_the_pods_spec_lacks_has_nothing_to_answer() -> None:
    assert obstacle(spec({}, {"liveness": OWN_CHECK})) is Obstacle.NO_PROBE


def test_pod_with_a_probe_that_podgate_rejects_is_not_answered() -> None:
    found = liveness(HEALTHZ, readinessProbe=http("/healthz", host="198.18.1.1"))
    assert obstacle(found) is Obstacle.INVALID_SPEC


@pytest.mark.parametrize("other", ["readinessProbe", "startupProbe"])
def test_same_request_of_a_proxied_probe_is_ambiguous(other: str) -> None:
    assert obstacle(liveness(HEALTHZ, **{other: HEALTHZ})) is Obstacle.AMBIGUOUS


def test_same_request_with_another_check_is_ambiguous() -> None:
    both = {"livenessProbe": HEALTHZ, "readinessProbe": HEALTHZ}
    checks = {"liveness": OWN_CHECK, "readiness": {**OWN_CHECK, "target": "localhost"}}
    found = spec(both, checks)
    assert obstacle(found) is Obstacle.AMBIGUOUS
    assert obstacle(found, ProbeName("app", READINESS)) is Obstacle.AMBIGUOUS


def test_same_request_with_the_same_check_has_one_answer() -> None:
    sent = {f"{kind}Probe": HEALTHZ for kind in ("startup", "liveness", "readiness")}
    checks = {kind: {**OWN_CHECK} for kind in ("startup", "liveness", "readiness")}
    checks["readiness"]["periodMilliseconds"] = 250
    (request,) = plan(spec(sent, checks), (ADDRESS,)).requests
    types = (STARTUP, READINESS, LIVENESS)
    assert request.probes == tuple(ProbeName("app", type) for type in types)
    # That of the first one, which stays if another probe is removed.
    assert request.id == 0


def test_same_request_of_another_container_is_ambiguous() -> None:
    found = spec(
        {"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK}, others=({"livenessProbe": HEALTHZ},)
    )
    assert obstacle(found) is Obstacle.AMBIGUOUS


def test_same_request_of_another_container_is_ambiguous_also_with_the_same_check() -> None:
    containers = [{"name": name, "liveness": OWN_CHECK} for name in ("app", "app2")]
    text = json.dumps({"apiVersion": "podgate.io/v2", "containers": containers})
    sent = {"livenessProbe": HEALTHZ}
    found = plan(with_annotation(spec(sent, {}, others=(sent,)), text), (ADDRESS,))
    assert found.requests == ()
    names = (APP_LIVENESS, ProbeName("app2", LIVENESS))
    assert found.obstacles == dict.fromkeys(names, Obstacle.AMBIGUOUS)


@pytest.mark.parametrize(
    "other",
    [
        {"exec": {"command": ["true"]}},
        {"grpc": {"port": 9091, "service": "db"}},
        {"grpc": {"port": 9090, "service": "other"}},
    ],
)
def test_grpc_probes_that_differ_are_answered_apart(other: dict[str, Any]) -> None:
    sent = {"grpc": {"port": 9090, "service": "db"}}
    assert obstacle(liveness(sent, readinessProbe=other)) is None
    assert obstacle(liveness(sent, readinessProbe=sent)) is Obstacle.AMBIGUOUS


@pytest.mark.parametrize(
    "other",
    [
        http("/ready"),
        http("/healthz", 8081),
        http("/healthz", httpHeaders=[{"name": "X-Probe", "value": "readiness"}]),
        {"tcpSocket": {"port": 8080}},
    ],
)
def test_probes_that_differ_are_answered_apart(other: dict[str, Any]) -> None:
    assert obstacle(liveness(HEALTHZ, readinessProbe=other)) is None


def test_redirect_of_an_https_probe_may_be_the_same_request() -> None:
    found = liveness(HEALTHZ, readinessProbe=http("/ready", 8443, scheme="HTTPS"))
    assert obstacle(found) is Obstacle.AMBIGUOUS
    header = [{"name": "X-Probe", "value": "readiness"}]
    apart = http("/ready", 8443, scheme="HTTPS", httpHeaders=header)
    assert obstacle(liveness(HEALTHZ, readinessProbe=apart)) is None


def test_hook_of_the_same_path_is_no_obstacle() -> None:
    # Its User-Agent is kube-lifecycle, and it accepts gzip.
    assert obstacle(liveness(HEALTHZ, lifecycle={"preStop": HEALTHZ})) is None


def test_hook_that_is_written_like_the_probe_is_ambiguous() -> None:
    gzip = {"name": "Accept-Encoding", "value": "gzip"}
    like_probe = [
        gzip,
        {"name": "User-Agent", "value": "kube-probe/1.36"},
        {"name": "Connection", "value": "close"},
    ]
    close = {"name": "Connection", "value": "close"}
    found = liveness(
        http("/healthz", httpHeaders=[gzip, close]),
        lifecycle={"preStop": http("/healthz", httpHeaders=like_probe)},
    )
    assert obstacle(found) is Obstacle.AMBIGUOUS


def test_pod_must_accept_where_something_else_connects_to_the_port() -> None:
    def needs_pod(**more: Any) -> bool:
        (answer,) = answers(liveness(HEALTHZ, **more))
        return answer.needs_pod

    assert needs_pod() is False
    assert needs_pod(readinessProbe=http("/", 9999)) is False
    assert needs_pod(readinessProbe={"tcpSocket": {"port": 8080}}) is True
    assert needs_pod(readinessProbe=http("/ready")) is True
    assert needs_pod(lifecycle={"preStop": http("/stop")}) is True


def test_two_answered_probes_of_one_port_need_no_pod() -> None:
    found = spec(
        {"livenessProbe": HEALTHZ, "readinessProbe": http("/ready")},
        {"liveness": OWN_CHECK, "readiness": OWN_CHECK},
    )
    assert [answer.needs_pod for answer in answers(found)] == [False, False]
    assert len({answer.id for answer in answers(found)}) == 2


def test_each_probe_of_a_pod_has_a_number_of_its_own() -> None:
    probes = {f"{kind}Probe": http(f"/{kind}") for kind in ("startup", "readiness", "liveness")}
    checks = dict.fromkeys(("startup", "readiness", "liveness"), OWN_CHECK)
    found = plan(spec(probes, checks), (ADDRESS,))
    numbers = {found.id_of(ProbeName("app", type)) for type in (STARTUP, READINESS, LIVENESS)}
    assert len(numbers) == 3
    assert None not in numbers
    assert found.id_of(ProbeName("other", LIVENESS)) is None


def test_request_that_is_the_same_at_one_of_the_addresses_is_ambiguous() -> None:
    host = {"name": "Host", "value": "198.18.1.2:8080"}
    found = liveness(HEALTHZ, readinessProbe=http("/healthz", httpHeaders=[host]))
    assert plan(found, (ADDRESS,)).obstacles == {}
    for addresses in ((ADDRESS, "198.18.1.2"), ("198.18.1.2",)):
        assert plan(found, addresses).obstacles == {APP_LIVENESS: Obstacle.AMBIGUOUS}


def test_pod_without_an_address_is_planned_as_one_with_any() -> None:
    assert plan(liveness(HEALTHZ), ()) == plan(liveness(HEALTHZ), (ADDRESS,))
    assert plan(liveness(HEALTHZ, readinessProbe=HEALTHZ), ()).obstacles == {
        APP_LIVENESS: Obstacle.AMBIGUOUS
    }


def test_problem_is_one_sentence_with_a_remedy() -> None:
    found = plan(liveness(http("/", scheme="HTTPS")), (ADDRESS,))
    assert found.problems == {
        APP_LIVENESS: 'Container "app": liveness probe is not answered: the kubelet\'s probe is '
        "encrypted and cannot be recognised; use http in the pod's spec."
    }


def test_invalid_annotation_answers_nothing() -> None:
    found = spec({"livenessProbe": HEALTHZ}, {"liveness": {**OWN_CHECK, "answered": "yes"}})
    assert found.errors
    assert plan(found, (ADDRESS,)) == AnswerPlan()
