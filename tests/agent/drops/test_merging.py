"""Flows that are one entry of a history, and what remains of each."""

import msgspec
import pytest

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.drops.merging import merge, merged, observed_pod, pod_cgroup
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from probes.spec.specs import parse_pod
from tests.agent.policy.observing import IN_POD, OTHER, SINCE, WEB, flows

A = "/system.slice/a.service"
AGENT = ObservedPod(namespace="mon", name="agent-1", labels={"app": "agent"}, host_network=True)


def test_both_are_added_up_with_the_names_of_the_later() -> None:
    rolled_out = msgspec.structs.replace(WEB, name="web-2", labels={**WEB.labels, "x": "y"})
    early = flows(A, process="curl", packets=2, first=3, last=5, nodes=("b", "c"))
    late = flows("/b", pod=rolled_out, packets=3, first=2, last=6, nodes=("a", "c"))
    expected = msgspec.structs.replace(
        late, packets=5, first=late.first, process="curl", nodes=("a", "b", "c")
    )
    assert merged(early, late) == merged(late, early) == expected
    named = msgspec.structs.replace(late, process="wget", first=early.last)
    assert (merged(early, named).process, merged(early, named).first) == ("curl", early.first)
    nameless = msgspec.structs.replace(early, process="")
    assert merged(nameless, named).process == "wget"


def test_one_entry_is_for_what_one_rule_admits() -> None:
    again = msgspec.structs.replace(WEB, name="web-2", labels={"app": "web", "controller-uid": "7"})
    seen = [
        flows(A),
        flows(A, pod=OTHER),
        flows(A, pod=again),
        flows(A, port=81),
        flows(A, protocol=17),
        flows(A, port=80, has_many_ports=True),
        flows("/b"),
        flows(IN_POD),
        flows(f"{IN_POD}2"),
        flows(IN_POD, source_pod=AGENT),
        flows("/c", source_pod=msgspec.structs.replace(AGENT, name="agent-2")),
        flows("/c", source_pod=msgspec.structs.replace(AGENT, host_network=False)),
        flows("/c", source_pod=msgspec.structs.replace(AGENT, namespace="infra")),
    ]
    assert [one.packets for one in merge(seen)] == [4, 2, 2, 2, 2, 2, 4, 4, 2, 2]
    assert merge([]) == []


def first(seen: list[ObservedFlows]) -> list[float]:
    return [(one.first - SINCE).total_seconds() / 3600 for one in seen]


def test_entries_are_in_the_order_of_arrival() -> None:
    seen = [flows("/b", first=5), flows(A, first=4), flows("/b", first=3)]
    assert first(merge(seen)) == [3, 4]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (IN_POD, IN_POD.rpartition("/")[0]),
        (f"{IN_POD}/below", IN_POD.rpartition("/")[0]),
        (f"{A}/below", f"{A}/below"),
        ("/", "/"),
    ],
)
def test_cgroup_of_a_pod_is_that_above_its_containers(path: str, expected: str) -> None:
    assert pod_cgroup(path) == expected


def test_pod_is_observed_with_its_named_ports_and_the_labels_of_its_namespace() -> None:
    ports = [
        {"name": "web", "containerPort": 8080},
        {"containerPort": 9},
        {"name": "dns", "containerPort": 53, "protocol": "UDP"},
    ]
    spec = parse_pod({"spec": {"containers": [{"name": "a", "ports": ports}]}})
    pod = Pod(
        uid="1", namespace="shop", name="web", labels={"a": "b"}, spec=spec, host_network=True
    )
    assert observed_pod(pod, LabelSnapshot(namespaces={"shop": {"team": "x"}})) == ObservedPod(
        namespace="shop",
        name="web",
        labels={"a": "b"},
        namespace_labels={"team": "x"},
        host_network=True,
        named_ports=(("web", "TCP", 8080), ("dns", "UDP", 53)),
    )
