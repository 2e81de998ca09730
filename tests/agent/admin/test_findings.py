"""What of a report is a finding: its kind, subject and sentence."""

import datetime
from typing import Any

import msgspec
import pytest

from agent.admin import finding, findings
from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding, found
from agent.admin.finding_kinds import KINDS, Kind, Severity
from agent.admin.report import (
    AnswerStatus,
    ConditionOwnerStatus,
    HookStatus,
    HostProbeStatus,
    PathStatus,
    PodProblem,
    PodSourceStatus,
    RawSocketStatus,
    SourceProblem,
)
from agent.labels import ISOLATION_READY, POLICY_READY, PROBES_PASSING
from agent.pods import modes
from agent.pods.pod import Problem
from tests.agent.operate.page.reports import condition, pod, probe, relay, report

TYPO = Problem(modes.INVALID, "Label podgate.io/mode of namespace shop is 'x'.", "namespace shop")


GONE = ConditionOwnerStatus(
    domain="gpu.example.com",
    is_present=False,
    gone_since=datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC),
    stale_after_seconds=30,
    when_stale="Unknown",
    conditions=1,
    stale=1,
    waiting_pods=["shop/web"],
)
GONE_SENTENCE = (
    "No process of this node reports conditions gpu.example.com/*, as its ConditionOwner names it: "
    "a pod waits for them."
)


def source(part: str) -> dict[str, Any]:
    problem = SourceProblem(part=part, text="It is silent")
    return {"pod_source": PodSourceStatus(pods_from="", problems=[problem])}


def pending(count: int, seconds: float) -> dict[str, Any]:
    status = PodSourceStatus(pods_from="", pending_conditions=count, pending_seconds=seconds)
    return {"pod_source": status}


OF_NODE: tuple[tuple[dict[str, Any], Kind, str], ...] = (
    ({"open_ports": "They are open."}, kinds.DECLARED_PORTS_OPEN, "They are open."),
    (
        {"open_ports": "They are open.", "kubelet": None},
        kinds.DECLARED_PORTS_OPEN,
        "They are open.",
    ),
    (
        {"kubelet": None, "kubelet_problem": "two of them."},
        kinds.KUBELET_UNKNOWN,
        "Kubelet not identified: two of them.",
    ),
    (
        {"kubelet_unfollowed": "no BTF."},
        kinds.KUBELET_NOT_FOLLOWED,
        "Without the agent the kernel does not follow the kubelet's restarts: no BTF.",
    ),
    (
        {"max_mode": "off", "max_mode_from": "a label"},
        kinds.OFF,
        "podgate is off by a label: all pods of this node are open.",
    ),
    ({"is_synced": False}, kinds.PODS_NOT_SYNCED, "Initial pod sync not finished."),
    ({"unsynced": "no list"}, kinds.PODS_NOT_SYNCED, "No list."),
    (source("watch"), kinds.WATCH_BROKEN, "It is silent."),
    (source("conditions"), kinds.CONDITIONS_NOT_WRITTEN, "It is silent."),
    (source("runtime"), kinds.RUNTIME_UNREACHABLE, "It is silent."),
    (source("kubelet"), kinds.KUBELET_UNREACHABLE, "It is silent."),
    (source("nri"), kinds.NRI_NOT_CONNECTED, "It is silent."),
    (source("services"), kinds.SERVICES_OLD, "It is silent."),
    (source("definition"), kinds.DEFINITION_MISSING, "It is silent."),
    (
        pending(12, 31.0),
        kinds.CONDITIONS_NOT_WRITTEN,
        "Conditions of 12 pods are not written to the API server.",
    ),
    ({"policy_problems": ["No."]}, kinds.POLICY_NOT_APPLIED, "No."),
    (
        {"network_policy_problems": ["No."]},
        kinds.CLUSTER_NETWORK_POLICY_NOT_UNDERSTOOD,
        "No.",
    ),
    (
        {"hooks": [HookStatus(name="connect6", problem="EPERM.")]},
        kinds.HOOK_MISSING,
        "Hook connect6 does not work: EPERM; gates still drop.",
    ),
    (
        {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="none.", sources=[])},
        kinds.RAW_SOCKETS_NOT_DENIED,
        "--raw-sockets=deny-pods: none.",
    ),
    (
        {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="", sources=[], rejected=3)},
        kinds.GUARD_DENIED,
        "--raw-sockets=deny-pods has rejected raw or packet sockets of containers.",
    ),
    (
        {"host_probes": HostProbeStatus(mode="deny", rejected=2)},
        kinds.GUARD_DENIED,
        "--kubelet-host-probes=deny has rejected connections of the kubelet.",
    ),
    (
        {"egress_problems": ["Out of room."]},
        kinds.HOST_EGRESS_NOT_IN_FORCE,
        "Out of room.",
    ),
    (
        {"host_probes": HostProbeStatus(mode="deny", problem="no hooks")},
        kinds.HOST_PROBES_NOT_DENIED,
        "No hooks.",
    ),
    ({"flow_problems": ["No room."]}, kinds.FLOWS_NOT_WRITTEN, "No room."),
    ({"pods_cgroup_problem": "Not found."}, kinds.PODS_CGROUP_MISSING, "Not found."),
    ({"condition_owners": [GONE]}, kinds.CONDITION_OWNER_GONE, GONE_SENTENCE),
    (
        {"condition_owner_problems": ["Owner x is wrong."]},
        kinds.CONDITION_OWNER_INVALID,
        "Owner x is wrong.",
    ),
    ({"policies_without_effect": ["No pod."]}, kinds.POLICY_WITHOUT_EFFECT, "No pod."),
    (
        {"components": {"default_deny": False}},
        kinds.DEFAULT_DENY_MISSING,
        "The table that blocks new pods is not installed: they are open until they have their "
        "gate.",
    ),
    (
        {"components": {"cni_plugin": False}},
        kinds.CNI_PLUGIN_MISSING,
        "podgate-cni is not installed: new pods get their gate after they start.",
    ),
    (
        {"components": {"kubelet_pods_api": False}},
        kinds.KUBELET_API_MISSING,
        "The kubelet's pods API does not respond: pods come from the API server alone.",
    ),
    (
        {"components": {"state": False}},
        kinds.STATE_NOT_WRITTEN,
        "State files cannot be written: the next agent starts with older ones.",
    ),
    (
        {"component_problems": ["Component http fails and starts again: ValueError."]},
        kinds.COMPONENT_FAILING,
        "Component http fails and starts again: ValueError.",
    ),
    (
        {"server_problems": ["Metrics are not served: port 9650 is taken."]},
        kinds.PORT_NOT_OPEN,
        "Metrics are not served: port 9650 is taken.",
    ),
    (
        {"relay": relay(is_up=False, problem="no netns.")},
        kinds.RELAY_MISSING,
        "Strict unavailable, falling back to enforce: no netns.",
    ),
    (
        {"relay": relay(is_up=False, problem="no netns.", has_fallback=False)},
        kinds.RELAY_MISSING_PROBES_FAIL,
        "Strict unavailable, so the kubelet's probes fail (--strict-without-fallback): no netns.",
    ),
    (
        {"relay": relay(is_bypassed=True)},
        kinds.RELAY_FULL,
        "The relay is full: new connections of the kubelet go directly to the gate.",
    ),
)


def unlike(kind: str, reason: str, status: str = "False") -> dict[str, Any]:
    """Another condition beside one that is as desired."""
    other = {
        ISOLATION_READY: condition(PROBES_PASSING, "True", "ProbesPassing"),
        PROBES_PASSING: condition(ISOLATION_READY, "True", "Enforced"),
        POLICY_READY: condition(ISOLATION_READY, "True", "Enforced"),
    }
    return {"conditions": [condition(kind, status, reason, "Busy."), other[kind]]}


def problem(part: str) -> dict[str, Any]:
    return {"problems": [PodProblem(part=part, text="It is so")]}


def label(reason: str) -> dict[str, Any]:
    return {"mode_problems": [Problem(reason, "It is so.")]}


OF_POD: tuple[tuple[dict[str, Any], Kind, str], ...] = (
    (unlike(ISOLATION_READY, "GateBypassed"), kinds.GATE_BYPASSED, "Busy."),
    (
        {"paths": [PathStatus(address=f"198.18.1.{n}", result="bypassed") for n in (1, 2)]},
        kinds.GATE_BYPASSED,
        "The host reaches 198.18.1.1, 198.18.1.2 without passing the gate; check how the CNI "
        "routes them.",
    ),
    (unlike(ISOLATION_READY, "GateFailed"), kinds.GATE_FAILED, "Busy."),
    *(
        (unlike(ISOLATION_READY, reason), kinds.NETNS_UNUSABLE, "Busy.")
        for reason in ("NetnsMissing", "NetnsInvalid", "NetnsInUse")
    ),
    *(
        (unlike(ISOLATION_READY, reason), kinds.POD_STARTING, "Busy.")
        for reason in ("NetnsNotFound", "SandboxMissing", "NoInterface")
    ),
    (unlike(ISOLATION_READY, "InvalidManifest"), kinds.MANIFEST_INVALID, "Busy."),
    (unlike(ISOLATION_READY, "NotSupported", "True"), kinds.NOT_SUPPORTED, "Busy."),
    (unlike(PROBES_PASSING, "ProbeFailing"), kinds.PROBE_FAILING, "Busy."),
    (unlike(POLICY_READY, "PoliciesPending"), kinds.POD_STARTING, "Busy."),
    (unlike(POLICY_READY, "PoliciesNotProgrammed"), kinds.POLICY_NOT_PROGRAMMED, "Busy."),
    (unlike(POLICY_READY, "PoliciesUnconfirmed", "True"), kinds.POLICY_NOT_PROGRAMMED, "Busy."),
    (unlike(POLICY_READY, "WitnessMissing"), kinds.POLICY_NOT_CHECKED, "Busy."),
    (unlike(POLICY_READY, "PoliciesUnknown"), kinds.POLICY_NOT_CHECKED, "Busy."),
    (unlike(POLICY_READY, "PolicyCheckFailed"), kinds.POLICY_NOT_CHECKED, "Busy."),
    (unlike(POLICY_READY, "PolicyChecksOff"), kinds.POLICY_NOT_CHECKED, "Busy."),
    (unlike(PROBES_PASSING, "ProbePending"), kinds.POD_STARTING, "Busy."),
    (unlike(PROBES_PASSING, "InvalidProbeSpec"), kinds.MANIFEST_INVALID, "Busy."),
    (
        {"conditions": []},
        kinds.POD_STARTING,
        "The agent has not published the pod's condition yet.",
    ),
    (
        {"paths": [PathStatus(address="198.18.1.1", result="failed")]},
        kinds.PATH_TEST_FAILED,
        "Path test failed for 198.18.1.1; see the agent's log.",
    ),
    (unlike(ISOLATION_READY, "GateLost", "True"), kinds.GATE_FAILED, "Busy."),
    (
        {**problem("gate-lost"), **unlike(ISOLATION_READY, "GateLost", "True")},
        kinds.GATE_FAILED,
        "It is so.",
    ),
    (problem("gate"), kinds.GATE_NOT_UPDATED, "It is so."),
    (problem("rules"), kinds.GATE_NOT_UPDATED, "It is so."),
    (problem("chain"), kinds.GATE_NOT_FIRST, "It is so."),
    (problem("addresses"), kinds.ADDRESS_UNCONFIRMED, "It is so."),
    (problem("relay"), kinds.STRICT_UNAVAILABLE, "It is so."),
    (problem("relay-without-fallback"), kinds.RELAY_MISSING_PROBES_FAIL, "It is so."),
    (problem("manifest"), kinds.MANIFEST_INVALID, "It is so."),
    (problem("host"), kinds.PROBE_HOST, "It is so."),
    (problem("annotation"), kinds.ANNOTATION_IGNORED, "It is so."),
    (
        {"existing_flows": 3},
        kinds.EXISTING_FLOWS,
        "Flows that the host opened before enforcement are still open.",
    ),
    (
        {"probes": [probe(answer=AnswerStatus(obstacle="tls", problem="It is so."))]},
        kinds.PROBE_NOT_ANSWERED,
        "It is so.",
    ),
    (
        {"probes": [probe(lookups_differ=True)]},
        kinds.PROBE_LOOKUPS_DIFFER,
        "Listeners had room while connections failed: probes app Readiness.",
    ),
    (problem("certificate"), kinds.PROBE_CERTIFICATE, "It is so."),
    (unlike(PROBES_PASSING, "ProbeCertificateUnusable"), kinds.PROBE_CERTIFICATE, "Busy."),
    (
        {"probes": [probe(last_message="The pod rejects it.", lacks_certificate=True)]},
        kinds.PROBE_CERTIFICATE,
        "No result of app Readiness: the pod rejects it.",
    ),
    (
        {"probes": [probe(last_message="Redirected to port 15001.", is_redirected=True)]},
        kinds.PROBE_REDIRECTED,
        "No result of app Readiness: redirected to port 15001.",
    ),
    (unlike(PROBES_PASSING, "ProbeRedirected"), kinds.PROBE_REDIRECTED, "Busy."),
    (label(modes.INVALID), kinds.LABEL_INVALID, "It is so."),
    ({**label(modes.INVALID), "mode": "audit"}, kinds.LABEL_IGNORED, "It is so."),
    (label(modes.INVALID_CEILING), kinds.LABEL_INVALID, "It is so."),
    (label(modes.NOT_ALLOWED), kinds.MODE_NOT_ALLOWED, "It is so."),
    (label(modes.LEFT), kinds.MODE_LEFT_BEHIND, "It is so."),
    (label(modes.LIMITED), kinds.MODE_LIMITED, "It is so."),
    (label(modes.KEPT), kinds.MODE_KEPT, "It is so."),
    (label(modes.NOT_CLOSED), kinds.CLUSTER_NETWORK_POLICY_NOT_FOLLOWED, "It is so."),
)


@pytest.mark.parametrize(("changes", "kind", "sentence"), OF_NODE)
def test_state_of_the_node_is_one_finding(
    changes: dict[str, Any], kind: Kind, sentence: str
) -> None:
    (one,) = findings.find(report(pod(), **changes))
    assert msgspec.structs.replace(one, since=None, pods=[]) == found(kind, sentence)


@pytest.mark.parametrize(("changes", "kind", "sentence"), OF_POD)
def test_state_of_a_pod_is_one_finding(changes: dict[str, Any], kind: Kind, sentence: str) -> None:
    (only,) = findings.find(report(pod("web", **changes), pod("db")))
    assert (only.kind, only.severity) == (kind.name, kind.severity)
    assert (only.subject, only.sentence) == ("pod shop/web", sentence)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({}, pending(3, 2.0)),
        ({}, {"components": {"relay": False, "default_deny": True}}),
        ({"paths": [PathStatus(address="198.18.1.1", result="unreachable")]}, {}),
        ({"mode": "audit", **unlike(ISOLATION_READY, "NotSupported", "True")}, {}),
        ({"probes": [probe(answer=AnswerStatus(obstacle="stale", problem="It was."))]}, {}),
    ],
)
def test_state_as_desired_is_none(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    assert findings.find(report(pod(**fields), **changes)) == []


def owner(**changes: Any) -> dict[str, Any]:
    return {"condition_owners": [msgspec.structs.replace(GONE, **changes)]}


@pytest.mark.parametrize(
    "changes",
    [
        owner(is_present=True),
        owner(gone_since=None),
        owner(waiting_pods=[]),
        owner(gone_since=datetime.datetime.now(datetime.UTC), stale_after_seconds=3600),
        {"components": {"default_deny": True, "cni_plugin": True}},
        {"hooks": [HookStatus(name="connect6", problem="")]},
        {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="", sources=[], rejected=0)},
        pending(3, 29.9),
        pending(0, 3600.0),
        {"kubelet": None, "open_ports": "They are open.", "is_synced": True},
    ],
)
def test_what_may_still_become_as_desired_is_none(changes: dict[str, Any]) -> None:
    others = [kinds.DECLARED_PORTS_OPEN.name] if "open_ports" in changes else []
    assert [one.kind for one in findings.find(report(pod(), **changes))] == others


def test_conditions_that_are_not_written_for_long_are_a_finding() -> None:
    assert len(findings.find(report(pod(), **pending(3, 30.0)))) == 1


def test_owner_that_is_gone_is_named_with_all_pods_that_wait() -> None:
    both = [msgspec.structs.replace(GONE, is_present=True), GONE]
    waiting = msgspec.structs.replace(GONE, waiting_pods=["shop/web", "shop/db"])
    one, two = findings.find(report(pod(), condition_owners=[*both, waiting]))
    assert (one.sentence, one.pods, one.since) == (GONE_SENTENCE, ["shop/web"], GONE.gone_since)
    assert two.sentence == GONE_SENTENCE.replace("a pod waits", "2 pods wait")
    assert two.pods == ["shop/web", "shop/db"]


def test_each_hook_that_does_not_work_is_a_finding() -> None:
    hooks = [
        HookStatus(name=name, problem=problem)
        for name, problem in (
            ("a", "EPERM"),
            ("b", ""),
            ("c", "ENOENT"),
            ("hook_sockops", "EINVAL"),
        )
    ]
    assert [one.sentence for one in findings.of_hooks(hooks)] == [
        "Hook a does not work: EPERM; gates still drop.",
        "Hook c does not work: ENOENT; gates still drop.",
        "Hook hook_sockops does not work: EINVAL; hairpins pass.",
    ]


def test_cause_that_a_pod_reports_itself_is_one_finding() -> None:
    """Its condition has the same."""
    changes: tuple[dict[str, Any], ...] = (
        {
            "paths": [PathStatus(address="198.18.1.1", result="bypassed")],
            **unlike(ISOLATION_READY, "GateBypassed"),
        },
        {
            "probes": [probe(last_message="Redirected.", is_redirected=True)],
            **unlike(PROBES_PASSING, "ProbeRedirected"),
        },
        {
            "probes": [probe(last_message="Rejected.", lacks_certificate=True)],
            **problem("certificate"),
        },
        {
            "probes": [probe(last_message="Rejected.", lacks_certificate=True)],
            **unlike(PROBES_PASSING, "ProbeCertificateUnusable"),
        },
    )
    assert [len(findings.find(report(pod(**each)))) for each in changes] == [1, 1, 1, 1]


def test_probes_of_one_cause_are_named_together() -> None:
    made = [
        probe(last_message="Redirected.", is_redirected=True),
        probe(),
        probe(last_message="Not this.", is_redirected=True),
    ]
    (only,) = findings.find(report(pod(probes=made)))
    assert only.sentence == "No result of app Readiness, app Readiness: redirected."


def test_problem_with_the_relay_is_of_each_pod_where_the_relay_has_none() -> None:
    missing = relay(is_up=False, problem="no netns")
    others = report(pod(**problem("gate")), relay=missing)
    assert [one.kind for one in findings.find(others)] == [
        kinds.RELAY_MISSING.name,
        kinds.GATE_NOT_UPDATED.name,
    ]


def test_condition_of_another_owner_is_none() -> None:
    other = condition("gpu.example.com/healthy", "False", "Hot")
    assert findings.kind_of(other, "enforce") is None


@pytest.mark.parametrize(
    ("interface", "name", "subject"), [("eth0", "shop/web", "pod shop/web"), ("eth1", "", "node")]
)
def test_gate_without_its_program_is_of_its_pod(interface: str, name: str, subject: str) -> None:
    one = findings.gate_detached(interface, name)
    assert (one.kind, one.subject) == (kinds.GATE_DETACHED.name, subject)
    assert one.sentence == (f"No program is attached at {interface}: everything passes there.")


@pytest.mark.parametrize(
    ("by", "advice"),
    [
        ("", "Do this. Next: podgate status"),
        ("podgate status", "Do this."),
        ("podgate pods", "Do this. Next: podgate status"),
    ],
)
def test_advice_leaves_out_the_command_that_shows_it(by: str, advice: str) -> None:
    one = msgspec.structs.replace(
        found(kinds.OFF, "x", remedy="Do this."), next_command="podgate status"
    )
    assert one.advice(by) == advice
    assert msgspec.structs.replace(one, remedy="", next_command="").advice(by) == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        ("it is so", "It is so."),
        ("It is so...", "It is so."),
        ("podgate is off", "podgate is off."),
        ("kubectl fails.", "kubectl fails."),
        ("nft has no table", "nft has no table."),
        ("nftables has none", "Nftables has none."),
    ],
)
def test_sentence_has_a_capital_and_a_full_stop(text: str, sentence: str) -> None:
    assert finding.as_sentence(text) == sentence


def test_findings_of_a_pod_are_those_that_name_it() -> None:
    own = found(kinds.GATE_FAILED, "no gate", "pod shop/web")
    shared = found(kinds.LABEL_INVALID, "a label", "namespace shop", pods=["shop/db", "shop/web"])
    others = [
        found(kinds.GATE_FAILED, "no gate", "pod shop/db"),
        found(kinds.OFF, "off"),
        found(kinds.LABEL_INVALID, "a label", "namespace shop/web"),
    ]
    assert finding.of_pod([own, *others, shared], "shop/web") == [own, shared]


def test_equal_findings_are_in_the_order_of_the_worst() -> None:
    mild = found(kinds.EXISTING_FLOWS, "flows", "pod a/a")
    bad = found(kinds.GATE_FAILED, "no gate", "pod a/b")
    same = found(kinds.GATE_FAILED, "no gate", pods=["a/c", "a/d"])
    assert finding.merged([mild, bad, same]) == [
        (bad, ["a/b", "a/c", "a/d"]),
        (mild, ["a/a"]),
    ]
    assert finding.line(mild, []) == "Flows."
    assert finding.line(bad, ["a/b", "a/c"]) == "No gate. Pods: a/b, a/c."


def test_node_that_is_off_limits_no_mode_beside() -> None:
    limited = Problem(modes.LIMITED, "Mode strict is limited to off by a label.", "node")
    found_ones = findings.find(report(pod(mode_problems=[limited]), max_mode="off"))
    assert [one.kind for one in found_ones] == [kinds.OFF.name]
    left = Problem(modes.LEFT, "The label is of an earlier version.", "")
    found_ones = findings.find(report(pod(mode_problems=[limited, left]), max_mode="off"))
    assert [one.kind for one in found_ones] == [kinds.OFF.name, kinds.MODE_LEFT_BEHIND.name]


def test_relay_that_is_missing_is_no_finding_of_each_pod() -> None:
    missing = relay(is_up=False, problem="no netns")
    (only,) = findings.find(report(pod(**problem("relay")), pod("b"), relay=missing))
    assert only.kind == kinds.RELAY_MISSING.name


def test_label_of_a_namespace_is_one_finding_with_its_pods() -> None:
    pods = [pod(name, mode="audit", mode_problems=[TYPO]) for name in ("a", "b")]
    (only,) = findings.find(report(*pods, label_problems=[TYPO]))
    assert (only.kind, only.subject) == (kinds.LABEL_IGNORED.name, "namespace shop")
    assert only.pods == ["shop/a", "shop/b"]
    # Of a namespace without pods on this node, nothing is open here.
    (only,) = findings.find(report(label_problems=[TYPO]))
    assert (only.kind, only.pods) == (kinds.LABEL_INVALID.name, [])


def test_worst_is_first_and_a_condition_has_its_time() -> None:
    failed = pod("c", **unlike(ISOLATION_READY, "GateFailed"))
    first, *_, last = findings.find(report(pod(existing_flows=1), failed, is_synced=False))
    assert (first.kind, last.severity) == (kinds.GATE_FAILED.name, Severity.DEGRADED)
    assert first.since == failed.conditions[0].last_transition_time
    assert last.since is None


def test_readiness_has_the_findings_that_end_it() -> None:
    unready = findings.unready("no list", "They are open.")
    assert [one.sentence for one in unready] == ["They are open.", "No list."]
    assert findings.unready("", "") == []


def test_equal_findings_are_one_with_all_pods() -> None:
    pods = [pod(f"web-{number}", existing_flows=number + 1) for number in range(7)]
    ((only, names),) = finding.merged(findings.find(report(*pods)))
    assert len(names) == 7
    assert finding.line(only, names).endswith("shop/web-4 and 2 more.")
    assert finding.line(only, names[:1]) == f"shop/web-0: {only.sentence}"


def test_only_findings_of_chosen_pods_and_of_the_node_are_kept() -> None:
    pods = [pod(name, mode="audit", mode_problems=[TYPO]) for name in ("a", "b")]
    all_found = findings.find(report(*pods, pod("c", existing_flows=1), is_synced=False))
    kept = finding.chosen(all_found, lambda name: name == "shop/b")
    assert [(one.kind, one.pods) for one in kept] == [
        (kinds.LABEL_IGNORED.name, ["shop/b"]),
        (kinds.PODS_NOT_SYNCED.name, []),
    ]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_each_kind_has_a_meaning_and_a_remedy(kind: Kind) -> None:
    made = found(kind, kind.meaning, "pod shop/web")
    assert made.sentence == kind.meaning
    assert kind.remedy.endswith(".")
    assert "{" not in made.next_command
    assert kind.reason.isalnum()


def test_severity_of_a_later_version_is_degraded() -> None:
    assert Severity.of("fatal") is Severity.DEGRADED
    later = Finding(severity="fatal", kind="new", subject="node", sentence="It is new.")
    assert later.rank == Severity.DEGRADED.rank
