"""The relay's plan follows pods that change, and plans no others again."""

import random
from collections.abc import Callable

import msgspec
import pytest

from agent.pods.pod_state import PathTestResult, PodState
from agent.strict.plans import RelayPlans, plan_of
from bpf.verdicts import Mode
from probes.redirection import InnerWay, Redirection
from tests.agent.strict.strict_pods import HTTP_8080, record_path, strict_pod, tcp

ONE, OTHER = "198.18.1.1", "198.18.1.2"
HTTP_OTHER = {"livenessProbe": {"httpGet": {"port": 8080, "path": "/other"}}}


def by_uid(*pods: PodState) -> dict[str, PodState]:
    return {state.pod.uid: state for state in pods}


def crowd(size: int) -> dict[str, PodState]:
    return by_uid(*(strict_pod(f"web{n}", f"198.18.2.{n}") for n in range(1, size + 1)))


def test_only_addresses_of_pods_that_changed_are_planned_again() -> None:
    pods = crowd(250)
    plans = RelayPlans()
    assert plans.update(pods) == pods.keys()
    first = plans.current
    assert plans.planned == 250
    assert plans.update(pods) == set()
    assert plans.current is first
    assert plans.planned == 250
    # One that changes, one that goes, and one that comes.
    changed = pods["uid-web7"]
    changed.pod = msgspec.structs.replace(changed.pod, is_relayed=False)
    del pods["uid-web8"]
    pods["uid-other"] = strict_pod("other", "198.18.3.1")
    names = ["uid-web7", "uid-web8", "uid-other"]
    assert plans.update(pods, names) == {"uid-web7", "uid-other"}
    assert plans.current == plan_of(pods.values()) != first
    assert plans.planned == 252


def test_pods_that_are_not_named_are_not_read() -> None:
    pods = crowd(3)
    plans = RelayPlans()
    plans.update(pods)
    pods["uid-web1"].gates = {}
    assert plans.update(pods, ["uid-web2"]) == set()
    assert len(plans.current.targets) == 3
    assert plans.update(pods, ["uid-web1"]) == {"uid-web1"}
    assert len(plans.current.targets) == 2


def test_targets_keep_their_order_while_pods_change() -> None:
    pods = crowd(3)
    plans = RelayPlans()
    plans.update(pods)
    before = [target.key for target in plans.current.targets]
    pods["uid-web1"].inner_ways = {"198.18.2.1": InnerWay(Redirection(15001, 5995, ""), 5995)}
    plans.update(pods, ["uid-web1"])
    assert [target.key for target in plans.current.targets] == before
    assert plans.current.targets[0].user == 5995
    # The others are the same objects, by which a relay's targets are compared.
    assert plans.update(pods) == set()


def test_pod_at_the_same_address_is_planned_again_with_the_one_that_changed() -> None:
    pods = by_uid(
        strict_pod("a", ONE, container=tcp(80)),
        strict_pod("b", ONE, container=tcp(81)),
        strict_pod("c", OTHER),
    )
    plans = RelayPlans()
    plans.update(pods)
    assert plans.current.conflicts == {}
    pods["uid-b"].pod = strict_pod("b", ONE, container=tcp(80)).pod
    assert plans.update(pods, ["uid-b"]) == {"uid-a", "uid-b"}
    assert plans.current.conflicts.keys() == {"uid-a", "uid-b"}
    del pods["uid-b"]
    assert plans.update(pods, ["uid-b"]) == {"uid-a"}
    assert plans.current.conflicts == {}


def test_all_pods_are_planned_again_once_the_node_is_blocked() -> None:
    pods = by_uid(*(strict_pod(f"web{n}", f"198.18.2.{n}", mode=Mode.ENFORCE) for n in range(3)))
    plans = RelayPlans()
    plans.update(pods)
    assert not plans.current.targets
    record_path(pods["uid-web1"], PathTestResult.UNREACHABLE)
    assert plans.update(pods, ["uid-web1"]) == pods.keys()
    assert plans.current.needs.keys() == pods.keys()
    record_path(pods["uid-web2"], PathTestResult.CONFIRMED)
    assert plans.update(pods, ["uid-web2"]) == {"uid-web0", "uid-web2"}
    assert plans.current == plan_of(pods.values())
    assert plans.current.needs.keys() == {"uid-web1"}


def test_ceiling_below_strict_plans_all_again() -> None:
    pods = by_uid(strict_pod("web", ONE, mode=Mode.ENFORCE))
    record_path(pods["uid-web"], PathTestResult.UNREACHABLE)
    plans = RelayPlans()
    plans.update(pods)
    assert plans.current.targets
    assert plans.update(pods, [], proxies_enforced=False) == {"uid-web"}
    assert not plans.current.targets
    assert not plans.current.needs


def _relayed(web: PodState) -> None:
    web.pod = msgspec.structs.replace(web.pod, is_relayed=not web.pod.is_relayed)


def _moved(web: PodState) -> None:
    web.claims = strict_pod("any", random.choice((ONE, OTHER))).claims


CHANGES: tuple[Callable[[PodState], None], ...] = (
    lambda web: record_path(web, PathTestResult.CONFIRMED) if web.gated_netns else None,
    lambda web: record_path(web, PathTestResult.UNREACHABLE) if web.gated_netns else None,
    lambda web: setattr(web, "gates", {}),
    lambda web: setattr(web, "gates", strict_pod("any").gates),
    lambda web: setattr(web, "netns", strict_pod("any").netns),
    lambda web: setattr(web, "inner_ways", {}),
    lambda web: setattr(
        web, "inner_ways", {ONE: InnerWay(Redirection(15001, 5995, "Consul"), None)}
    ),
    lambda web: setattr(web, "pod", msgspec.structs.replace(web.pod, mode=Mode.AUDIT)),
    lambda web: setattr(web, "pod", msgspec.structs.replace(web.pod, mode=Mode.ENFORCE)),
    lambda web: setattr(web, "pod", msgspec.structs.replace(web.pod, mode=Mode.STRICT)),
    _relayed,
    _moved,
)


@pytest.mark.parametrize("seed", range(20))
def test_any_change_of_a_pod_leads_to_the_plan_of_all(seed: int) -> None:
    """Pods with few addresses, so that all that is shared counts as well."""
    random.seed(seed)
    pods: dict[str, PodState] = {}
    plans = RelayPlans()
    for _ in range(60):
        uid = f"uid-{random.randrange(5)}"
        if uid not in pods:
            address = random.choice((ONE, OTHER, "198.18.1.3"))
            container = random.choice((HTTP_8080, HTTP_OTHER, tcp(8080), tcp(81)))
            pods[uid] = strict_pod(uid.removeprefix("uid-"), address, container=container)
        elif random.random() < 0.1:
            del pods[uid]
        else:
            random.choice(CHANGES)(pods[uid])
        plans.update(pods, [uid])
        expected = plan_of(pods.values())
        found = plans.current
        assert sorted(found.by_key) == sorted(expected.by_key)
        assert (found.conflicts, found.needs.keys(), found.notes.keys()) == (
            expected.conflicts,
            expected.needs.keys(),
            expected.notes.keys(),
        )
