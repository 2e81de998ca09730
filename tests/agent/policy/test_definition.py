"""The CustomResourceDefinition accepts what podgate accepts, and rejects most of the rest."""

import re
from typing import Any

import pytest
import yaml

from agent import labels
from agent.policy import api_types, definition
from agent.policy.api_types import PolicyError
from tests.agent.policy import structural
from tests.agent.policy.structural import SchemaError
from tests.agent.policy.test_api_types import WRONG, document
from tests.agent.policy.test_rules_page import PAGE

WITH_PORTS = ("TCP", "UDP", "SCTP", 6, 17, 33, 132, 136)
# The rules in CEL, repeated.
RULES: structural.Rules = {
    "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : "
    "!has(self.values) || size(self.values) == 0": lambda one: (
        bool(one.get("values")) == (one["operator"] in ("In", "NotIn"))
    ),
    "!has(self.endPort) || (has(self.port) && self.endPort >= self.port)": lambda one: (
        "endPort" not in one or ("port" in one and one["endPort"] >= one["port"])
    ),
    "!has(self.port) || !has(self.protocol) || (type(self.protocol) == int ? self.protocol in "
    "[6, 17, 33, 132, 136] : self.protocol != 'ICMP')": lambda one: (
        "port" not in one or "protocol" not in one or one["protocol"] in WITH_PORTS
    ),
}
# Not expressed by the schema: the parts of a path.
ONLY_THE_AGENT = [{"from": [{"cgroup": {"path": path}}]} for path in ("/a/../b", "/a\0")]


def stored(given: dict[str, Any]) -> dict[str, Any]:
    """As an API server would keep it."""
    spec = definition.schema()
    made: dict[str, Any] = structural.stored(spec, {"spec": given["spec"]}, RULES)
    return {**given, **made}


@pytest.mark.parametrize(("spec", "where"), WRONG)
def test_mistake_is_rejected_by_the_api_server(spec: dict[str, Any], where: str) -> None:
    if spec in ONLY_THE_AGENT:
        stored(document(**spec))
    else:
        with pytest.raises(SchemaError):
            stored(document(**spec))


@pytest.mark.parametrize(
    "spec",
    [
        {"pods": {"podSelectr": {"matchLabels": {"app": "web"}}}},
        {"pods": {"podSelector": {"matchLabls": {"app": "web"}}}},
        {"pods": {"namespaces": ["a"], "podSelectr": {}}},
        {"port": [{"port": 53}]},
        {"ports": [{"prot": 53}]},
        {"ports": [{"port": 53, "endport": 54}]},
        {"from": [{"cgroup": {"path": "/a", "mtch": "exact"}}]},
        {"from": [{"kernel": {"x": 1}}]},
    ],
)
def test_a_slip_of_the_pen_is_not_pruned_into_a_wider_policy(spec: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        stored(document(**spec))
    with pytest.raises(PolicyError):
        api_types.read(document(**spec), source="a.yaml")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"ports": None},
        {"ports": [{}]},
        {"ports": [{"port": 1}, {"port": 1, "endPort": 1}, {"protocol": "ICMP"}]},
        {"ports": [{"protocol": 47}, {"protocol": 6, "port": 65535}, {"protocol": "SCTP"}]},
        {"from": [{"kernel": {}}, {"cgroup": {"path": "/"}}]},
        {"from": [{"cgroup": {"path": "/a", "match": "subtree"}}]},
        {"pods": {"namespaces": ["a"]}},
        {"pods": {"podSelector": {}}},
        {"pods": {"namespaces": ["a"], "podSelector": {"matchLabels": {"a": "b"}}}},
        {
            "pods": {
                "podSelector": {
                    "matchLabels": {},
                    "matchExpressions": [
                        {"key": "a", "operator": "In", "values": ["b"]},
                        {"key": "a", "operator": "Exists"},
                        {"key": "a", "operator": "DoesNotExist", "values": []},
                    ],
                }
            }
        },
    ],
)
def test_what_is_stored_means_what_was_written(spec: dict[str, Any]) -> None:
    written = api_types.read(document(**spec), source="a.yaml")
    kept = api_types.read(stored(document(**spec)), source="a.yaml")
    assert (kept.pods, kept.rules) == (written.pods, written.rules)


def test_the_example_of_the_page_is_taken() -> None:
    example = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    stored(yaml.safe_load(example))


def test_every_object_is_named_as_the_policies_are() -> None:
    made = definition.definition()
    (version,) = made["spec"]["versions"]
    assert f"{made['spec']['group']}/{version['name']}" == labels.POLICY_API_VERSION
    assert made["spec"]["names"]["kind"] == labels.POLICY_KIND
    assert made["metadata"]["name"] == f"{made['spec']['names']['plural']}.{made['spec']['group']}"
    assert made["spec"]["scope"] == "Cluster"
    # Without a status: each node would write the same one.
    assert "subresources" not in version


def test_rules_use_only_bounded_lists() -> None:
    """The API server rejects a definition whose rules may cost too much."""
    text = definition.manifest()
    arrays = len(re.findall(r"type: array", text))
    assert arrays == len(re.findall(r"maxItems:", text)) > 0
