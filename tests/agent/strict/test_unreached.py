"""Pods in enforce get a relay where the kubelet cannot reach them, and only there."""

from typing import Any

import msgspec
import pytest

from agent.pods.pod_state import PathTestRecord, PathTestResult, PodState
from agent.strict.plans import plan_of
from bpf.verdicts import Mode
from probes.netns import Netns
from tests.agent.strict.strict_pods import HTTP_8080, strict_pod, tcp

ONE, OTHER, SIX = "198.18.1.1", "198.18.1.2", "fd00:18::1"
CONFIRMED, UNREACHABLE = PathTestResult.CONFIRMED, PathTestResult.UNREACHABLE
HTTPS_HOOK = {"lifecycle": {"preStop": {"httpGet": {"port": 8443, "scheme": "HTTPS"}}}}
HTTP_HOOK = {"lifecycle": {"postStart": {"httpGet": {"port": 8080}}}}


def enforced(
    name: str,
    *results: tuple[str, PathTestResult],
    container: dict[str, Any] = HTTP_8080,
    is_kubelet_seen: bool = False,
    is_relayed: bool = True,
    mode: Mode = Mode.ENFORCE,
) -> PodState:
    """A gated pod with these results of the path test by address."""
    addresses = [address for address, _ in results]
    state = strict_pod(name, *addresses, container=container, mode=mode, is_relayed=is_relayed)
    assert state.gated_netns is not None
    state.path_test = PathTestRecord(
        state.gated_netns,
        mode,
        frozenset(state.gates),
        dict(results),
        is_kubelet_seen=is_kubelet_seen,
    )
    return state


def proxied(
    *pods: PodState, proxies_enforced: bool = True, https_hooks: bool = True
) -> dict[str, tuple[int, ...]]:
    """The claims of all targets by address."""
    plan = plan_of(pods, proxies_enforced=proxies_enforced, https_hooks=https_hooks)
    return {target.address: target.claims for target in plan.targets}


def test_pod_that_the_node_does_not_reach_is_proxied_at_that_address() -> None:
    web = enforced("web", (ONE, UNREACHABLE), (SIX, CONFIRMED))
    assert proxied(web) == {ONE: (8080, 0)}
    assert plan_of([web]).needs == {"uid-web": f"The kubelet cannot reach {ONE} from the host"}


def test_pod_that_the_node_reaches_is_not_proxied() -> None:
    assert proxied(enforced("web", (ONE, CONFIRMED))) == {}


def test_pod_that_the_kubelet_reached_is_not_proxied() -> None:
    """A firewall may drop the path test, and admit probes."""
    assert proxied(enforced("web", (ONE, UNREACHABLE), is_kubelet_seen=True)) == {}


def test_new_pod_is_proxied_before_its_test_where_the_node_reaches_no_pod() -> None:
    new = strict_pod("new", OTHER, mode=Mode.ENFORCE)
    assert proxied(new) == {}
    assert proxied(new, enforced("web", (ONE, UNREACHABLE))) == {ONE: (8080, 0), OTHER: (8080, 0)}
    assert proxied(new, enforced("web", (ONE, CONFIRMED))) == {}
    partly = enforced("web", (ONE, UNREACHABLE), (SIX, CONFIRMED))
    assert proxied(new, partly) == {ONE: (8080, 0)}


def test_new_address_of_a_pod_is_proxied_before_its_test_where_the_node_reaches_no_pod() -> None:
    web = enforced("web", (ONE, UNREACHABLE))
    web.claims = strict_pod("web", ONE, OTHER).claims
    assert proxied(web) == {ONE: (8080, 0), OTHER: (8080, 0)}
    assert proxied(web, enforced("db", (SIX, CONFIRMED))) == {ONE: (8080, 0)}


def test_pod_that_is_being_deleted_shows_nothing_about_other_pods() -> None:
    """Its network may be on the way out. It has its own relay, for its preStop hook."""
    new = strict_pod("new", OTHER, mode=Mode.ENFORCE)
    ending = enforced("web", (ONE, UNREACHABLE))
    ending.pod = msgspec.structs.replace(ending.pod, is_deleting=True)
    assert proxied(new, ending) == {ONE: (8080, 0)}


def test_result_of_another_sandbox_does_not_count() -> None:
    web = enforced("web", (ONE, UNREACHABLE))
    web.gated_netns = Netns("/run/netns/again", 4, 77)
    assert proxied(web) == {}


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUDIT])
def test_pods_that_are_not_enforced_are_not_proxied(mode: Mode) -> None:
    assert proxied(enforced("web", (ONE, UNREACHABLE), mode=mode)) == {}


def test_annotation_and_ceiling_keep_the_relay_off() -> None:
    assert proxied(enforced("web", (ONE, UNREACHABLE), is_relayed=False)) == {}
    assert proxied(enforced("web", (ONE, UNREACHABLE)), proxies_enforced=False) == {}
    strict = strict_pod("strict", OTHER)
    assert proxied(strict, proxies_enforced=False) == {OTHER: (8080, 0)}


def test_pod_without_probes_and_hooks_is_not_proxied() -> None:
    assert proxied(enforced("idle", (ONE, UNREACHABLE), container={})) == {}


@pytest.mark.parametrize("container", [HTTP_HOOK, HTTPS_HOOK, tcp(80)])
def test_probes_and_hooks_are_a_reason_to_proxy(container: dict[str, Any]) -> None:
    web = enforced("web", (ONE, UNREACHABLE), container=container)
    assert list(proxied(web)) == [ONE]


def test_https_hooks_are_none_without_their_feature_gate() -> None:
    web = enforced("web", (ONE, UNREACHABLE), container=HTTPS_HOOK)
    assert proxied(web, https_hooks=False) == {}
    both = enforced("both", (OTHER, UNREACHABLE), container={**HTTP_8080, **HTTPS_HOOK})
    assert proxied(both, https_hooks=False) == {OTHER: (8080, 8443, 0)}


def test_https_hooks_are_proxied_in_strict_also_without_their_feature_gate() -> None:
    """The kubelet sends them all the same, and the gate would drop them."""
    assert proxied(strict_pod("web", ONE, container=HTTPS_HOOK), https_hooks=False) == {
        ONE: (8443, 0)
    }


def test_of_two_pods_with_one_address_the_one_without_the_route_is_proxied() -> None:
    first = enforced("first", (ONE, CONFIRMED), container=tcp(80))
    twin = enforced("twin", (ONE, UNREACHABLE), container=tcp(81))
    plan = plan_of([first, twin])
    assert [(target.key, target.claims) for target in plan.targets] == [(f"uid-twin {ONE}", (81,))]
    assert plan.conflicts == {}


def test_port_that_a_reachable_pod_declares_too_stays_with_it() -> None:
    first = enforced("first", (ONE, CONFIRMED), container=tcp(80))
    twin = enforced("twin", (ONE, UNREACHABLE), container=tcp(80))
    plan = plan_of([first, twin])
    assert plan.targets == ()
    assert plan.conflicts.keys() == {"uid-twin"}
