"""The checks of a pod in a cluster, from the agent's report and saved objects."""

import dataclasses
import datetime
import ipaddress
from typing import Any

import msgspec
import pytest

from agent.admin import findings
from agent.admin.finding_kinds import Severity
from agent.admin.report import AgentReport
from agent.kube.objects import (
    ApiPod,
    ApiPodSpec,
    ApiPodStatus,
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
