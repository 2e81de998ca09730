"""Flows to try follow from the NetworkPolicies by the API's rules, each rule by its name."""

import ipaddress
import itertools
import random
from typing import Any, Final

import msgspec
import pytest

from agent.network_policy.checks import Checks, Flow, plan
from agent.network_policy.objects import NetworkPolicy, Protocol
from agent.network_policy.policy_set import PolicySet
from agent.network_policy.verdicts import ContainerPort, End, Verdict, decide, isolating

POD: Final = End(
    namespace="shop",
    address=ipaddress.ip_address("198.18.0.3"),
    labels={"app": "web"},
    namespace_labels={"kubernetes.io/metadata.name": "shop"},
    ports=(
        ContainerPort(8080, name="http"),
        ContainerPort(53, "UDP", "dns"),
        ContainerPort(9090),
    ),
)
WITNESS: Final = End(
    namespace="podgate",
    address=ipaddress.ip_address("198.18.0.9"),
    labels={"app": "witness"},
    namespace_labels={"kubernetes.io/metadata.name": "podgate", "team": "infra"},
)
TCP_8080 = ("TCP", 8080)


def policy(namespace: str = "shop", name: str = "p", **spec: Any) -> NetworkPolicy:
    """As the API server writes it."""
    spec.setdefault("podSelector", {})
    text = msgspec.json.encode({"metadata": {"namespace": namespace, "name": name}, "spec": spec})
    return msgspec.json.decode(text, type=NetworkPolicy)


def planned(policies: list[NetworkPolicy]) -> tuple[Checks, ...]:
    return plan(PolicySet(tuple(policies)), POD, WITNESS)


def ingress(*rules: dict[str, Any]) -> NetworkPolicy:
    return policy(policyTypes=["Ingress"], ingress=list(rules))


def by_pod(known: NetworkPolicy, protocol: Protocol, port: int) -> Verdict:
    selected = isolating([known], POD, "Ingress")
    assert selected
    return decide(selected, "Ingress", WITNESS, POD, protocol, port)


INFRA: Final = {"namespaceSelector": {"matchLabels": {"team": "infra"}}}
OTHER_APP: Final = {"podSelector": {"matchLabels": {"app": "other"}}}
WITNESS_APP: Final = {"podSelector": {"matchLabels": {"app": "witness"}}}


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        pytest.param(None, Verdict.ADMITTED, id="missing from is all sources"),
        pytest.param([], Verdict.ADMITTED, id="empty from is all sources"),
        pytest.param([INFRA], Verdict.ADMITTED, id="namespaceSelector: all pods there"),
        pytest.param([{"namespaceSelector": {}}], Verdict.ADMITTED, id="empty one: all namespaces"),
        pytest.param([{"podSelector": {}}], Verdict.DROPPED, id="podSelector: own namespace only"),
        pytest.param([WITNESS_APP], Verdict.DROPPED, id="labels of a pod elsewhere"),
        pytest.param([INFRA | WITNESS_APP], Verdict.ADMITTED, id="both must match, and do"),
        pytest.param([INFRA | OTHER_APP], Verdict.DROPPED, id="both must match, one does not"),
        pytest.param([OTHER_APP, INFRA], Verdict.ADMITTED, id="any of several peers"),
        pytest.param(
            [{"ipBlock": {"cidr": "198.18.0.0/15"}}], Verdict.UNDEFINED, id="ipBlock of a pod"
        ),
        pytest.param(
            [{"ipBlock": {"cidr": "198.18.0.0/15"}}, INFRA],
            Verdict.ADMITTED,
            id="a selector decides beside an ipBlock",
        ),
        pytest.param(
            [{"ipBlock": {"cidr": "198.18.0.0/15", "except": ["198.18.0.8/29"]}}],
            Verdict.DROPPED,
            id="ipBlock except",
        ),
        pytest.param(
            [{"ipBlock": {"cidr": "198.19.0.0/16"}}], Verdict.DROPPED, id="ipBlock of others"
        ),
        pytest.param(
            [{"ipBlock": {"cidr": "fd00:18::/32"}}], Verdict.DROPPED, id="other family's ipBlock"
        ),
    ],
)
def test_peers_by_rule(peers: list[dict[str, Any]] | None, expected: Verdict) -> None:
    rule = {} if peers is None else {"from": peers}
    assert by_pod(ingress(rule), "TCP", 8080) is expected


@pytest.mark.parametrize(
    ("ports", "admitted"),
    [
        pytest.param([{"port": 8080}], {TCP_8080}, id="TCP is the default protocol"),
        pytest.param([{"port": 8080, "protocol": None}], {TCP_8080}, id="null is missing"),
        pytest.param([{"port": "http"}], {TCP_8080}, id="name of a container port"),
        pytest.param([{"port": "dns"}], set(), id="name with another protocol"),
        pytest.param([{"port": "dns", "protocol": "UDP"}], {("UDP", 53)}, id="name with its own"),
        pytest.param([{"port": "none"}], set(), id="unknown name matches nothing"),
        pytest.param([{"port": 8080, "protocol": "SCTP"}], set(), id="SCTP is not TCP"),
        pytest.param(
            [{"port": 8080, "endPort": 9090}],
            {TCP_8080, ("TCP", 8081), ("TCP", 9090)},
            id="endPort is inclusive",
        ),
        pytest.param(
            [{"protocol": "UDP"}], {("UDP", 53), ("UDP", 8080)}, id="no port: all of the protocol"
        ),
        pytest.param(
            [],
            {("TCP", n) for n in (8079, 8080, 8081, 9090, 9091)} | {("UDP", 53), ("UDP", 8080)},
            id="empty ports is all",
        ),
    ],
)
def test_ports_by_rule(ports: list[dict[str, Any]], admitted: set[tuple[Protocol, int]]) -> None:
    tried: list[tuple[Protocol, int]] = [("TCP", n) for n in (8079, 8080, 8081, 9090, 9091)]
    tried += [("UDP", 53), ("UDP", 8080)]
    known = ingress({"ports": ports})
    assert {one for one in tried if by_pod(known, *one) is Verdict.ADMITTED} == admitted


@pytest.mark.parametrize(
    ("spec", "directions"),
    [
        pytest.param({}, ["Ingress"], id="without types and rules: Ingress"),
        pytest.param({"egress": [{}]}, ["Ingress", "Egress"], id="egress rules isolate both"),
        pytest.param({"egress": []}, ["Ingress"], id="an empty list is no rule"),
        pytest.param({"policyTypes": ["Egress"]}, ["Egress"], id="Egress alone"),
        pytest.param(
            {"policyTypes": ["Ingress"], "egress": [{}]}, ["Ingress"], id="types go before rules"
        ),
        pytest.param({"podSelector": {"matchLabels": {"app": "db"}}}, [], id="other pods"),
    ],
)
def test_isolated_directions(spec: dict[str, Any], directions: list[str]) -> None:
    assert [one.direction for one in planned([policy(**spec)])] == directions


def test_policy_of_another_namespace_selects_no_pod() -> None:
    assert planned([policy(namespace="bank")]) == ()


def test_default_deny_has_no_admission_to_try() -> None:
    assert planned([ingress()]) == (
        Checks("Ingress", ("shop/p",), dropped=Flow("TCP", 65535), admitted=None),
    )


def test_policies_add_up() -> None:
    both = [ingress(), policy(name="q", ingress=[{"ports": [{"port": "http"}]}])]
    assert planned(both) == (
        Checks("Ingress", ("shop/p", "shop/q"), Flow("TCP", 65535), Flow("TCP", 8080)),
    )


def test_policy_that_admits_everything_leaves_no_drop_to_try() -> None:
    (checks,) = planned([ingress({})])
    assert (checks.dropped, checks.admitted) == (None, Flow("TCP", 65535))


def test_all_tcp_admitted_is_shown_by_udp_to_an_undeclared_port() -> None:
    (checks,) = planned([ingress({"ports": [{"protocol": "TCP"}]})])
    assert (checks.dropped, checks.admitted) == (Flow("UDP", 65535), Flow("TCP", 65535))


@pytest.mark.parametrize(
    ("ports", "dropped"),
    [
        pytest.param([{"port": 7, "endPort": 65535}], 1, id="below the first range"),
        pytest.param([{"port": 1, "endPort": 65534}], 65535, id="above the last range"),
        pytest.param(
            [{"port": 1, "endPort": 8}, {"port": 10, "endPort": 65535}], 9, id="between two"
        ),
        pytest.param(
            [{"port": 1, "endPort": 8079}, {"port": "http"}, {"port": 8082, "endPort": 65535}],
            8081,
            id="after a named port",
        ),
        pytest.param(
            [{"port": 1, "endPort": 8079}, {"port": 8081, "endPort": 65535}],
            8080,
            id="a declared port, if no other is dropped",
        ),
    ],
)
def test_one_port_that_is_dropped_is_found(ports: list[dict[str, Any]], dropped: int) -> None:
    (checks,) = planned([ingress({"ports": ports})])
    assert checks.dropped == Flow("TCP", dropped)


def test_no_datagram_is_sent_to_a_declared_port() -> None:
    only_dns = ingress({"ports": [{"port": "dns", "protocol": "UDP"}]})
    (checks,) = planned([only_dns])
    assert checks.admitted is None


def test_what_only_an_ip_block_admits_is_not_tried() -> None:
    (checks,) = planned([ingress({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})])
    assert (checks.dropped, checks.admitted) == (None, None)


def test_egress_is_decided_by_the_witness_and_its_ports() -> None:
    rule = {"to": [INFRA], "ports": [{"port": "http"}, {"port": 7000}]}
    known = policy(policyTypes=["Egress"], egress=[rule])
    assert planned([known]) == (
        Checks("Egress", ("shop/p",), Flow("TCP", 65535), Flow("TCP", 7000)),
    )


def test_what_the_witness_own_policies_drop_shows_nothing() -> None:
    of_witness = policy(
        namespace="podgate",
        policyTypes=["Egress"],
        egress=[{"ports": [{"port": 7000}, {"port": 8080}]}],
    )
    known = [ingress({"ports": [{"port": "http"}]}), of_witness]
    assert planned(known) == (Checks("Ingress", ("shop/p",), Flow("TCP", 7000), Flow("TCP", 8080)),)


@pytest.mark.parametrize("seed", range(20))
def test_a_flow_is_found_wherever_one_exists(seed: int) -> None:
    """Compared with trying every port near the policies' own, by protocol."""
    chosen = random.Random(seed)
    span = range(100, 120)

    def entry() -> dict[str, Any]:
        first = chosen.choice(span)
        return {
            "protocol": chosen.choice(["TCP", "UDP"]),
            "port": first,
            "endPort": chosen.randrange(first, first + 8),
        }

    everything = [
        {"port": 1, "endPort": 65535, "protocol": protocol} for protocol in ("TCP", "UDP")
    ]
    for _ in range(20):
        own = ingress(
            {"ports": [entry() for _ in range(3)], "from": [INFRA]},
            *([{"ports": chosen.choices(everything)}] if chosen.random() < 0.3 else []),
        )
        of_witness = policy(
            namespace="podgate",
            policyTypes=["Egress"],
            egress=[{"ports": [entry() for _ in range(3)]}],
        )
        (checks,) = planned([own, of_witness])
        protocols: tuple[Protocol, ...] = ("TCP", "UDP")
        found: dict[Verdict, set[Flow]] = {verdict: set() for verdict in Verdict}
        for protocol, port in itertools.product(protocols, range(90, 140)):
            sent = decide([of_witness], "Egress", POD, POD, protocol, port)
            if sent is Verdict.ADMITTED:
                found[by_pod(own, protocol, port)].add(Flow(protocol, port))
        for flow, verdict in (
            (checks.dropped, Verdict.DROPPED),
            (checks.admitted, Verdict.ADMITTED),
        ):
            assert (flow in found[verdict]) if flow else not found[verdict]
