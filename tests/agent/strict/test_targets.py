"""Desired targets of the relay, and pods that have none."""

import dataclasses

import msgspec
import pytest

from agent.pods.pod_state import PodState
from agent.strict.plans import plan_of
from agent.strict.targets import excluded_reason, uid_of
from bpf.verdicts import Mode
from probes.redirection import InnerWay, Redirection
from probes.spec.specs import parse_pod
from tests.agent.strict.strict_pods import HTTP_8080, strict_pod, tcp

ONE, OTHER = "198.18.1.1", "198.18.1.2"
HTTP_OTHER = {"livenessProbe": {"httpGet": {"port": 8080, "path": "/other"}}}


def claims(*pods: PodState) -> dict[str, tuple[int, ...]]:
    """By pod's name, of its only target."""
    names = {pod.pod.uid: pod.pod.name for pod in pods}
    targets = plan_of(pods).targets
    return {names[uid_of(target.key)]: target.claims for target in targets}


def test_each_address_is_a_target_with_the_ports_that_the_gate_admits() -> None:
    web = strict_pod("web", ONE, "fd00:18::1", container=tcp(5432))
    targets = plan_of([web]).targets
    assert [target.address for target in targets] == [ONE, "fd00:18::1"]
    assert {target.ports for target in targets} == {((5432, 5432),)}
    assert {target.claims for target in targets} == {(5432,)}
    assert {target.netns_inode for target in targets} == {web.netns.inode if web.netns else 0}


def test_an_address_that_the_pod_only_claims_is_no_target() -> None:
    (target,) = plan_of([strict_pod("web", ONE, claimed=(OTHER,))]).targets
    assert target.address == ONE
    assert plan_of([strict_pod("web", claimed=(OTHER,))]).targets == ()
    why = excluded_reason(strict_pod("web", claimed=(OTHER,)))
    assert why == "No address in the pod's network namespace is confirmed as its own."


def test_a_claim_takes_no_port_from_the_pod_whose_address_it_is() -> None:
    pods = [strict_pod("web", ONE, container=tcp(80)), strict_pod("b", OTHER, claimed=(ONE,))]
    assert claims(*pods) == {"web": (80,), "b": (8080, 0)}


def test_any_port_of_a_pod_with_http_is_proxied() -> None:
    (target,) = plan_of([strict_pod("web", ONE)]).targets
    assert target.ports == ((0, 65535),)
    assert target.claims == (8080, 0)


def test_pod_whose_probe_names_a_host_admits_translated_addresses() -> None:
    """Such as its service's, or a port of the node."""
    web = strict_pod("web", ONE)
    (target,) = plan_of([web]).targets
    assert not target.admits_translated
    probe = {"httpGet": {"port": 8080, "host": "198.18.0.80"}}
    spec = parse_pod({"spec": {"containers": [{"name": "app", "livenessProbe": probe}]}})
    web.pod = msgspec.structs.replace(web.pod, spec=spec)
    (target,) = plan_of([web]).targets
    assert target.admits_translated
    assert target.claims == (0,)


def test_pod_without_probes_has_no_target() -> None:
    assert plan_of([strict_pod("idle", ONE, container={})]).targets == ()


def test_only_gated_pods_in_strict_that_were_tried_from_inside_are_targets() -> None:
    """A relay that lost a pod again, since nothing answers inside it, would open it meanwhile."""
    pods = [
        strict_pod("early", "198.18.1.3", is_gated=False),
        strict_pod("untried", "198.18.1.7", is_tried=False),
        strict_pod("open", "198.18.1.4", mode=Mode.ENFORCE),
        strict_pod("direct", "198.18.1.5", is_relayed=False),
        strict_pod("kata", "198.18.1.6", taps=("tap0_kata",)),
        strict_pod("web", ONE),
    ]
    assert claims(*pods) == {"web": (8080, 0)}


def redirected(user: int | None) -> PodState:
    web = strict_pod("web", ONE, "fd00:18::1")
    web.inner_ways = {ONE: InnerWay(Redirection(15001, 5995, "Consul"), user)}
    return web


@pytest.mark.parametrize("user", [5995, 0])
def test_relay_connects_as_the_user_whom_the_pods_rules_exempt(user: int) -> None:
    web = redirected(user)
    assert excluded_reason(web) is None
    users = {target.address: target.user for target in plan_of([web]).targets}
    assert users == {ONE: user, "fd00:18::1": 0}


def test_pod_whose_rules_redirect_every_user_has_no_target() -> None:
    web = redirected(None)
    assert plan_of([web]).targets == ()
    assert excluded_reason(web) == (
        "Connections from inside the pod to 198.18.1.1 are redirected to port 15001 (Consul, user "
        "5995), so the relay cannot reach the application; have the pod's rules exempt the "
        "loopback interface."
    )


def test_pod_without_a_namespace_has_no_target() -> None:
    web = strict_pod("web", ONE)
    web.netns = None
    assert plan_of([web]).targets == ()


@pytest.mark.parametrize(
    ("mode", "host_network"), [(Mode.STRICT, True), (Mode.AUDIT, False), (Mode.OFF, True)]
)
def test_pod_of_the_host_network_or_below_enforce_is_not_strict(
    mode: Mode, host_network: bool
) -> None:
    web = strict_pod("web", ONE, mode=mode)
    web.pod = msgspec.structs.replace(web.pod, host_network=host_network)
    assert excluded_reason(web) == "Mode is not strict."
    assert plan_of([web]).targets == ()


def test_pod_whose_loopback_is_down_has_no_target() -> None:
    web = strict_pod("web", ONE)
    assert web.network is not None
    web.network = dataclasses.replace(web.network, is_loopback_down=True)
    assert plan_of([web]).targets == ()
    assert excluded_reason(web) == (
        "The loopback interface of the pod is down, so no connection from inside the pod arrives; "
        "run 'ip link set lo up' in it."
    )


def test_conflict_names_the_pods_and_ports_that_it_is_about() -> None:
    pods = [strict_pod(name, ONE, container=tcp(80)) for name in ("a", "c", "b")]
    plan = plan_of([*pods, strict_pod("other", ONE, container=tcp(81))])
    assert plan.conflicts["uid-a"] == (
        f"Pod shop/b and pod shop/c has the same address {ONE}; kubelet connections to these ports "
        "are ambiguous: 80."
    )
    assert [target.claims for target in plan.targets] == [(81,)]


def test_excluded_pods_have_a_reason() -> None:
    assert excluded_reason(strict_pod("web", ONE)) is None
    off = excluded_reason(strict_pod("direct", ONE, is_relayed=False))
    assert off == 'Annotation podgate.io/relay is "off".'
    machine = excluded_reason(strict_pod("kata", ONE, taps=("tap0_kata",)))
    assert machine is not None
    assert "virtual machine behind tap0_kata" in machine
    nowhere = excluded_reason(strict_pod("kata", "fe80::1"))
    assert nowhere == "No pod address is on an interface of the network namespace."


def test_port_declared_by_two_pods_of_one_address_is_a_conflict() -> None:
    pods = [
        strict_pod("a", ONE, container=tcp(80)),
        strict_pod("b", ONE, container=tcp(80)),
        strict_pod("c", OTHER, container=tcp(80)),
    ]
    assert claims(*pods) == {"c": (80,)}
    assert plan_of(pods).conflicts == {
        "uid-a": "Pod shop/b has the same address 198.18.1.1; kubelet connections to these ports "
        "are ambiguous: 80.",
        "uid-b": "Pod shop/a has the same address 198.18.1.1; kubelet connections to these ports "
        "are ambiguous: 80.",
    }


def test_port_declared_by_one_of_them_is_redirected() -> None:
    pods = [strict_pod("a", ONE, container=tcp(80)), strict_pod("b", ONE, container=tcp(81))]
    assert claims(*pods) == {"a": (80,), "b": (81,)}
    assert plan_of(pods).conflicts == {}


def test_other_ports_are_redirected_to_the_pod_with_http() -> None:
    pods = [strict_pod("a", ONE, container=tcp(80)), strict_pod("b", ONE)]
    assert claims(*pods) == {"a": (80,), "b": (8080, 0)}


def test_other_ports_are_a_conflict_if_a_port_is() -> None:
    other = {"readinessProbe": {"httpGet": {"port": 9090}}, **tcp(8080)}
    pods = [strict_pod("a", ONE), strict_pod("b", ONE, container=other)]
    assert claims(*pods) == {"b": (9090,)}
    assert plan_of(pods).conflicts["uid-a"].endswith("are ambiguous: 8080, others.")


def test_conflicting_port_is_not_caught_by_any_port() -> None:
    """A connect that finds no claim of its own is redirected by 0."""
    pods = [strict_pod("a", ONE), strict_pod("b", ONE, container=tcp(8080))]
    assert claims(*pods) == {}


def test_pod_that_is_not_in_strict_claims_its_ports_too() -> None:
    enforced = strict_pod("b", ONE, container=tcp(81), mode=Mode.ENFORCE)
    assert claims(strict_pod("a", ONE, container=tcp(81)), enforced) == {}
    assert claims(strict_pod("a", ONE), enforced) == {"a": (8080,)}
    idle = strict_pod("b", ONE, container={}, mode=Mode.ENFORCE)
    assert claims(strict_pod("a", ONE, container=HTTP_8080), idle) == {"a": (8080, 0)}
