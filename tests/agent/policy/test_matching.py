"""What a pod's gate gets of the policies in force."""

from typing import Any

import msgspec

from agent.linux.cgroups import CgroupId
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission
from agent.policy import api_types
from agent.policy.api_types import Policy, RuleSource
from agent.policy.matching import RuleSet, compared
from bpf import abi
from bpf.rules import Rule, SourceKind
from probes.spec.specs import parse_pod

POD = Pod(uid="1", namespace="demo", name="web", labels={"app": "web"})
SERVICE = "/system.slice/a.service"
KUBELET = Rule(SourceKind.KUBELET, 6, 80, 80)


def policy(name: str, *ports: int, sender: dict[str, Any] | None = None) -> Policy:
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": {
            "pods": {"namespaces": ["demo"]},
            "from": [sender or {"anyProcess": {}}],
            "ports": [{"port": port} for port in ports],
        },
    }
    return api_types.read(document, source="a.yaml")


def cgroup(match: str = "exact") -> dict[str, Any]:
    return {"cgroup": {"path": SERVICE, "match": match}}


def admit(*given: Policy, own: tuple[Rule, ...] = (KUBELET,), pod: Pod = POD) -> Admission:
    return RuleSet.of(given).admit(pod, own)


def ports(admission: Admission) -> list[int]:
    return [rule.first_port for rule in admission.rules]


def test_the_kubelet_s_rules_come_first_and_then_policies_by_name() -> None:
    assert ports(admit(policy("b", 2), policy("a", 3))) == [80, 3, 2]


def test_a_pod_that_no_policy_is_for_gets_the_kubelet_s_alone() -> None:
    elsewhere = Pod(uid="2", namespace="other", name="web")
    assert admit(policy("a", 1), pod=elsewhere) == Admission((KUBELET,))


def test_equal_rules_take_one_place_and_count_for_the_first_policy() -> None:
    book = RuleSet.of([policy("a", 1), policy("b", 1)])
    (only,) = book.admit(POD, ()).rules
    assert only.id == book.ids["a", book.policies[0].rules[0]]


def test_rule_set_has_another_generation_if_policies_or_cgroups_change() -> None:
    none = RuleSet()
    first = none.with_policies([policy("a", 1, sender=cgroup())], LabelSnapshot())
    found = first.with_cgroups({SERVICE: (CgroupId(7, 2),)})
    other = found.with_policies([], LabelSnapshot())
    generations = [one.generation for one in (none, first, found, other)]
    assert generations == [0, 1, 2, 3]
    assert found.with_cgroups(dict(found.cgroups)).generation == found.generation
    assert other.cgroups == found.cgroups
    assert first.selected_since == found.selected_since != other.selected_since


def test_rules_beyond_the_limit_are_deterministic_and_never_the_kubelets() -> None:
    many = [policy(f"p{number}", *range(number, 4000, 200)) for number in range(1, 3)]
    for given in (many, many[::-1]):
        admission = admit(*given)
        assert len(admission.rules) == abi.GATE_RULES
        assert admission.rules[0] == KUBELET
        assert ports(admission)[1:21] == list(range(1, 4000, 200))
        assert admission.problem == (
            "41 rules match this pod and a gate holds 32: 9 are skipped, of p2; let fewer "
            "policies select the pod, or join their ports into ranges."
        )


def test_missing_cgroup_admits_nothing_and_takes_no_rule() -> None:
    book = RuleSet.of([policy("a", 1, sender=cgroup())])
    assert book.admit(POD, ()) == Admission()
    (rule,) = book.policies[0].rules
    assert book.problem(rule).startswith(f"Cgroup {SERVICE} not found")
    found = book.with_cgroups({SERVICE: (CgroupId(7, 2),)})
    assert found.problem(rule) == ""
    (admitted,) = found.admit(POD, ()).rules
    assert (admitted.source, admitted.cgroup) == (SourceKind.CGROUP, 7)


def test_new_cgroup_at_the_path_keeps_the_counter() -> None:
    book = RuleSet.of([policy("a", 1, sender=cgroup("subtree"))])
    (before,) = book.with_cgroups({SERVICE: (CgroupId(7, 2),)}).admit(POD, ()).rules
    (after,) = book.with_cgroups({SERVICE: (CgroupId(8, 2),)}).admit(POD, ()).rules
    assert (before.source, before.level) == (SourceKind.ANCESTOR, 2)
    assert (before.cgroup, after.cgroup) == (7, 8)
    assert before.id == after.id != 0


def test_a_counter_outlives_changes_around_its_rule() -> None:
    before = RuleSet.of([policy("b", 1, 5)])
    after = RuleSet.of([policy("a", 1), policy("b", 3, 5)])
    five = before.policies[0].rules[1]
    assert before.ids["b", five] == after.ids["b", five]
    assert len(set(after.ids.values())) == 3


def test_rules_with_the_same_hash_have_counters_of_their_own() -> None:
    """A counter's key has four bytes."""
    first, second = policy("p99721", 1), policy("p108378", 1)
    keys = [(one.name, one.rules[0]) for one in (first, second)]
    alone = [RuleSet.of([one]).ids[key] for one, key in zip((first, second), keys, strict=True)]
    assert alone == [3092841824, 3092841824]
    together = RuleSet.of([first, second]).ids
    assert [together[key] for key in keys] == [0xD7248968, 3092841824]


def test_a_subtree_needs_the_node_s_own_view_of_cgroups() -> None:
    book = RuleSet.of(
        [policy("a", 1, sender=cgroup("subtree")), policy("b", 2, sender=cgroup())]
    ).with_cgroups({SERVICE: (CgroupId(7, None),)})
    assert ports(book.admit(POD, ())) == [2]
    assert "cgroup namespace" in book.problem(book.policies[0].rules[0])


def test_the_kernel_s_packets_are_not_a_process_s() -> None:
    (kernel,) = admit(policy("a", 1, sender={"kernel": {}}), own=()).rules
    assert (kernel.source, kernel.cgroup, kernel.level) == (SourceKind.KERNEL, 0, 0)
    assert admit(policy("a", 1), own=()).rules[0].source is SourceKind.ANY


def test_unit_and_pods_admit_each_of_their_cgroups_with_all_below() -> None:
    selector = {"hostNetworkPods": {"podSelector": {"matchLabels": {"app": "agent"}}}}
    book = RuleSet.of(
        [
            policy("a", 1, sender={"systemdUnit": {"name": "a.service"}}),
            policy("b", 2, sender=selector),
        ]
    )
    problems = [book.problem(rule) for one in book.policies for rule in one.rules]
    assert problems[0].startswith("Unit a.service has no cgroup")
    assert problems[1].startswith("No hostNetwork pod of this node matches")
    (pods,) = book.host_pods()
    found = book.with_cgroups(
        {"a.service": (CgroupId(7, 2),), pods: (CgroupId(8, 3), CgroupId(9, 3))}
    )
    rules = found.admit(POD, ()).rules
    assert [(rule.source, rule.cgroup, rule.level) for rule in rules] == [
        (SourceKind.ANCESTOR, 7, 2),
        (SourceKind.ANCESTOR, 8, 3),
        (SourceKind.ANCESTOR, 9, 3),
    ]
    assert rules[1].id == rules[2].id != rules[0].id
    assert found.named_cgroups() == {7: True, 8: True, 9: True}


def test_ports_by_name_are_those_of_the_pod_with_that_protocol() -> None:
    named = selecting("a", ports=[{"port": "dns", "protocol": "UDP"}, {"port": "web"}])
    manifest = {
        "spec": {
            "initContainers": [{"name": "once", "ports": [{"name": "web", "containerPort": 1}]}],
            "containers": [
                {
                    "name": "dns",
                    "ports": [
                        {"name": "dns", "containerPort": 53, "protocol": "UDP"},
                        {"name": "dns-tcp", "containerPort": 53},
                        {"name": "web", "containerPort": 8080},
                    ],
                },
                {"name": "other", "ports": [{"name": "web", "containerPort": 9090}]},
            ],
        }
    }
    pod = Pod(uid="1", namespace="demo", name="dns", spec=parse_pod(manifest))
    rules = RuleSet.of([named]).admit(pod, ()).rules
    assert sorted((rule.protocol, rule.first_port, rule.last_port) for rule in rules) == [
        *((6, 8080, 8080), (6, 9090, 9090), (17, 53, 53)),
    ]
    assert RuleSet.of([named]).admit(POD, ()).rules == ()


def selecting(name: str, **spec: Any) -> Policy:
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": {
            "pods": {"podSelector": {}},
            "from": [{"anyProcess": {}}],
            "ports": [{"port": 1}],
            **spec,
        },
    }
    return api_types.read(document, source="a.yaml")


def test_namespaces_are_selected_by_their_labels_and_their_name() -> None:
    team = selecting("a", pods={"namespaceSelector": {"matchLabels": {"team": "a"}}})
    name = {"kubernetes.io/metadata.name": "demo"}
    demo = selecting("b", pods={"namespaceSelector": {"matchLabels": name}})
    labels = LabelSnapshot(namespaces={"demo": {"team": "a"}})
    assert len(RuleSet.of([team], labels).admit(POD, ()).rules) == 1
    assert RuleSet.of([team]).admit(POD, ()).rules == ()
    assert len(RuleSet.of([demo]).admit(POD, ()).rules) == 1


def test_policy_is_in_force_on_the_nodes_that_it_selects() -> None:
    gpu = selecting("a", nodeSelector={"matchLabels": {"gpu": "yes"}})
    assert RuleSet.of([gpu]).policies == ()
    assert RuleSet.of([gpu], LabelSnapshot(node={"gpu": "yes"})).policies == (gpu,)


def test_changed_labels_of_a_pod_select_other_policies() -> None:
    book = RuleSet.of([selecting("a", pods={"podSelector": {"matchLabels": {"app": "web"}}})])
    assert len(book.admit(POD, ()).rules) == 1
    changed = msgspec.structs.replace(POD, labels={"app": "other"})
    assert book.admit(changed, ()).rules == ()


def test_selected_policies_are_kept_while_the_pod_is_the_same() -> None:
    selected = RuleSet.of([policy("a", 1)]).selected
    kept = selected.of(POD)
    assert selected.of(POD) is kept
    selected.retain({POD.uid})
    assert selected.of(POD) is kept
    selected.retain({"other"})
    assert selected.of(POD) == kept
    assert selected.of(POD) is not kept


def test_subtree_is_compared_at_its_level_and_an_exact_cgroup_at_any() -> None:
    found = [CgroupId(7, 2), CgroupId(8, None)]
    assert list(compared(RuleSource("exact", "/a"), found)) == [
        (SourceKind.CGROUP, 7, 0),
        (SourceKind.CGROUP, 8, 0),
    ]
    assert list(compared(RuleSource("subtree", "/a"), found)) == [(SourceKind.ANCESTOR, 7, 2)]


def test_any_process_and_the_kernel_are_compared_with_no_cgroup() -> None:
    found = [CgroupId(7, 2)]
    assert list(compared(RuleSource("any"), found)) == [(SourceKind.ANY, 0, 0)]
    assert list(compared(RuleSource("kernel"), found)) == [(SourceKind.KERNEL, 0, 0)]
