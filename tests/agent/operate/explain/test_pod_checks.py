"""The checks of a pod in a cluster, from the agent's report and saved objects."""

import dataclasses
import datetime
import ipaddress
from typing import Any

import msgspec
import pytest

from agent import labels
from agent.admin import finding, findings
from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Severity
from agent.admin.report import AgentReport
from agent.kube.objects import (
    ApiPod,
    ApiPodSpec,
    ApiPodStatus,
    ContainerStatus,
    MetadataOnly,
    ObjectMetadata,
    PodCondition,
    ReadinessGate,
)
from agent.kube.saved_pods import SavedObjects, SavedPods
from agent.operate.explain import pod_checks
from agent.operate.explain.facts import GateFacts, RelayFacts
from agent.operate.explain.model import Check
from agent.operate.explain.pod_checks import PodFacts
from agent.operate.explain.pods import NamedPods
from agent.operate.meshes import PodMesh
from bpf.verdicts import Mode
from tests.agent.operate.page.reports import probe

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ISOLATED = "podgate.io/isolation-ready"


def report(mode: str = "enforce", **changes: Any) -> AgentReport:
    condition = {"type": ISOLATED, "status": "True", "reason": "Enforced", "message": "Attached."}
    pod = {
        "namespace": "shop",
        "name": "web",
        "uid": "uid",
        "mode": mode,
        "source": "api",
        "netns": "/run/netns/web",
        "addresses": ["198.18.1.1"],
        "conditions": [{**condition, "lastTransitionTime": NOW.isoformat()}],
        "gates": [{"interface": "veth7", "ifindex": 7, "packets": {}}],
        "paths": [{"address": "198.18.1.1", "result": "confirmed"}],
        "existingFlows": 0,
        "probes": [],
    }
    whole = {
        **{"version": "1", "pid": 1, "started": NOW.isoformat(), "sourceHash": ""},
        **{"attachment": "tcx", "programs": "pinned", "loadMs": 0, "isSynced": True},
        **{"kubelet": "/kubelet", "kubeletProblem": "", "httpAddress": ""},
        **{"defaultMode": "audit", "maxMode": "strict", "maxModeFrom": "--max-mode"},
        **{"hooks": [], "podSource": {"podsFrom": "the API server"}, "nodeDrops": {}},
        "rawSockets": {"mode": "", "problem": "", "sources": []},
        "relay": {
            **{"isUp": True, "problem": "", "restarts": 0, "connections": 0, "heldSyns": 0},
            **{"isBypassed": False, "unknownAddress": 0, "gates": []},
        },
        "pods": [pod],
    }
    found = msgspec.convert({**whole, **changes}, AgentReport)
    return msgspec.structs.replace(found, findings=findings.find(found))


def facts(
    found: AgentReport,
    *,
    pod: dict[str, str] | None = None,
    namespace: dict[str, str] | None = None,
) -> PodFacts:
    conditions = (
        PodCondition(type="ContainersReady", status="False", message="app crashed"),
        PodCondition(type=ISOLATED, status="True"),
    )
    gates = (ReadinessGate(ISOLATED), ReadinessGate("shop.example/registered"))
    saved = ApiPod(
        metadata=ObjectMetadata(name="web", namespace="shop", uid="uid", labels=pod or {}),
        spec=ApiPodSpec(readiness_gates=gates),
        status=ApiPodStatus(conditions=conditions),
    )
    labels = SavedObjects(
        objects=[MetadataOnly(ObjectMetadata(name="shop", labels=namespace or {}))]
    )
    pods = NamedPods(found, SavedPods(node_name="node", pods=[saved], namespaces=labels))
    mode = Mode.from_label(found.pods[0].mode)
    return PodFacts(
        pods.find("web"),
        found,
        found.findings,
        (GateFacts(7, "veth7", mode, frozenset()),),
        namespace_labels=pods.namespace_labels["shop"],
    )


def checks(found: PodFacts) -> dict[str, Check]:
    return {check.name: check for check in pod_checks.check(found).checks}


@pytest.mark.parametrize(
    ("mode", "changes", "pod", "namespace", "words"),
    [
        ("audit", {}, {}, {}, "the node's default"),
        ("enforce", {}, {}, {"podgate.io/mode": "enforce"}, "of namespace shop"),
        ("enforce", {}, {"podgate.io/mode": "enforce"}, {}, "of the pod"),
        (
            *("enforce", {}, {"podgate.io/mode": "enforce"}),
            *({"podgate.io/mode": "enforce"}, "of namespace shop"),
        ),
        (
            *("audit", {}, {"podgate.io/mode": "enforce"}),
            *({labels.LEFT_LABEL: ""}, "the node's default"),
        ),
        (
            *("audit", {}, {"podgate.io/mode": "audit"}),
            *({"podgate.io/mode": "strict", labels.OVERRIDE_LABEL: "allowed"}, "of the pod"),
        ),
        (
            *("strict", {}, {"podgate.io/mode": "audit"}),
            *({"podgate.io/mode": "strict"}, "of namespace shop"),
        ),
        (
            *("audit", {"maxMode": "audit", "maxModeFrom": "the node's label"}),
            *({}, {"podgate.io/mode": "strict"}, "the ceiling, the node's label"),
        ),
    ],
)
def test_mode_names_what_decides_it(
    mode: str,
    changes: dict[str, str],
    pod: dict[str, str],
    namespace: dict[str, str],
    words: str,
) -> None:
    found = facts(report(mode, **changes), pod=pod, namespace=namespace)
    assert words in checks(found)["mode"].text


def test_mode_may_be_that_of_the_node_s_label_or_of_another_origin() -> None:
    found = facts(report("audit"))
    labelled = dataclasses.replace(found, node_labels={labels.MODE_LABEL: "audit"})
    assert checks(labelled)["mode"].text == "audit, by label podgate.io/mode of the node"
    (status,) = report("enforce").pods
    raised = msgspec.structs.replace(status, mode_origin="ClusterNetworkPolicy deny-all")
    closed = facts(msgspec.structs.replace(report("enforce"), pods=[raised]))
    assert checks(closed)["mode"].text == "enforce, by ClusterNetworkPolicy deny-all"


def test_failed_probe_names_the_command_that_tries_it() -> None:
    found = report()
    failed = probe(type="Liveness", result="failure", last_message="refused", failures=3)
    pod = msgspec.structs.replace(found.pods[0], probes=[failed, probe()])
    of_pod = facts(msgspec.structs.replace(found, pods=[pod]))
    shown = [check for check in pod_checks.check(of_pod).checks if check.name == "probe"]
    assert [(check.state, check.next) for check in shown] == [
        ("problem", "podgate probe --pod shop/web"),
        ("ok", ""),
    ]


def test_readiness_that_others_lack_is_named() -> None:
    """Of podgate all is well; a container and another controller's gate are not."""
    found = pod_checks.check(facts(report()))
    problems = [check.text for check in found.checks if check.state != "ok"]
    assert problems == [
        "shop.example/registered is not set",
        "ContainersReady is False: app crashed",
    ]
    assert not found.is_well
    assert checks(facts(report()))["API server"].next == "kubectl describe pod -n shop web"


def test_mesh_of_a_pod_is_named() -> None:
    assert "mesh" not in checks(facts(report()))
    found = dataclasses.replace(facts(report()), mesh=PodMesh("Istio", {}))
    assert checks(found)["mesh"].text.startswith("Istio: the kubelet's probes come from outside")


def test_gate_in_another_mode_is_a_problem() -> None:
    found = facts(report())
    other = PodFacts(found.pod, found.report, (), (GateFacts(7, "veth7", Mode.AUDIT, frozenset()),))
    assert checks(other)["gate"].text == "veth7 is in mode audit"
    detached = PodFacts(
        found.pod,
        found.report,
        (),
        (GateFacts(7, "veth7", Mode.ENFORCE, frozenset(), is_attached=False),),
    )
    assert "No program is attached at veth7" in checks(detached)["gate"].text


def test_answer_to_the_kubelet_is_a_check() -> None:
    probe = {
        **{"container": "app", "type": "Liveness", "handler": "tcp :1", "result": "success"},
        **{"lastMessage": "", "families": [], "successes": 1, "failures": 0},
    }
    problem = "The kubelet's probe goes to the pod itself: Mode is not strict."
    for answer, state, text in (
        (
            {"verdict": "healthy", "ageSeconds": 0.25},
            "ok",
            "app Liveness: the kubelet gets healthy, 0.2 s old",
        ),
        ({"verdict": "healthy"}, "ok", "app Liveness: the kubelet gets healthy, 0.0 s old"),
        ({"obstacle": "not_relayed", "problem": problem}, "problem", problem),
    ):
        whole = msgspec.to_builtins(report())
        whole["pods"][0]["probes"] = [{**probe, "answer": answer}]
        made = msgspec.convert(whole, AgentReport)
        made = msgspec.structs.replace(made, findings=findings.find(made))
        found = checks(facts(made))["answer" if state == "ok" else "probes"]
        assert (found.state, found.text) == (state, text)


def gate_of(mode: str, gates: tuple[GateFacts, ...], **changes: Any) -> Check:
    """The check of the gate of a pod in this mode."""
    found = dataclasses.replace(facts(report(mode)), gates=gates, **changes)
    return checks(found)["gate"]


def test_gate_is_compared_with_the_mode() -> None:
    enforcing = GateFacts(7, "veth7", Mode.ENFORCE, frozenset())
    detached = dataclasses.replace(enforcing, is_attached=False)
    assert gate_of("enforce", (enforcing,)).state == "ok"
    assert gate_of("off", ()).text == "none: the mode is off"
    assert gate_of("off", ()).state == "ok"
    missing = gate_of("enforce", ())
    assert (missing.state, missing.text) == ("problem", "no gate has an address of the pod")
    passing = gate_of("enforce", (enforcing, detached))
    assert passing.state == "problem"
    assert passing.text == "No program is attached at veth7: everything passes there."
    assert passing.severity == Severity.OPEN
    other = gate_of("strict", (enforcing,))
    assert "veth7 is in mode enforce" in other.text
    assert gate_of("enforce", (), has_pins=False).state == "unknown"


def test_relay_of_another_pod_with_the_same_address_is_not_this_one() -> None:
    """A pod may claim the address of another one, to which the relay proxies."""
    own, claimed, relay = map(ipaddress.IPv4Address, ("198.18.1.1", "198.18.1.9", "198.18.9.1"))
    whole = msgspec.to_builtins(report("strict"))
    whole["pods"][0]["unconfirmed"] = {str(claimed): "no route"}
    found = facts(msgspec.convert(whole, AgentReport))
    assert set(found.pod.addresses) == {own, claimed}
    for target, text in ((claimed, "proxies no port of this pod"), (own, "proxies 198.18.1.1")):
        relayed = dataclasses.replace(found, relay=RelayFacts(targets={(target, 80): relay}))
        assert text in checks(relayed)["relay"].text


def test_namespace_and_kubelet_of_the_pod_are_named() -> None:
    found = checks(facts(report()))
    assert found["network namespace"].text == "/run/netns/web, 198.18.1.1"
    assert found["kubelet"].text == "identified, in /kubelet"
    unknown = checks(facts(report(kubelet=None, kubeletProblem="It is unknown.")))
    assert unknown["kubelet"].state == "problem"


Row = tuple[str, str, str, str]

AGENT = ("agent", "ok", "alive, version 1", "")
NAMESPACE = ("network namespace", "ok", "/run/netns/web, 198.18.1.1", "")
UNKNOWN_NAMESPACE = ("network namespace", "unknown", "only the agent knows its path", "")
GATE = ("gate", "ok", "attached to veth7 (0 rules)", "")
PATH = ("path test", "ok", "198.18.1.1: confirmed", "")
KUBELET = ("kubelet", "ok", "identified, in /kubelet", "")
PROBES = (
    "probes",
    "ok",
    "podgate probes nothing of it: no probes, or they are the kubelet's alone (annotation "
    "podgate.io/probes: agent)",
    "",
)
CONDITION = (ISOLATED, "ok", "True (Enforced): Attached.", "")
API_SERVER = [
    ("readiness gate", "ok", "podgate.io/isolation-ready is True", ""),
    (
        "readiness gate",
        "problem",
        "shop.example/registered is not set",
        "its owner sets it, not podgate",
    ),
    (
        "API server",
        "problem",
        "ContainersReady is False: app crashed",
        "kubectl describe pod -n shop web",
    ),
]
REST = [PROBES, CONDITION, *API_SERVER]
DEFAULT = "the node's default (--mode)"


def rows(found: PodFacts) -> list[Row]:
    return [
        (check.name, check.state, check.text, check.next)
        for check in pod_checks.check(found).checks
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "audit",
            [
                (
                    "mode",
                    "ok",
                    f"audit, by {DEFAULT}",
                    "to close it: kubectl label namespace shop podgate.io/mode=enforce --overwrite",
                ),
                NAMESPACE,
                GATE,
                PATH,
            ],
        ),
        ("enforce", [("mode", "ok", f"enforce, by {DEFAULT}", ""), NAMESPACE, GATE, PATH, KUBELET]),
        (
            "strict",
            [
                ("mode", "ok", f"strict, by {DEFAULT}", ""),
                NAMESPACE,
                GATE,
                PATH,
                (
                    "relay",
                    "ok",
                    "it serves, and proxies no port of this pod: the kubelet connects directly",
                    "",
                ),
                KUBELET,
            ],
        ),
    ],
)
def test_checks_of_a_pod_are_in_order(mode: str, expected: list[Row]) -> None:
    assert rows(facts(report(mode))) == [AGENT, *expected, *REST]


def test_pod_of_a_manifest_is_well_without_an_api_server() -> None:
    found = facts(report())
    of_manifest = dataclasses.replace(found, pod=dataclasses.replace(found.pod, saved=None))
    by = "the pod's manifest, or else the node's default (audit)"
    assert rows(of_manifest) == [
        AGENT,
        ("mode", "ok", f"enforce, by {by}", ""),
        *(NAMESPACE, GATE, PATH, KUBELET, PROBES, CONDITION),
    ]
    explained = pod_checks.check(of_manifest)
    assert (explained.namespace, explained.name, explained.uid) == ("shop", "web", "uid")
    assert explained.is_well
    assert explained.from_agent


def test_host_network_pod_is_part_of_the_node() -> None:
    found = facts(report("audit"))
    hosted = dataclasses.replace(found, pod=dataclasses.replace(found.pod, host_network=True))
    text = "hostNetwork: it is part of the node, so it is not gated and not probed inside"
    assert rows(hosted) == [
        AGENT,
        ("mode", "ok", f"audit, by {DEFAULT}", ""),
        ("network namespace", "ok", text, ""),
        *REST,
    ]


def test_pod_that_the_agent_does_not_know_yet_has_what_the_pins_have() -> None:
    found = facts(report())
    unknown = dataclasses.replace(found, pod=dataclasses.replace(found.pod, status=None))
    assert rows(unknown) == [
        ("agent", "problem", "it does not know the pod yet", "podgate status"),
        ("mode", "ok", f"enforce, by {DEFAULT}", ""),
        *(UNKNOWN_NAMESPACE, GATE, KUBELET),
        *API_SERVER,
    ]
    assert not pod_checks.check(unknown).from_agent


AUDITED = GateFacts(8, "veth8", Mode.AUDIT, frozenset())
ENFORCED = GateFacts(7, "veth7", Mode.ENFORCE, frozenset())
BY_GATE = "by its gate; which label decides is not known without an agent"


@pytest.mark.parametrize(
    ("gates", "mode", "gate"),
    [
        ((ENFORCED,), ("ok", f"enforce, {BY_GATE}", ""), GATE),
        (
            (AUDITED, ENFORCED, GateFacts(9, "veth9", Mode.OFF, frozenset())),
            ("ok", f"enforce, {BY_GATE}", ""),
            ("gate", "problem", "veth8 is in mode audit", "podgate status"),
        ),
        (
            (),
            ("unknown", "no gate has it, and without an agent the desired mode is not known", ""),
            ("gate", "problem", "no gate has an address of the pod", "podgate status"),
        ),
    ],
)
def test_gates_of_a_pod_without_an_agent(
    gates: tuple[GateFacts, ...], mode: tuple[str, str, str], gate: Row
) -> None:
    found = facts(report())
    pod = dataclasses.replace(found.pod, status=None)
    dead = dataclasses.replace(found, pod=pod, report=None, findings=(), gates=gates)
    assert rows(dead) == [
        ("agent", "unknown", "its state is not known", ""),
        ("mode", *mode),
        *(UNKNOWN_NAMESPACE, gate),
        *API_SERVER,
    ]


def test_policies_about_node_traffic_follow_the_mode() -> None:
    texts = ["Policy a denies all ingress.", "It is of tier Admin."]
    (status,) = report().pods
    status = msgspec.structs.replace(status, ingress_policies=texts)
    found = rows(facts(msgspec.structs.replace(report(), pods=[status])))
    assert found[:4] == [
        AGENT,
        ("mode", "ok", f"enforce, by {DEFAULT}", ""),
        *(("node traffic", "ok", text, "") for text in texts),
    ]


def test_pod_without_a_sandbox_has_no_namespace_yet() -> None:
    (row, *_) = report().pods
    for fields, state, text, command in (
        (
            {"netns": None},
            "unknown",
            "the container runtime reports none: the pod has no sandbox yet, or no more",
            "kubectl describe pod -n shop web",
        ),
        ({"addresses": []}, "ok", "/run/netns/web, no confirmed address", ""),
    ):
        pod = msgspec.structs.replace(row, **fields)
        found = checks(facts(msgspec.structs.replace(report(), pods=[pod])))["network namespace"]
        assert (found.state, found.text, found.next) == (state, text, command)


def test_condition_that_is_not_true_is_named_without_a_finding_s_sentence() -> None:
    whole = msgspec.to_builtins(report())
    own = {"status": "False", "reason": "Waiting", "message": "It waits."}
    whole["pods"][0]["conditions"] = [
        {"type": kind, **own, "lastTransitionTime": NOW.isoformat()}
        for kind in (ISOLATED, "shop.example/own")
    ]
    found = checks(facts(msgspec.convert(whole, AgentReport)))
    assert (found[ISOLATED].state, found[ISOLATED].text) == ("problem", "False (Waiting)")
    own_text = found["shop.example/own"].text
    assert own_text == "False (Waiting): It waits."


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([("Ready", "True", "", "")], [("API server", "ok", "Ready is True", "")]),
        (
            [("Ready", "False", "ContainersNotReady", ""), ("ContainersReady", "True", "", "")],
            [
                ("API server", "ok", "ContainersReady is True", ""),
                (
                    "API server",
                    "problem",
                    "Ready is False: ContainersNotReady",
                    "kubectl describe pod -n shop web",
                ),
            ],
        ),
        (
            [("Ready", "False", "", "")],
            [
                (
                    "API server",
                    "problem",
                    "Ready is False: not ready: app, log",
                    "kubectl describe pod -n shop web",
                )
            ],
        ),
    ],
)
def test_readiness_is_that_of_the_api_server(
    conditions: list[tuple[str, str, str, str]], expected: list[Row]
) -> None:
    made = [
        PodCondition(type=kind, status=value, reason=reason, message=message)
        for kind, value, reason, message in conditions
    ]
    containers = (
        ContainerStatus(name="app", ready=False),
        ContainerStatus(name="ok", ready=True),
        ContainerStatus(name="log", ready=False),
    )
    found = facts(report())
    assert found.pod.saved is not None
    saved = msgspec.structs.replace(
        found.pod.saved,
        spec=ApiPodSpec(readiness_gates=(ReadinessGate(ISOLATED),)),
        status=ApiPodStatus(conditions=tuple(made), container_statuses=containers),
    )
    found = dataclasses.replace(found, pod=dataclasses.replace(found.pod, saved=saved))
    written = "podgate has it True and writes it"
    assert rows(found)[-len(expected) - 1 :] == [
        ("readiness gate", "problem", f"{ISOLATED} is not set", written),
        *expected,
    ]


def test_probe_that_is_answered_by_the_relay_and_one_without_a_message() -> None:
    found = report()
    made = probe(type="Liveness", result="failure", last_message="refused", failures=3)
    well = probe(last_message="", successes=2)
    pod = msgspec.structs.replace(found.pods[0], probes=[made, well])
    texts = [
        (check.state, check.text)
        for check in pod_checks.check(facts(msgspec.structs.replace(found, pods=[pod]))).checks
        if check.name == "probe"
    ]
    assert texts == [
        (
            "problem",
            f"{made.container} Liveness {made.handler}: failure ({made.successes} successes, 3 "
            "failures), last: refused",
        ),
        (
            "ok",
            f"{well.container} {well.type} {well.handler}: success (2 successes, "
            f"{well.failures} failures)",
        ),
    ]


def test_finding_about_the_pod_or_its_node_is_a_check_of_its_part() -> None:
    """Without the command that shows it."""
    given = [
        finding.found(kinds.ADDRESS_UNCONFIRMED, "It claims one", "pod shop/web"),
        finding.found(kinds.ADDRESS_UNCONFIRMED, "Another claims one", "pod shop/db"),
        finding.found(kinds.KUBELET_UNKNOWN, "The kubelet is unknown"),
        finding.found(kinds.KUBELET_UNKNOWN, "Of other pods", pods=["shop/db"]),
        finding.found(kinds.MANIFEST_INVALID, "It is invalid", "pod shop/web"),
        finding.found(kinds.MANIFEST_INVALID, "Another is invalid", "pod shop/db"),
    ]
    found = dataclasses.replace(facts(report()), findings=given)
    assert [row for row in rows(found) if row not in API_SERVER and row[1] == "problem"] == [
        ("network namespace", "problem", "It claims one.", ""),
        ("kubelet", "problem", "The kubelet is unknown.", "podgate doctor"),
        ("pod", "problem", "It is invalid.", "kubectl describe pod -n shop web"),
    ]
