"""Valid HostAccessPolicies, and the errors of invalid ones."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agent.pods.pod import Pod
from agent.policy import api_types
from agent.policy.api_types import PolicyRule, RuleSource
from agent.policy.kinds import PolicyError

ANY = RuleSource("any")
SERVICE = "/system.slice/a.service"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pods": {"namespace": ["a"]}}, "spec.pods: object contains unknown field `namespace`"),
    ({"pods": {"namespaces": []}}, "spec.pods.namespaces: expected `array` of length >= 1"),
    ({"pods": None}, "spec.pods: "),
    ({"pods": {}}, "spec.pods: name namespaces, namespaceSelector or podSelector"),
    (
        {"pods": {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}},
        "spec.pods.namespaceSelector.matchExpressions[0]: In needs values",
    ),
    (
        {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}},
        "spec.nodeSelector.matchExpressions[0].operator: invalid enum value 'Is'",
    ),
    (
        {
            "nodeSelector": {
                "matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]
            }
        },
        "spec.nodeSelector.matchExpressions[0]: Exists takes no values",
    ),
    ({"from": [{"hostNetworkPods": {}}]}, "spec.from[0].hostNetworkPods: name namespaces"),
    ({"from": [{"systemdUnit": {}}]}, "spec.from[0].systemdUnit: object missing required field"),
    ({"from": [{"systemdUnit": {"name": "a"}}]}, "spec.from[0].systemdUnit.name: 'a' is not the"),
    ({"from": [{"systemdUnit": {"name": "-.slice"}}]}, "spec.from[0].systemdUnit.name: '-.slice'"),
    ({"from": [{"systemdUnit": {"name": "/a.service"}}]}, "spec.from[0].systemdUnit.name: "),
    (
        {"from": [{"systemdUnit": {"name": "a.service"}, "kernel": {}}]},
        "spec.from[0]: set exactly one of",
    ),
    ({"ports": [{}]}, "spec.ports[0]: name protocol or port"),
    ({"ports": [{"port": "http", "endPort": 90}]}, "spec.ports[0].endPort: needs the number"),
    ({"ports": [{"port": "-"}]}, "spec.ports[0].port: '-' is neither a port nor its name"),
    ({"ports": [{"port": "a-much-too-long-name"}]}, "spec.ports[0].port: 'a-much-too-long-name'"),
    ({"pods": {"podSelector": {"matchLabels": {"a": 1}}}}, "spec.pods.podSelector.matchLabels"),
    (
        {
            "pods": {
                "podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]},
            }
        },
        "spec.pods.podSelector.matchExpressions[0]: In needs values",
    ),
    ({"expires": "tomorrow"}, "spec.expires: invalid RFC3339"),
    ({"expires": "2026-12-01T10:00:00"}, "spec.expires: expected `datetime` with a timezone"),
    ({"from": []}, "spec.from: expected `array` of length >= 1"),
    ({"from": [{}]}, "spec.from[0]: set exactly one of"),
    ({"from": [{"kernel": {}, "anyProcess": {}}]}, "spec.from[0]: set exactly one of"),
    ({"from": [{"kernel": {}}, {"cgrup": {}}]}, "spec.from[1]: object contains unknown field"),
    ({"from": [{"anyProcess": {"name": "x"}}]}, "spec.from[0].anyProcess: object contains"),
    ({"from": [{"cgroup": {}}]}, "spec.from[0].cgroup: object missing required field `path`"),
    ({"from": [{"cgroup": {"path": "a"}}]}, "spec.from[0].cgroup.path: 'a' is not a path"),
    ({"from": [{"cgroup": {"path": "/a/../b"}}]}, "spec.from[0].cgroup.path: "),
    ({"from": [{"cgroup": {"path": "/a\0"}}]}, "spec.from[0].cgroup.path: "),
    ({"from": [{"cgroup": {"path": "/a", "match": "all"}}]}, "spec.from[0].cgroup.match: "),
    ({"ports": []}, "spec.ports: expected `array` of length >= 1"),
    ({"ports": [{"port": 0}]}, "spec.ports[0].port: expected `int` >= 1"),
    ({"ports": [{"port": 65536}]}, "spec.ports[0].port: expected `int` <= 65535"),
    ({"ports": [{"port": "HTTP"}]}, "spec.ports[0].port: 'HTTP' is neither a port nor its name"),
    ({"ports": [{"port": True}]}, "spec.ports[0].port: expected `int | str | null`, got `bool`"),
    ({"ports": [{"port": 2, "endPort": 1}]}, "spec.ports[0].endPort: 1 is before port 2"),
    ({"ports": [{"endPort": 1}]}, "spec.ports[0].endPort: needs a port"),
    ({"ports": [{"protocol": "tcp"}]}, "spec.ports[0].protocol: 'tcp' is none of TCP"),
    ({"ports": [{"protocol": 0}]}, "spec.ports[0].protocol: 0 is not an IP protocol number"),
    ({"ports": [{"protocol": 256}]}, "spec.ports[0].protocol: 256 is not an IP protocol"),
    ({"ports": [{"protocol": "ICMP", "port": 1}]}, "spec.ports[0].port: protocol ICMP has no"),
    ({"ingress": []}, "spec: object contains unknown field `ingress`"),
]
"""Invalid specs, and how their errors begin."""

VALID: list[dict[str, Any]] = [
    {},
    {"ports": None},
    {"ports": [{"port": 1}, {"port": 1, "endPort": 1}, {"protocol": "ICMP"}]},
    {"ports": [{"protocol": 47}, {"protocol": 6, "port": 65535}, {"protocol": "SCTP"}]},
    {"ports": [{"port": "metrics"}, {"port": "dns", "protocol": "UDP"}]},
    {"from": [{"kernel": {}}, {"cgroup": {"path": "/"}}]},
    {"from": [{"cgroup": {"path": "/a/..b/.c/d.service", "match": "subtree"}}]},
    {"from": [{"systemdUnit": {"name": r"dev-disk\x2dby.service"}}]},
    {"from": [{"systemdUnit": {"name": "user@1000.service"}}]},
    {"from": [{"hostNetworkPods": {"podSelector": {}}}]},
    {
        "from": [
            {
                "hostNetworkPods": {
                    "namespaces": ["monitoring"],
                    "namespaceSelector": {"matchLabels": {"team": "sre"}},
                    "podSelector": {"matchLabels": {"app": "node-exporter"}},
                }
            }
        ]
    },
    {"nodeSelector": {"matchLabels": {"node-role.kubernetes.io/control-plane": ""}}},
    {"nodeSelector": {}},
    {"expires": "2026-12-01T10:00:00Z"},
    {"expires": "2026-12-01T10:00:00.5+01:00"},
    {"pods": {"namespaces": ["a"]}},
    {"pods": {"namespaceSelector": {}}},
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
]
"""Valid specs."""


def document(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "a-policy", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"pods": {"podSelector": {}}, "from": [{"anyProcess": {}}], **spec},
        "status": {"conditions": []},
    }


def rules(**spec: Any) -> list[PolicyRule]:
    return list(api_types.read(document(**spec), source="a.yaml").rules)


def is_for(pods: dict[str, Any], pod: Pod) -> bool:
    return api_types.read(document(pods=pods), source="a.yaml").pods.matches(
        pod.namespace, pod.labels, {}
    )


def pod(namespace: str = "default", **labels: str) -> Pod:
    return Pod(uid="1", namespace=namespace, name="web", labels=labels)


def test_a_policy_without_ports_is_for_every_protocol() -> None:
    assert rules() == [PolicyRule(ANY, 0, 0, 65535)]


@pytest.mark.parametrize(
    ("ports", "wanted"),
    [
        pytest.param([{"port": 53}], [(6, 53, 53)], id="TCP where nothing is said"),
        pytest.param([{"protocol": "UDP"}], [(17, 0, 65535)], id="every port"),
        pytest.param([{"port": 1, "endPort": 9}], [(6, 1, 9)], id="a range"),
        pytest.param([{"protocol": "ICMP"}], [(1, 0, 65535), (58, 0, 65535)], id="both families"),
        pytest.param([{"protocol": 47}], [(47, 0, 65535)], id="a number"),
        pytest.param(
            [{"protocol": 1}, {"protocol": 255}],
            [(1, 0, 65535), (255, 0, 65535)],
            id="the first and the last number",
        ),
        pytest.param([{"protocol": 136, "port": 7}], [(136, 7, 7)], id="UDP-Lite has ports"),
        pytest.param([{"port": 2}, {"port": 1}, {"port": 3}], [(6, 1, 3)], id="neighbours join"),
        pytest.param([{"port": 1, "endPort": 9}, {"port": 4}], [(6, 1, 9)], id="covered"),
        pytest.param([{"port": 4}, {"port": 4}], [(6, 4, 4)], id="twice"),
        pytest.param(
            [{"port": 1}, {"port": "a"}, {"port": "b"}],
            [(6, 0, 0, "a"), (6, 0, 0, "b"), (6, 1, 1)],
            id="names do not join",
        ),
        pytest.param([{"port": 1}, {"port": 3}], [(6, 1, 1), (6, 3, 3)], id="a gap"),
        pytest.param(
            [{"port": 4}, {"port": 5, "protocol": "UDP"}],
            [(6, 4, 4), (17, 5, 5)],
            id="protocols do not join",
        ),
        pytest.param(
            [{"port": 4}, {"port": 5, "protocol": "UDP"}, {"port": 6, "protocol": "UDP"}],
            [(6, 4, 4), (17, 5, 6)],
            id="neighbours of the second protocol join",
        ),
    ],
)
def test_ports_are_merged(ports: list[Any], wanted: list[tuple[Any, ...]]) -> None:
    assert rules(ports=ports) == [PolicyRule(ANY, *one) for one in wanted]


@pytest.mark.parametrize(
    ("rule", "protocol", "ports"),
    [
        (PolicyRule(ANY, 0, 0, 65535), "any", "any"),
        (PolicyRule(ANY, 6, 0, 65535), "TCP", "any"),
        (PolicyRule(ANY, 6, 1, 65535), "TCP", "1-65535"),
        (PolicyRule(ANY, 17, 53, 53), "UDP", "53"),
        (PolicyRule(ANY, 58, 0, 65535), "ICMPv6", "any"),
        (PolicyRule(ANY, 47, 0, 65535), "47", "any"),
        (PolicyRule(ANY, 6, 0, 0, "web"), "TCP", "web"),
    ],
)
def test_protocol_and_ports_of_a_rule_in_words(rule: PolicyRule, protocol: str, ports: str) -> None:
    assert (rule.protocol_text, rule.ports_text) == (protocol, ports)


def test_each_source_has_each_range_once() -> None:
    senders = [
        {"cgroup": {"path": f"/{SERVICE}/"}},
        {"cgroup": {"path": SERVICE, "match": "subtree"}},
        {"cgroup": {"path": SERVICE, "match": "exact"}},
        {"kernel": {}},
    ]
    assert rules(**{"from": senders}, ports=[{"port": 1}]) == [
        PolicyRule(RuleSource("exact", SERVICE), 6, 1, 1),
        PolicyRule(RuleSource("kernel"), 6, 1, 1),
        PolicyRule(RuleSource("subtree", SERVICE), 6, 1, 1),
    ]


def test_thirty_two_rules_fit_and_thirty_three_do_not() -> None:
    assert len(rules(ports=[{"port": 2 * number} for number in range(1, 33)])) == 32
    with pytest.raises(PolicyError, match="1 sources times 33 port ranges"):
        rules(ports=[{"port": 2 * number} for number in range(1, 34)])


@pytest.mark.parametrize(("spec", "where"), WRONG)
def test_error_names_the_path_of_the_field(spec: dict[str, Any], where: str) -> None:
    with pytest.raises(PolicyError) as refused:
        rules(**spec)
    assert str(refused.value).startswith(where)


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "a_b", "a..b", "a" * 254, "a\nb", "../../etc/passwd"]
)
def test_a_name_is_one_that_the_api_would_take(name: str) -> None:
    with pytest.raises(PolicyError, match=r"metadata.name"):
        api_types.read({**document(), "metadata": {"name": name}}, source="a.yaml")


def of_name(name: str) -> None:
    api_types.read({**document(), "metadata": {"name": name}}, source="a.yaml")


def of_unit(name: str) -> None:
    rules(**{"from": [{"systemdUnit": {"name": f"{name}.service"}}]})


def of_port(name: str) -> None:
    rules(ports=[{"port": name}])


@pytest.mark.parametrize(("named", "most"), [(of_name, 253), (of_unit, 247), (of_port, 15)])
def test_longest_name_is_one_that_the_api_would_take(
    named: Callable[[str], None], most: int
) -> None:
    named("a" * most)
    with pytest.raises(PolicyError):
        named("a" * (most + 1))


@pytest.mark.parametrize(
    "wrong", [None, [], "text", {"kind": "Pod"}, {"kind": "HostAccessPolicy"}, {1: 2}]
)
def test_other_documents_are_rejected(wrong: object) -> None:
    with pytest.raises(PolicyError):
        api_types.read(wrong, source="a.yaml")


def test_other_api_version_is_rejected() -> None:
    with pytest.raises(PolicyError, match="apiVersion"):
        api_types.read({**document(), "apiVersion": "policy.podgate.io/v9"}, source="a.yaml")


def test_a_policy_is_written_as_it_was_read() -> None:
    ports = [{"port": 1, "protocol": "UDP"}, {"protocol": 47}, {"port": 2, "endPort": 3}]
    senders = [{"kernel": {}}, {"cgroup": {"path": SERVICE, "match": "subtree"}}]
    pods = {"namespaces": ["a"], "podSelector": {"matchLabels": {"app": "web"}}}
    expires = "2026-12-01T10:00:00Z"
    fields = {"from": senders, "pods": pods, "ports": ports, "expires": expires}
    read = api_types.read(document(**fields), source="a.yaml")
    written = msgspec.to_builtins(read.document)
    assert api_types.read(written, source="a.yaml") == read
    assert (written["spec"]["expires"], read.expires_text) == (expires, expires)


def test_a_policy_for_all_pods_is_for_all_pods() -> None:
    assert is_for({"podSelector": {}}, pod())
    assert is_for({"podSelector": {}}, pod("other", app="web"))


def test_a_policy_for_some_namespaces_is_for_no_other() -> None:
    assert is_for({"namespaces": ["a", "default"]}, pod())
    assert not is_for({"namespaces": ["a"]}, pod())


@pytest.mark.parametrize(
    ("operator", "values", "with_x", "with_y", "without"),
    [
        ("In", ["x"], True, False, False),
        ("NotIn", ["x"], False, True, True),
        ("Exists", [], True, True, False),
        ("DoesNotExist", [], False, False, True),
    ],
)
def test_expressions_select_as_the_api_s_do(
    operator: str, values: list[str], with_x: bool, with_y: bool, without: bool
) -> None:
    expression = {"key": "app", "operator": operator, "values": values}
    pods = {"podSelector": {"matchExpressions": [expression]}}
    assert [is_for(pods, one) for one in (pod(app="x"), pod(app="y"), pod())] == [
        with_x,
        with_y,
        without,
    ]


def test_all_of_a_selector_must_hold() -> None:
    selector = {
        "matchLabels": {"app": "web", "tier": "front"},
        "matchExpressions": [{"key": "canary", "operator": "DoesNotExist"}],
    }
    assert is_for({"podSelector": selector}, pod(app="web", tier="front", other="x"))
    assert not is_for({"podSelector": selector}, pod(app="web"))
    assert not is_for({"podSelector": selector}, pod(app="web", tier="front", canary="yes"))
    assert not is_for({"namespaces": ["a"], "podSelector": selector}, pod(app="web", tier="front"))
