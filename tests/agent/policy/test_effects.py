"""Which policies have an effect: what they select, and what their rules find, once or now."""

import msgspec
import pytest

from agent.linux.cgroups import CgroupId
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from agent.policy import api_types
from agent.policy.api_source import SOURCE
from agent.policy.api_types import Policy
from agent.policy.effects import PolicyEffects
from agent.policy.matching import RuleSet
from probes.spec.specs import PodSpec, parse_pod

UNIT = {"systemdUnit": {"name": "backup.service"}}


class Node:
    """A node's rule set, and the clock of its effects."""

    def __init__(self, *policies: Policy) -> None:
        self.seconds = 0.0
        self.effects = PolicyEffects(lambda: self.seconds)
        self.rule_set = RuleSet.of(policies)

    def see(self, *pods: Pod, **units: int) -> None:
        cgroups = {f"{name}.service": (CgroupId(number, 1),) for name, number in units.items()}
        self.rule_set = self.rule_set.with_cgroups(cgroups)
        self.effects.update(self.rule_set, pods)

    def problems(self) -> list[str]:
        return list(self.effects.problems())


def policy(name: str = "backup", *sources: object, **spec: object) -> Policy:
    """Of a file. sources: the unit without any."""
    body = {"pods": {"namespaces": ["shop"]}, "from": sources or (UNIT,), **spec}
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": body,
    }
    return api_types.read(document, source="backup.yaml")


def pod(namespace: str = "shop", spec: PodSpec | None = None) -> Pod:
    return Pod(uid=namespace, namespace=namespace, name="web", spec=spec or PodSpec())


def test_policy_that_selects_no_pod_is_a_problem_after_a_minute() -> None:
    node = Node(policy())
    node.see(pod("other"), backup=7)
    assert node.problems() == []
    node.seconds = 60.0
    assert node.problems() == ["Policy backup of backup.yaml selects no pod of this node."]
    assert node.effects.encoded(["backup"]) == "0"


def test_rule_without_its_source_is_a_problem() -> None:
    node = Node(policy())
    node.see(pod())
    node.seconds = 60.0
    (problem,) = node.problems()
    assert problem.startswith("Policy backup of backup.yaml: Unit backup.service has no cgroup")
    assert node.effects.encoded(["backup"]) == "1"


def test_named_port_that_no_selected_pod_declares_is_a_problem() -> None:
    node = Node(policy(ports=[{"port": "metrics"}]))
    node.see(pod(), backup=7)
    node.seconds = 60.0
    assert node.problems() == [
        "Policy backup of backup.yaml: No pod that it selects has a TCP port named metrics."
    ]


def test_port_by_its_name_counts_if_any_selected_pod_declares_it() -> None:
    ports = [{"name": "metrics", "containerPort": 9100}]
    declaring = parse_pod({"spec": {"containers": [{"name": "a", "ports": ports}]}})
    node = Node(policy(ports=[{"port": "metrics"}]))
    node.see(pod(), msgspec.structs.replace(pod(spec=declaring), uid="other"), backup=7)
    assert node.effects.encoded(["backup"]) == "2"


def test_policy_without_a_problem_hides_none_of_another() -> None:
    of_all = msgspec.structs.replace(policy("a"), source=SOURCE)
    node = Node(of_all, policy("b"), policy("c", pods={"namespaces": ["other"]}), policy("d"))
    node.see(pod())
    node.seconds = 60.0
    assert [problem.split()[1] for problem in node.problems()] == ["b", "c", "d"]


def test_what_had_an_effect_once_has_one_until_the_policy_changes() -> None:
    first = policy()
    node = Node(first)
    node.see(pod(), backup=7)
    node.see()
    node.seconds = 60.0
    assert (node.problems(), node.effects.encoded(["backup"])) == ([], "2")
    changed = policy("backup", {"systemdUnit": {"name": "backpu.service"}})
    node.rule_set = node.rule_set.with_policies([changed], LabelSnapshot())
    node.see(pod(), backup=7)
    assert node.problems() == [], "it is new"
    node.seconds = 120.0
    assert "backpu.service" in node.problems()[0]


@pytest.mark.parametrize(
    ("name", "source"), [("backup", SOURCE), ("podgate:kubelet", "default rules, group kubelet")]
)
def test_policies_of_all_nodes_are_no_problem_of_one(name: str, source: str) -> None:
    """Whether another node has a pod or a source is the controller's to know."""
    node = Node(msgspec.structs.replace(policy(), name=name, source=source))
    node.see()
    node.seconds = 60.0
    assert node.problems() == []


def test_report_has_all_policies_in_their_order() -> None:
    node = Node(policy("b", UNIT, {"kernel": {}}), policy("a"))
    node.see(pod())
    assert node.effects.encoded(["a", "b", "c"]) in ("1,12,", "1,21,")
    many = [f"p{number}" for number in range(5000)]
    assert node.effects.encoded(many) == "", "it would fill the report"
    assert node.effects.encoded(many[:4097]) == "," * 4096
