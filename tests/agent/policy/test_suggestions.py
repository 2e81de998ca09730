"""Policies suggested from observed flows: what they admit, and what they leave to a decision."""

import datetime

import msgspec
import pytest
import yaml

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.drops.source_processes import GONE, NO_SOCKET
from agent.policy import api_types, replay, suggested_yaml, suggestions
from agent.policy.suggestions import Suggestion
from bpf import abi
from tests.agent.policy.observing import DAY, IN_POD, OTHER, WEB, flows, node

A, B = "/system.slice/a.service", "/opt/b"
INGRESS = ObservedPod(
    namespace="edge", name="ingress-x", labels={"app": "ingress"}, host_network=True
)


def suggest(*seen: ObservedFlows, observed: datetime.timedelta = DAY) -> list[Suggestion]:
    """With the check that each policy is valid."""
    found = suggestions.suggest(seen, observed)
    for one in found:
        if one.policy:
            api_types.read(msgspec.to_builtins(one.policy), source="x")
    return found


def only(*seen: ObservedFlows) -> Suggestion:
    (one,) = suggest(*seen)
    return one


def spec_of(suggestion: Suggestion) -> dict[str, object]:
    assert suggestion.policy is not None
    spec: dict[str, object] = yaml.safe_load(msgspec.json.encode(suggestion.policy.spec))
    return spec


def admitted(seen: list[ObservedFlows], candidates: list[ObservedFlows]) -> list[ObservedFlows]:
    """Those of the candidates that suggestions without a doubt admit."""
    policies = [
        api_types.check(one.policy, source="x")
        for one in suggest(*seen)
        if one.policy and not one.doubt
    ]
    return [one for one in candidates if replay.is_admitted(policies, one)]


def test_suggestions_admit_the_observed_flows_and_no_others() -> None:
    seen = [
        flows(A, 6, 80),
        flows(A, 6, 81),
        flows(B, 17, 53),
        flows(A, 1, 0),
        flows(NO_SOCKET, 47, 0),
        flows(A, 6, 443, pod=OTHER),
        flows(IN_POD, 6, 9090, source_pod=INGRESS),
    ]
    strangers = [
        flows(A, 6, 82),
        flows(A, 17, 80),
        flows(B, 6, 53),
        flows(B, 6, 80),
        flows(f"{B}/below", 17, 53),
        flows("/", 6, 80),
        flows(NO_SOCKET, 6, 80),
        flows(A, 6, 443),
        flows(A, 6, 80, pod=OTHER),
        flows(IN_POD, 6, 9090),
        flows(IN_POD, 6, 9090, source_pod=msgspec.structs.replace(INGRESS, labels={"app": "x"})),
        flows(IN_POD, 6, 9090, source_pod=msgspec.structs.replace(INGRESS, host_network=False)),
    ]
    assert admitted(seen, seen + strangers) == seen


def test_source_is_named_by_its_unit_wherever_its_slice_lies() -> None:
    one = only(flows("/system.slice/system-backup.slice/backup.service"))
    assert spec_of(one)["from"] == [{"systemdUnit": {"name": "backup.service"}}]


def test_source_is_named_by_the_labels_of_its_host_network_pod() -> None:
    one = only(flows(IN_POD, source_pod=INGRESS))
    assert spec_of(one)["from"] == [
        {
            "hostNetworkPods": {
                "namespaces": ["edge"],
                "podSelector": {"matchLabels": {"app": "ingress"}},
            }
        }
    ]


def test_pods_of_a_source_s_roll_outs_are_one_source() -> None:
    labels = [{"app": "ingress", "pod-template-hash": text} for text in "ab"]
    pods = [msgspec.structs.replace(INGRESS, labels=one) for one in labels]
    paths = [IN_POD, IN_POD.replace("0123abcd", "4567abcd")]
    seen = [flows(path, source_pod=pod) for path, pod in zip(paths, pods, strict=True)]
    assert only(*seen).flows[0].packets == 4


def test_other_cgroups_are_named_by_path_and_exactly() -> None:
    assert spec_of(only(flows(B)))["from"] == [{"cgroup": {"path": B, "match": "exact"}}]
    below = "/system.slice/k3s.service/agents"
    assert spec_of(only(flows(below)))["from"] == [{"cgroup": {"path": below, "match": "exact"}}]
    assert spec_of(only(flows("/system.slice")))["from"] == [
        {"cgroup": {"path": "/system.slice", "match": "exact"}}
    ]


def test_pods_are_selected_by_all_labels_that_last() -> None:
    pod = msgspec.structs.replace(
        WEB, labels={**WEB.labels, "tier": "front", "podgate.io/mode": "audit"}
    )
    assert spec_of(only(flows(A, pod=pod)))["pods"] == {
        "namespaces": ["shop"],
        "podSelector": {"matchLabels": {"app": "web", "tier": "front"}},
    }


@pytest.mark.parametrize(
    ("seen", "doubt"),
    [
        (flows("/"), "root cgroup"),
        (flows(A, first=3, last=3.9), "one occasion"),
        (flows(A, first=3, last=3), "one occasion"),
        (flows(A, first=3, last=4), "one occasion"),
        (flows("/user.slice/user-1000.slice/session-4.scope"), "login"),
        (flows("/user.slice/user-1000.slice/user@1000.service/app.slice/x.service"), "login"),
        (flows("/system.slice/run-r0123.service"), "transient"),
        (flows(A, port=0, has_many_ports=True), "scan"),
        (flows(A, pod=ObservedPod(namespace="shop", name="bare")), "all of shop"),
        (flows(IN_POD), "pod that is not known"),
        (
            flows(IN_POD, source_pod=ObservedPod(namespace="edge", name="x", labels={"a": "b"})),
            "pod that is not hostNetwork",
        ),
        (
            flows(IN_POD, source_pod=ObservedPod(namespace="edge", name="x", host_network=True)),
            "all hostNetwork pods of namespace edge",
        ),
        (flows(GONE), "gone"),
        (flows(A, pod=ObservedPod(namespace="", name="relay")), "relay"),
    ],
)
def test_what_needs_a_decision_has_a_doubt(seen: ObservedFlows, doubt: str) -> None:
    assert doubt in only(seen).doubt


@pytest.mark.parametrize(
    "seen",
    [
        flows(GONE),
        flows(A, port=0, has_many_ports=True),
        flows(A, pod=ObservedPod(namespace="", name="relay")),
    ],
)
def test_what_no_policy_can_admit_has_none(seen: ObservedFlows) -> None:
    one = only(seen)
    assert (one.policy, one.flows) == (None, (seen,))


def test_rare_source_is_no_one_off() -> None:
    assert only(flows(A, first=3, last=4.1)).doubt == ""


def test_occasion_is_a_twenty_fourth_of_the_observed_time() -> None:
    seen = flows(A, first=3, last=3.1)
    (one,) = suggest(seen, observed=datetime.timedelta(hours=2))
    assert one.doubt == ""
    (one,) = suggest(seen, observed=datetime.timedelta(hours=3))
    assert "one occasion" in one.doubt


def test_port_that_was_used_once_is_apart_from_the_others() -> None:
    usual, once = suggest(flows(A, 6, 80), flows(A, 6, 9090, first=2, last=2))
    assert (usual.doubt, spec_of(usual)["ports"]) == ("", [{"protocol": "TCP", "port": 80}])
    assert spec_of(once)["ports"] == [{"protocol": "TCP", "port": 9090}]
    assert once.doubt


def test_the_same_source_on_two_nodes_is_one_suggestion() -> None:
    one = only(flows(A, nodes=("a",), first=3, last=3), flows(A, nodes=("b",), first=9, last=9))
    assert one.doubt == ""
    assert one.flows[0].nodes == ("a", "b")


def test_different_suggestions_have_different_names() -> None:
    """Applying one must not replace an earlier one."""
    named = [suggest(flows(A, 6, port))[0].policy for port in (80, 81)]
    names = {policy.metadata.name for policy in named if policy}
    assert len(names) == 2
    assert all(name.startswith("a-service-to-shop-") for name in names)


@pytest.mark.parametrize("protocol", [6, 17, 132, 1, 58, 47, 50, 103, 136])
def test_every_protocol_that_gates_drop_can_be_suggested(protocol: int) -> None:
    seen = flows(A, protocol, 7 if protocol in (6, 17, 132, 136) else 0)
    assert admitted([seen], [seen]) == [seen]


def test_more_than_a_policy_holds_becomes_several() -> None:
    seen = [flows(A, 6, port) for port in range(1, 100, 2)]
    found = suggest(*seen, flows(A, 1, 0))
    assert len(found) > 1
    read = [api_types.check(one.policy, source="x") for one in found if one.policy]
    assert all(len(policy.rules) <= abi.GATE_RULES for policy in read)
    assert sum(len(policy.rules) for policy in read) == 50 + 2
    assert sum(len(one.flows) for one in found) == 51


def test_ports_of_a_policy_are_ranges_of_each_protocol() -> None:
    ports = [(17, 80), (17, 81), (6, 90), (6, 82), (6, 81), (6, 80), (6, 1), (47, 0), (50, 0)]
    one = only(*(flows(A, protocol, port) for protocol, port in (*ports, (1, 0), (58, 0))))
    assert spec_of(one)["ports"] == [
        {"protocol": 47},
        {"protocol": 50},
        {"protocol": "ICMP"},
        {"protocol": "TCP", "port": 1},
        {"protocol": "TCP", "port": 80, "endPort": 82},
        {"protocol": "TCP", "port": 90},
        {"protocol": "UDP", "port": 80, "endPort": 81},
    ]
    assert len(one.flows) == 11


def comments(*seen: ObservedFlows) -> list[str]:
    """Of the one suggestion for these flows."""
    text = suggested_yaml.render(suggest(*seen))
    return [line[2:] for line in text.splitlines() if line.startswith("# ")]


def test_document_has_its_flows_as_comments() -> None:
    one = flows(A, process="backup", packets=1, nodes=("a", "b", "c"), first=1, last=20)
    two = flows(A, port=81, process="other", nodes=("a", "b", "c", "d", "e"))
    three = flows(A, port=82, nodes=("a", "b", "c", "d"))
    assert comments(one, two, three) == [
        "backup in /system.slice/a.service to shop/web-1",
        "  TCP 80: 1 packet, first 2026-01-01 01:00, last 2026-01-01 20:00 UTC, on a, b, c",
        "  TCP 81: 2 packets, first 2026-01-01 01:00, last 2026-01-01 20:00 UTC, on a, b, c and 2 "
        "more nodes",
        "  TCP 82: 2 packets, first 2026-01-01 01:00, last 2026-01-01 20:00 UTC, on a, b, c and 1 "
        "more node",
    ]


def test_doubt_is_a_comment_as_the_whole_document_is() -> None:
    text = suggested_yaml.render([only(flows("/", first=3, last=3))])
    lines = text.splitlines()
    assert all(line.startswith("# ") for line in lines)
    assert lines[:4] == [
        "# ---",
        "# # / to shop/web-1",
        "# #   TCP 80: 2 packets, 2026-01-01 03:00 UTC",
        "# # Not admitted: kernel threads and processes without a cgroup are in the root cgroup.",
    ]
    (document,) = yaml.safe_load_all("\n".join(line[2:] for line in lines))
    assert document["kind"] == "HostAccessPolicy"


@pytest.mark.parametrize(
    ("ports", "last"), [(10, "  TCP 10:"), (11, "  and 1 more port"), (12, "  and 2 more ports")]
)
def test_many_ports_are_summarized(ports: int, last: str) -> None:
    found = comments(*(flows(A, port=port) for port in range(1, ports + 1)))
    assert len(found) == 1 + 10 + (ports > 10)
    assert found[-1] == last if ports > 10 else found[-1].startswith(last)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.0, "59 s"),
        (60.0, "1 min"),
        (90.0, "1.5 min"),
        (3599.0, "60 min"),
        (3600.0, "1 h"),
        (93600.0, "26 h"),
    ],
)
def test_duration_has_the_unit_that_makes_it_readable(seconds: float, text: str) -> None:
    assert suggested_yaml.duration(seconds) == text


def test_minute_without_an_agent_is_in_the_comment() -> None:
    (short, long) = suggested_yaml.spans(node(unobserved_seconds=one) for one in (59.0, 60.0))
    assert "without an agent" not in short
    assert long.endswith(" of it without an agent")
