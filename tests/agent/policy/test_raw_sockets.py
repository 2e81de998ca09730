"""Which cgroups' raw sockets are admitted, and when the others' are rejected."""

from collections.abc import Mapping
from typing import Any

import pytest
import structlog.testing

from agent.linux.cgroups import CgroupId
from agent.logs import Event
from agent.policy import api_types
from agent.policy.matching import RuleSet
from agent.policy.raw_sockets import RawSocketAdmission
from agent.settings import RawSocketMode
from bpf.errors import BpfError


class Maps:
    """What was written last. A third cgroup has no room."""

    def __init__(self) -> None:
        self.admitted: dict[int, bool] = {9: False}
        self.denies_pods = False

    def admit(self, cgroups: Mapping[int, bool]) -> None:
        if len(cgroups) > 2:
            raise BpfError("the map is full")
        self.admitted |= cgroups

    def admit_only(self, cgroups: Mapping[int, bool]) -> None:
        self.admitted = {}
        self.admit(cgroups)

    def set_denies_pods(self, *, is_denied: bool) -> None:
        self.denies_pods = is_denied


@pytest.fixture
def maps() -> Maps:
    return Maps()


def admission(maps: Any, mode: RawSocketMode = RawSocketMode.DENY_PODS) -> RawSocketAdmission:
    return RawSocketAdmission(maps, mode)


def rules(*sources: dict[str, Any], cgroups: Mapping[str, int]) -> RuleSet:
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "network"},
        "spec": {"pods": {"namespaces": ["elsewhere"]}, "from": list(sources)},
    }
    policy = api_types.read(document, source="test")
    return RuleSet.of([policy]).with_cgroups(
        {path: (CgroupId(number, 1),) for path, number in cgroups.items()}
    )


def named(path: str, match: str = "exact") -> dict[str, Any]:
    return {"cgroup": {"path": path, "match": match}}


def test_named_cgroups_are_admitted_and_only_these(maps: Maps) -> None:
    sources = (named("/a"), named("/b", "subtree"), named("/gone"))
    admission(maps).update(rules(*sources, cgroups={"/a": 1, "/b": 2}), is_complete=True)
    assert maps.admitted == {1: False, 2: True}
    assert maps.denies_pods


def test_cgroup_that_is_named_twice_is_admitted_with_all_below_it(maps: Maps) -> None:
    sources = (named("/a", "subtree"), named("/a"))
    admission(maps).update(rules(*sources, cgroups={"/a": 1}), is_complete=True)
    assert maps.admitted == {1: True}


def test_sources_without_a_cgroup_admit_none(maps: Maps) -> None:
    sources: tuple[dict[str, Any], ...] = ({"anyProcess": {}}, {"kernel": {}})
    admission(maps).update(rules(*sources, cgroups={}), is_complete=True)
    assert maps.admitted == {}


def test_before_policies_are_listed_nothing_more_is_rejected(maps: Maps) -> None:
    denying = admission(maps)
    denying.update(rules(named("/a"), cgroups={"/a": 1}), is_complete=False)
    assert maps.admitted == {1: False, 9: False}
    assert not maps.denies_pods


def test_what_the_last_agent_rejected_stays_rejected_until_policies_are_listed(maps: Maps) -> None:
    maps.denies_pods = True
    admission(maps).update(RuleSet(), is_complete=False)
    assert maps.denies_pods
    admission(maps, RawSocketMode.AUDIT)
    assert not maps.denies_pods


def test_full_map_is_logged(maps: Maps) -> None:
    cgroups = {"/a": 1, "/b": 2, "/c": 3}
    denying = admission(maps)
    with structlog.testing.capture_logs() as lines:
        denying.update(rules(*map(named, cgroups), cgroups=cgroups), is_complete=True)
    assert [line["event"] for line in lines] == [Event.RAW_SOCKETS_NOT_ADMITTED]
