"""Ports that several pods with one address declare: shared where each request shows its pod."""

from typing import Any

import pytest

from agent.pods.pod_state import PathTestResult, PodState
from agent.relay.messages import RelayTargetSpec
from agent.strict.plans import plan_of
from agent.strict.targets import RelayPlan
from bpf.verdicts import Mode
from tests.agent.strict.strict_pods import record_path, strict_pod, tcp

ONE, SIX = "198.18.1.1", "fd00:18::1"


def http(
    port: int = 8080, path: str = "/", headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """A readiness probe."""
    named = [{"name": name, "value": value} for name, value in (headers or {}).items()]
    action = {"port": port, "path": path, "httpHeaders": named, **fields}
    return {"readinessProbe": {"httpGet": action}}


def hook(path: str) -> dict[str, Any]:
    return {"lifecycle": {"preStop": {"httpGet": {"port": 8080, "path": path}}}}


def pods(a: dict[str, Any], b: dict[str, Any], *addresses: str) -> list[PodState]:
    """Two pods in strict with these addresses."""
    addresses = addresses or (ONE,)
    return [
        strict_pod("a", *addresses, container=a),
        strict_pod("b", *addresses, container=b),
    ]


def shared(plan: RelayPlan) -> RelayTargetSpec | None:
    """The target that claims ports of several pods."""
    return next((target for target in plan.targets if target.sharing), None)


@pytest.mark.parametrize(
    "other",
    [
        http(path="/b"),
        http(path="/?b"),
        http(headers={"Host": "b.example"}),
        http(headers={"X-Pod": "b"}),
        hook("/"),
    ],
    ids=["path", "query", "host", "header", "hook"],
)
def test_port_is_shared_if_requests_differ(other: dict[str, Any]) -> None:
    plan = plan_of(pods(http(), other))
    assert plan.conflicts == {}
    target = shared(plan)
    assert target is not None
    assert target.sharing is not None
    assert target.claims == target.sharing.ports == (8080, 0)
    assert {request.key for request in target.sharing.requests} == {f"uid-a {ONE}", f"uid-b {ONE}"}
    # The other has a target, too, for what is its own.
    assert [(one.key, one.claims) for one in plan.targets if not one.sharing] == [
        (f"uid-b {ONE}", ())
    ]


def test_requests_are_those_that_the_kubelet_sends() -> None:
    target = shared(plan_of(pods(http(path="/a"), hook("/b"))))
    assert target is not None
    assert target.sharing is not None
    found = []
    for request in target.sharing.requests:
        line, *headers = request.sent.split(b"\r\n")
        (agent,) = (header for header in headers if header.startswith(b"User-Agent"))
        found.append((request.key, request.port, line, agent.partition(b"/")[0]))
    assert found == [
        (f"uid-a {ONE}", 8080, b"GET /a HTTP/1.1", b"User-Agent: kube-probe"),
        (f"uid-b {ONE}", 8080, b"GET /b HTTP/1.1", b"User-Agent: kube-lifecycle"),
    ]


@pytest.mark.parametrize(
    "other",
    [
        http(),
        tcp(8080),
        http(path="/b", scheme="HTTPS"),
        http(path="/b", protocol="HTTP2"),
        {"livenessProbe": {"grpc": {"port": 8080}}},
        {**http(path="/b"), **tcp(8080)},
        {**http(path="/b"), **hook("/"), "livenessProbe": http()["readinessProbe"]},
    ],
    ids=["same", "tcp", "https", "h2c", "grpc", "also tcp", "also the same"],
)
def test_port_is_ambiguous_if_a_connection_may_belong_to_both(other: dict[str, Any]) -> None:
    plan = plan_of(pods(http(), other))
    assert shared(plan) is None
    assert plan.targets == ()
    assert "are ambiguous: 8080, others." in plan.conflicts["uid-a"]


def test_both_families_are_shared() -> None:
    plan = plan_of(pods(http(path="/a"), http(path="/b"), ONE, SIX))
    assert [target.address for target in plan.targets if target.sharing] == [ONE, SIX]
    assert plan.conflicts == {}


def test_ports_without_a_declaration_are_shared_if_all_else_is_distinguished() -> None:
    plan = plan_of(pods(http(8080), http(9090)))
    assert {target.key: target.claims for target in plan.targets} == {
        f"uid-a {ONE}": (8080, 0),
        f"uid-b {ONE}": (9090,),
    }
    target = shared(plan)
    assert target is not None
    assert target.sharing is not None
    assert target.sharing.ports == (0,)
    assert {request.port for request in target.sharing.requests} == {8080, 9090}


def test_three_pods_share_a_port() -> None:
    plan = plan_of(
        [strict_pod(name, ONE, container=http(path=f"/{name}")) for name in ("a", "b", "c")]
    )
    target = shared(plan)
    assert target is not None
    assert target.sharing is not None
    assert len({request.key for request in target.sharing.requests}) == 3


def test_pod_that_the_route_leads_to_gets_what_cannot_be_distinguished() -> None:
    first, twin = pods(http(path="/a"), http(path="/b"))
    for results, otherwise in (
        ((PathTestResult.UNREACHABLE, PathTestResult.CONFIRMED), f"uid-b {ONE}"),
        ((PathTestResult.UNREACHABLE, PathTestResult.UNREACHABLE), ""),
        ((PathTestResult.CONFIRMED, PathTestResult.CONFIRMED), ""),
    ):
        for state, result in zip((first, twin), results, strict=True):
            record_path(state, result)
        plan = plan_of([first, twin])
        target = shared(plan)
        assert target is not None
        assert target.sharing is not None
        assert target.sharing.otherwise == otherwise
        rest = "proxies other connections to pod shop/b" if otherwise else "resets other"
        assert f"Address {ONE} is also that of pod shop/b" in plan.notes["uid-a"]
        assert rest in plan.notes["uid-a"]


def test_pod_with_an_invalid_probe_shares_nothing() -> None:
    """What the kubelet sends for it is unknown."""
    invalid = http(path="/b", host="198.18.9.9")
    twin = strict_pod("b", ONE, container=invalid, is_valid=False)
    plan = plan_of([strict_pod("a", ONE, container=http(path="/a")), twin])
    assert shared(plan) is None
    assert plan.conflicts.keys() == {"uid-a", "uid-b"}


def test_reachable_pod_in_enforce_is_proxied_where_it_shares_a_port() -> None:
    """The kubelet's connections to a port of an address all go one way."""
    twin = strict_pod("twin", ONE, container=http(path="/twin"))
    enforced = strict_pod("web", ONE, container=http(path="/web"), mode=Mode.ENFORCE)
    record_path(enforced, PathTestResult.CONFIRMED)
    plan = plan_of([twin, enforced])
    assert shared(plan) is not None
    assert plan.conflicts == {}
    assert plan.needs == {"uid-web": f"The address {ONE} is also that of pod shop/twin"}
    alone = plan_of([twin, enforced], proxies_enforced=False)
    assert shared(alone) is None
    assert alone.needs == {}
    assert alone.conflicts.keys() == {"uid-twin"}


def test_reachable_pod_in_enforce_is_not_proxied_for_nothing() -> None:
    enforced = strict_pod("web", ONE, container=http(path="/web"), mode=Mode.ENFORCE)
    record_path(enforced, PathTestResult.CONFIRMED)
    for container in (http(8080, path="/web"), tcp(8080), tcp(81)):
        plan = plan_of([strict_pod("twin", ONE, container=container), enforced])
        assert plan.needs == {}
        assert {target.key for target in plan.targets} <= {f"uid-twin {ONE}"}


def test_pod_whose_annotation_keeps_the_relay_off_shares_nothing() -> None:
    twin = strict_pod("twin", ONE, container=http(path="/twin"))
    direct = strict_pod("web", ONE, container=http(path="/web"), is_relayed=False)
    plan = plan_of([twin, direct])
    assert shared(plan) is None
    assert plan.conflicts.keys() == {"uid-twin"}
