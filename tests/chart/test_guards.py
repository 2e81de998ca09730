"""The chart's admission policies: what they reject, and that they reject nothing else."""

import copy
import json
from typing import Any

import pytest

from probes.spec import probespec
from tests.chart import admission, rendering

Json = dict[str, Any]

NODE, OTHER_NODE = "node-1", "node-2"
READY = {"type": "Ready", "status": "True"}
GATE = {"type": "example.com/gate", "status": "True", "reason": "Fine"}
SCHEDULED = {"type": "PodScheduled", "status": "True"}
OWN = {"type": "podgate.io/isolation-ready", "status": "False", "reason": "Starting"}
POD: Json = {
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "u1",
        "labels": {"app": "web"},
        "resourceVersion": "7",
        "deletionTimestamp": "2026-11-26T08:00:00Z",
        "managedFields": [{"manager": "kubelet"}],
    },
    "spec": {"nodeName": NODE},
    "status": {
        "phase": "Running",
        "podIPs": [{"ip": "198.18.0.2"}],
        "conditions": [READY, GATE, SCHEDULED, OWN],
    },
}


def _changed(thing: Json, path: str, value: Any) -> Json:
    """A copy with another value at a path such as "status/phase"; None removes it."""
    made = copy.deepcopy(thing)
    *above, last = path.split("/")
    place = made
    for name in above:
        place = place.setdefault(name, {})
    place.pop(last, None)
    if value is not None:
        place[last] = value
    return made


def _rejects_status(after: Json, *, before: Json = POD, node: str | None = NODE) -> list[str]:
    return admission.rejects("podgate-agent-pod-status", after, before, node=node)


@pytest.mark.parametrize(
    "conditions",
    [
        [READY, GATE, SCHEDULED, OWN | {"status": "True"}],
        [READY, GATE, SCHEDULED],
        [OWN, SCHEDULED, GATE, READY],
        [READY, GATE, SCHEDULED, OWN, {"type": "podgate.io/probes-passing", "status": "True"}],
    ],
)
def test_agent_writes_its_own_conditions(conditions: list[Json]) -> None:
    assert _rejects_status(_changed(POD, "status/conditions", conditions)) == []


@pytest.mark.parametrize(
    "conditions",
    [
        # As many as before, and each one was there: but the pod's gate is gone.
        [READY, READY, SCHEDULED, OWN],
        [READY, SCHEDULED, SCHEDULED],
        [READY, GATE, OWN],
        [READY, GATE, SCHEDULED, OWN, {"type": "example.com/other", "status": "True"}],
        [READY | {"status": "False"}, GATE, SCHEDULED, OWN],
        [READY, GATE | {"reason": "Other"}, SCHEDULED, OWN],
        [READY, GATE | {"observedGeneration": 2}, SCHEDULED, OWN],
        [],
        None,
    ],
)
def test_agent_changes_no_condition_of_others(conditions: list[Json] | None) -> None:
    rejected = _rejects_status(_changed(POD, "status/conditions", conditions))
    assert rejected == ["the podgate agent may write podgate.io/* conditions only"]


DOMAINS = ("gpu.example.com", "disk.example.com")
OWNED = {
    "type": "gpu.example.com/healthy",
    "status": "True",
    "message": "It passes. (sandbox 0123456789ab, boot 5be0b7e0-0000-4000-8000-000000000001)",
}


@pytest.mark.parametrize(
    "conditions",
    [
        [READY, GATE, SCHEDULED, OWN, OWNED],
        [READY, GATE, SCHEDULED, OWN, OWNED, {"type": "disk.example.com/a", "status": "True"}],
        [READY, GATE, SCHEDULED, OWN | {"status": "True"}],
    ],
)
def test_agent_writes_conditions_of_listed_domains(conditions: list[Json]) -> None:
    for before in (POD, _changed(POD, "status/conditions", [READY, GATE, SCHEDULED, OWN, OWNED])):
        after = _changed(POD, "status/conditions", conditions)
        policy = "podgate-agent-pod-status"
        assert admission.rejects(policy, after, before, node=NODE, domains=DOMAINS) == []


@pytest.mark.parametrize(
    "added",
    [
        {"type": "gpu.example.com.evil/a", "status": "True"},
        {"type": "a.gpu.example.com/a", "status": "True"},
        {"type": "gpu.example.com", "status": "True"},
        # The stamp is no right to write.
        OWNED | {"type": "fpga.example.com/healthy"},
    ],
)
def test_agent_writes_conditions_of_no_other_domain(added: Json) -> None:
    after = _changed(POD, "status/conditions", [READY, GATE, SCHEDULED, OWN, added])
    policy = "podgate-agent-pod-status"
    assert len(admission.rejects(policy, after, POD, node=NODE, domains=DOMAINS)) == 1


def test_agent_removes_what_it_wrote_for_a_domain_that_is_listed_no_more() -> None:
    before = _changed(POD, "status/conditions", [READY, GATE, SCHEDULED, OWN, OWNED])
    assert _rejects_status(POD, before=before) == []
    changed = _changed(
        POD, "status/conditions", [READY, GATE, SCHEDULED, OWN, OWNED | {"status": "False"}]
    )
    assert len(_rejects_status(changed, before=before)) == 1
    without = _changed(POD, "status/conditions", [READY, SCHEDULED, OWN])
    assert len(_rejects_status(without, before=before)) == 1


def test_first_condition_of_a_pod_without_a_status_is_written() -> None:
    before = _changed(_changed(POD, "status", None), "metadata/deletionTimestamp", None)
    after = _changed(before, "status", {"conditions": [OWN]})
    assert _rejects_status(after, before=before) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("status/phase", "Failed"),
        ("status/phase", None),
        ("status/podIPs", [{"ip": "198.18.0.3"}]),
        ("status/podIPs", None),
        ("status/observedGeneration", 3),
        ("status/resources", {"limits": {"cpu": "1"}}),
        ("status/allocatedResources", {"cpu": "1"}),
        # Of a version of Kubernetes that does not exist yet.
        ("status/fieldOfTheFuture", "x"),
    ],
)
def test_agent_changes_no_other_field_of_a_status(path: str, value: Any) -> None:
    rejected = _rejects_status(_changed(POD, path, value))
    assert rejected == ["the podgate agent may write conditions of a pod's status only"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata/labels", {"app": "database"}),
        ("metadata/labels", None),
        ("metadata/annotations", {"podgate.io/relay": "off"}),
        ("metadata/finalizers", ["example.com/forever"]),
        ("metadata/generateName", "web-"),
        ("metadata/ownerReferences", [{"kind": "Node", "name": NODE}]),
    ],
)
def test_agent_changes_no_metadata(path: str, value: Any) -> None:
    rejected = _rejects_status(_changed(POD, path, value))
    assert rejected == ["the podgate agent may not write labels, annotations or finalizers of pods"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata/resourceVersion", "8"),
        ("metadata/managedFields", [{"manager": "podgate"}]),
        # The status endpoint leaves it out of what admission gets.
        ("metadata/deletionTimestamp", None),
    ],
)
def test_metadata_that_the_api_server_writes_is_not_the_agents(path: str, value: Any) -> None:
    assert _rejects_status(_changed(POD, path, value)) == []


@pytest.mark.parametrize("node", [OTHER_NODE, None])
def test_agent_of_another_node_writes_no_status(node: str | None) -> None:
    after = _changed(POD, "status/conditions", [READY, GATE, SCHEDULED])
    assert len(_rejects_status(after, node=node)) == 1


def test_others_are_not_held_to_it() -> None:
    after = _changed(POD, "status/phase", "Failed")
    user = "system:node:node-1"
    assert admission.rejects("podgate-agent-pod-status", after, POD, user=user) == []


EVENT: Json = {
    "metadata": {"name": "web.1", "namespace": "shop"},
    "reportingController": "podgate.io/agent",
    "reportingInstance": NODE,
    "regarding": {"kind": "Pod", "name": "web", "namespace": "shop"},
}


def _rejects_event(after: Json, before: Json | None = None, node: str = NODE) -> bool:
    return bool(admission.rejects("podgate-agent-events", after, before, node=node))


def test_agent_writes_and_repeats_its_own_events() -> None:
    assert not _rejects_event(EVENT)
    assert not _rejects_event(_changed(EVENT, "series", {"count": 2}), EVENT)
    about_node = _changed(EVENT, "regarding", {"kind": "Node", "name": NODE})
    assert not _rejects_event(about_node)
    long = "n" * 200
    assert not _rejects_event(_changed(EVENT, "reportingInstance", long[:128]), node=long)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("reportingController", "kubelet"),
        ("reportingController", None),
        ("reportingInstance", OTHER_NODE),
        ("reportingInstance", None),
        ("regarding", {"kind": "Node", "name": OTHER_NODE}),
        ("regarding", {"kind": "Secret", "name": "a"}),
        ("regarding", None),
    ],
)
def test_agent_writes_no_event_of_others(path: str, value: Any) -> None:
    foreign = _changed(EVENT, path, value)
    assert _rejects_event(foreign)
    if path != "regarding":
        # Neither is one of theirs made the agent's.
        assert _rejects_event(EVENT, foreign)


def test_agent_writes_no_finalizer_of_its_report() -> None:
    def rejects(after: Json, before: Json | None) -> list[str]:
        return admission.rejects("podgate-agent-node-report", after, before, node=NODE)

    report = {"metadata": {"name": NODE}}
    kept = _changed(report, "metadata/finalizers", ["example.com/forever"])
    assert rejects(report, None) == []
    assert rejects(report, report) == []
    assert rejects(kept, kept) == []
    for before in (None, report):
        assert rejects(kept, before) == [
            "the podgate agent may not write finalizers of node reports"
        ]


def _labelled(kind: str, labels: dict[str, str]) -> Json:
    metadata = {"name": "a", "labels": labels}
    match kind:
        case "Deployment":
            return {
                "metadata": {"name": "a"},
                "spec": {"template": {"metadata": {"labels": labels}}},
            }
        case "CronJob":
            template = {"spec": {"template": {"metadata": {"labels": labels}}}}
            return {"metadata": {"name": "a"}, "spec": {"jobTemplate": template}}
        case "Namespace":
            return {"metadata": metadata}
        case _:
            return {"metadata": metadata, "spec": {}}


KINDS = ["Namespace", "Node", "Pod", "Deployment", "CronJob"]
ACCEPTED = {
    "podgate.io/mode": ["off", "audit", "enforce", "strict"],
    "podgate.io/max-mode": ["off", "audit", "enforce", "strict"],
    "podgate.io/inject": ["isolation", "probes", "policies", "all", "everything"],
    "podgate.io/mode-override": ["allowed"],
}


def _rejects_labels(after: Json, before: Json | None = None) -> list[str]:
    return admission.rejects("podgate-labels", after, before, user="admin")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", ACCEPTED)
def test_value_of_a_label_that_has_no_effect_is_rejected(kind: str, label: str) -> None:
    for value in ACCEPTED[label]:
        assert _rejects_labels(_labelled(kind, {label: value})) == []
    for value in ("enfroce", "Enforce", "", "true", "enforced"):
        bad = _labelled(kind, {label: value})
        good = _labelled(kind, {label: ACCEPTED[label][0]})
        assert len(_rejects_labels(bad)) == 1
        assert len(_rejects_labels(bad, good)) == 1
        assert len(_rejects_labels(bad, _labelled(kind, {}))) == 1
        # Someone else changes the object, such as the kubelet its node.
        assert _rejects_labels(bad, bad) == []
        assert _rejects_labels(good, bad) == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_labels_and_none_are_admitted(kind: str) -> None:
    assert _rejects_labels(_labelled(kind, {"podgate.io/other": "x", "mode": "x"})) == []
    assert _rejects_labels(_labelled(kind, {}), _labelled(kind, {"podgate.io/mode": "x"})) == []
    assert _rejects_labels({"metadata": {"name": "a"}}) == []


def test_pod_that_a_controller_makes_is_made() -> None:
    pod = _labelled("Pod", {"podgate.io/mode": "enfroce"})
    owned = _changed(pod, "metadata/ownerReferences", [{"kind": "ReplicaSet", "name": "a"}])
    assert _rejects_labels(owned) == []


def _rejects_probe_spec(text: str) -> list[str]:
    return admission.rejects(
        "podgate-probe-spec-form", {"metadata": {"annotations": {"podgate.io/probe-spec": text}}}
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"apiVersion": "podgate.io/v2", "containers": []}',
        '\n {"containers": [], "apiVersion":\n"podgate.io/v2"}\n',
        # As PHP writes JSON.
        '{"apiVersion":"podgate.io\\/v2","containers":[]}',
    ],
)
def test_probe_spec_that_may_be_valid_is_admitted(text: str) -> None:
    assert probespec.API_VERSION == "podgate.io/v2"
    assert json.loads(text)["apiVersion"] == probespec.API_VERSION
    assert _rejects_probe_spec(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("readiness: podgate.io/v2", "is no JSON object"),
        ('["podgate.io/v2"]', "is no JSON object"),
        ('{"apiVersion": "podgate.io/v9"}', "apiVersion is not podgate.io/v2"),
    ],
)
def test_probe_spec_of_another_form_or_version_is_rejected(text: str, message: str) -> None:
    (found,) = _rejects_probe_spec(text)
    assert found.endswith(message)


def test_pod_without_a_probe_spec_is_admitted() -> None:
    assert admission.rejects("podgate-probe-spec-form", {"metadata": {}}) == []


def _with_probe_spec(text: str | None) -> Json:
    return {"metadata": {"annotations": {} if text is None else {"podgate.io/probe-spec": text}}}


@pytest.mark.parametrize("after", ["{}", None])
def test_probe_spec_does_not_change_with_a_pods_status(after: str | None) -> None:
    before = _with_probe_spec('{"apiVersion": "podgate.io/v2"}')
    assert admission.rejects("podgate-probe-spec-frozen", _with_probe_spec(after), before)
    assert admission.rejects("podgate-probe-spec-frozen", before, before) == []


def test_form_of_a_probe_spec_is_checked_when_it_changes() -> None:
    valid = _with_probe_spec('{"apiVersion": "podgate.io/v2"}')
    invalid = _with_probe_spec("none")
    name = "podgate-probe-spec-form"
    assert admission.rejects(name, invalid, valid)
    assert admission.rejects(name, invalid, _with_probe_spec(None))
    assert admission.rejects(name, invalid, invalid) == []
    assert admission.rejects(name, _with_probe_spec(None), invalid) == []


def test_policies_with_parameters_match_only_podgates_own_pods() -> None:
    """Without its parameters, such as a DaemonSet that was deleted, a policy denies all that it
    matches, before its conditions (CollectParams in apiserver's validating dispatcher)."""
    found = [
        one["spec"]["matchConstraints"]
        for one in rendering.objects({"verify": {"enabled": True}})
        if one["kind"] == "ValidatingAdmissionPolicy" and "paramKind" in one["spec"]
    ]
    assert [one["objectSelector"]["matchLabels"] for one in found] == [
        {"app.kubernetes.io/name": "podgate-verify"}
    ]
    assert [rule["operations"] for one in found for rule in one["resourceRules"]] == [["CREATE"]]
