"""Rules are evaluated as by the gate."""

import pytest

from bpf import abi
from bpf.rule_evaluation import (
    Cgroup,
    NewFlow,
    NodeFacts,
    find_rule,
    is_destination,
    is_protocol,
    is_source,
)
from bpf.rules import Rule, SourceKind

TCP, UDP = 6, 17
KUBELET, PODS = 5, 9
KUBELET_CGROUP = Cgroup(KUBELET, "/system.slice/kubelet.service", (1, 3, KUBELET))
SSH = Cgroup(4, "/system.slice/ssh.service", (1, 3, 4))
POD = Cgroup(11, "/kubepods/pod1/c", (1, PODS, 10, 11))
IDENTIFIED = NodeFacts(kubelet_cgroup=KUBELET, pods_cgroup=PODS, pods_level=1)


def test_cgroup_has_no_ancestor_below_itself() -> None:
    found = Cgroup(7, "/a/b", (1, 5, 7))
    assert [found.ancestor(level) for level in range(5)] == [1, 5, 7, 0, 0]


def config(**fields: int) -> abi.CConfig:
    made = abi.CConfig(**fields)
    made.tunnel_ports[0], made.tunnel_ports[1] = 4789, 8472
    return made


def test_facts_are_those_of_the_node_s_configuration() -> None:
    found = NodeFacts.of(
        config(
            kubelet_cgroup=KUBELET,
            kubelet_unit=3,
            pods_cgroup=PODS,
            pods_cgroup_level=1,
            heartbeat_ns=10,
            stale_after_ns=20,
            dead_man_ns=30,
            has_ovs=1,
            tunnel_port_count=1,
        ),
        abi.CKubeletRemade(unit=3, cgroup=7),
    )
    assert found == NodeFacts(
        kubelet_cgroup=KUBELET,
        remade_cgroup=7,
        is_unit_followed=True,
        pods_cgroup=PODS,
        pods_level=1,
        heartbeat_ns=10,
        stale_after_ns=20,
        dead_man_ns=30,
        has_ovs=True,
        tunnel_ports=frozenset({4789}),
    )


@pytest.mark.parametrize(
    ("followed", "recorded", "expected"),
    [(0, 0, (0, False)), (0, 3, (0, False)), (3, 2, (0, True)), (3, 3, (7, True))],
)
def test_cgroup_that_the_kernel_recorded_counts_for_the_followed_unit_only(
    followed: int, recorded: int, expected: tuple[int, bool]
) -> None:
    remade = abi.CKubeletRemade(unit=recorded, cgroup=7)
    found = NodeFacts.of(config(kubelet_unit=followed), remade)
    assert (found.remade_cgroup, found.is_unit_followed) == expected
    assert found.kubelet_cgroups == frozenset({expected[0]} - {0})


@pytest.mark.parametrize(
    ("heartbeat_ns", "now_ns", "age_ns", "is_stale", "is_expired"),
    [
        (0, 1000, None, False, False),
        (100, 90, 0, False, False),
        (100, 100, 0, False, False),
        (100, 119, 19, False, False),
        (100, 120, 20, True, False),
        (100, 130, 30, True, False),
        (100, 131, 31, True, True),
        (1, 131, 130, True, True),
    ],
)
def test_heartbeat_is_stale_and_then_opens_gates(
    heartbeat_ns: int, now_ns: int, age_ns: int | None, is_stale: bool, is_expired: bool
) -> None:
    node = NodeFacts(heartbeat_ns=heartbeat_ns, stale_after_ns=20, dead_man_ns=30)
    assert node.heartbeat_age_ns(now_ns) == age_ns
    assert (node.is_stale(now_ns), node.is_dead_man_expired(now_ns)) == (is_stale, is_expired)


def test_without_limits_no_heartbeat_is_too_old() -> None:
    node = NodeFacts(heartbeat_ns=1)
    assert (node.is_stale(1 << 60), node.is_dead_man_expired(1 << 60)) == (False, False)


def test_limit_of_a_nanosecond_is_one() -> None:
    node = NodeFacts(heartbeat_ns=1, stale_after_ns=1, dead_man_ns=1)
    assert (node.is_stale(2), node.is_dead_man_expired(3)) == (True, True)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        # An identified kubelet, and an agent that runs.
        (IDENTIFIED, (True, False, False, False)),
        # No kubelet was found: any process outside of pods may be it.
        (NodeFacts(pods_cgroup=PODS, pods_level=1), (True, True, False, False)),
        # The heartbeat is stale.
        (
            NodeFacts(KUBELET, pods_cgroup=PODS, pods_level=1, heartbeat_ns=1, stale_after_ns=1),
            (True, True, False, False),
        ),
        # It is, and the kernel follows the kubelet.
        (
            NodeFacts(KUBELET, is_unit_followed=True, heartbeat_ns=1, stale_after_ns=1),
            (True, False, False, False),
        ),
        # Where pods are is unknown, too.
        (NodeFacts(), (True, True, True, False)),
        # The level of pods' cgroup is another one.
        (NodeFacts(pods_cgroup=PODS, pods_level=2), (True, True, True, False)),
    ],
)
def test_processes_that_may_be_the_kubelet(
    node: NodeFacts, expected: tuple[bool, bool, bool, bool]
) -> None:
    sources = (KUBELET_CGROUP, SSH, POD, None)
    assert tuple(node.may_be_kubelet(source, 1000) for source in sources) == expected


def test_kubelet_is_in_the_cgroup_that_was_found_or_recorded() -> None:
    node = NodeFacts(kubelet_cgroup=KUBELET, remade_cgroup=4)
    found = [node.is_kubelet_cgroup(one) for one in (KUBELET_CGROUP, SSH, POD, None)]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(SourceKind.ANY), [True, True, True, True, True]),
        (Rule(SourceKind.KUBELET), [False, False, False, True, False]),
        (Rule(SourceKind.CGROUP, cgroup=4), [False, True, False, False, False]),
        (Rule(SourceKind.ANCESTOR, cgroup=3, level=1), [False, True, False, False, False]),
        (Rule(SourceKind.ANCESTOR, cgroup=PODS, level=1), [False, False, True, False, False]),
        (Rule(SourceKind.KERNEL), [False, False, False, False, True]),
    ],
)
def test_rule_admits_its_sources(rule: Rule, expected: list[bool]) -> None:
    flows = [
        NewFlow(TCP, 80),
        NewFlow(TCP, 80, SSH),
        NewFlow(TCP, 80, POD),
        NewFlow(TCP, 80, is_kubelet=True),
        NewFlow(TCP, 80, is_kernel=True),
    ]
    assert [is_source(rule, flow) for flow in flows] == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(SourceKind.ANY), [True, True, True, True]),
        (Rule(SourceKind.ANY, TCP), [True, True, True, False]),
        (Rule(SourceKind.ANY, TCP, 80, 81), [False, True, True, False]),
        (Rule(SourceKind.ANY, 0, 81, 82), [False, False, True, True]),
    ],
)
def test_rule_admits_to_its_ports(rule: Rule, expected: list[bool]) -> None:
    flows = [NewFlow(TCP, 79), NewFlow(TCP, 80), NewFlow(TCP, 81), NewFlow(UDP, 82)]
    assert [is_destination(rule, flow) for flow in flows] == expected


def test_rule_of_another_protocol_does_not_match() -> None:
    rules = (Rule(SourceKind.ANY), Rule(SourceKind.ANY, TCP), Rule(SourceKind.ANY, UDP))
    assert [is_protocol(rule, NewFlow(UDP, 53)) for rule in rules] == [True, False, True]


def test_first_rule_that_matches_source_and_port_admits() -> None:
    other_source, other_port = Rule(SourceKind.KERNEL), Rule(SourceKind.ANY, TCP, 81, 81)
    first, second = Rule(SourceKind.ANY, TCP, 80, 80), Rule(SourceKind.ANY)
    flow = NewFlow(TCP, 80)
    assert find_rule((other_source, other_port, first, second), flow) is first
    assert find_rule((other_source, other_port), flow) is None
