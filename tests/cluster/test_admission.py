"""podgate's admission objects on a real API server: what it changes, warns of and rejects.

Each answer is compared with the recorded one. PODGATE_TEST_RECORD=1 records them again.
"""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from agent.controller import webhook_certificate
from tests import polling
from tests.agent.controller import admission_cases as cases
from tests.agent.controller.admission_cases import Case
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api import MERGE, Json
from tests.cluster.api_only import CONTROLLER_ADDRESS, Answer, ApiOnly
from tests.image import manifests

pytestmark = pytest.mark.kernel
_APPLIED = {
    *("Namespace", "CustomResourceDefinition", "ServiceAccount", "Service"),
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    *("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"),
}
_WITHOUT_POLICIES = (
    "--runtime-config=admissionregistration.k8s.io/v1/mutatingadmissionpolicies=false,"
    "admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings=false",
    "--disable-admission-plugins=MutatingAdmissionPolicy",
)
_STRATEGIC = "application/strategic-merge-patch+json"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_NAMESPACES = "/api/v1/namespaces"


@pytest.fixture(scope="module", params=["policies", "webhook"])
def server(
    isolated: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiOnly]:
    """An API server with and without MutatingAdmissionPolicies, and podgate's controller. The
    second has a client certificate for webhooks."""
    flags = () if request.param == "policies" else _WITHOUT_POLICIES
    directory = tmp_path_factory.mktemp(request.param)
    has_certificate = request.param == "webhook"
    with api_only.running(
        conftest.binaries(), directory, *flags, has_client_certificate=has_certificate
    ) as made:
        # Before the guard that rejects the last label.
        for inject in ("", "isolation", "probes", "all", "nothing"):
            _make_namespace(made, inject)
        _leave_previous_objects(made)
        _apply(made, request.param)
        made.install_certificate()
        with made.controller() as controller:
            controller.wait_until_ready()
            _wait_until_applied(made, request.param)
            yield made


def _leave_previous_objects(server: ApiOnly) -> None:
    """Webhooks that a controller of a previous version wrote."""
    for path in webhook_certificate.OBSOLETE:
        kind, _, name = path.partition("/")
        if "webhook" in kind:
            server.api.create(f"{_ADMISSION}/{kind}", {"metadata": {"name": name}})


def _apply(server: ApiOnly, way: str) -> None:
    """The manifests, without what needs nodes. way: of injection."""
    things = manifests.applied()
    if way == "policies":
        things = [one for one in things if one["kind"] != "MutatingWebhookConfiguration"]
        for thing in manifests.read("optional/injection.yaml"):
            server.api.create(deployment.PATHS[thing["kind"]], thing)
    for thing in things:
        if thing["kind"] not in _APPLIED:
            continue
        if thing["kind"] == "Service":
            thing["spec"]["clusterIP"] = CONTROLLER_ADDRESS
        server.api.create(deployment.PATHS[thing["kind"]], thing)
    # The API server connects to endpoints, which a controller manager would write.
    server.api.create(
        f"/apis/discovery.k8s.io/v1/namespaces/{deployment.NAMESPACE}/endpointslices",
        {
            "metadata": {
                "name": "podgate-controller",
                "labels": {"kubernetes.io/service-name": "podgate-controller"},
            },
            "addressType": "IPv4",
            "ports": [{"name": "webhook", "port": 9443}],
            "endpoints": [{"addresses": [CONTROLLER_ADDRESS], "conditions": {"ready": True}}],
        },
    )
    for name in (cases.NODE, cases.OTHER_NODE):
        server.api.create("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name}})
    _make_account(server, deployment.NAMESPACE)


def _make_namespace(server: ApiOnly, inject: str) -> None:
    labels = {"podgate.io/inject": inject} if inject else {}
    metadata = {"name": _namespace(inject), "labels": labels}
    server.api.create(_NAMESPACES, {"kind": "Namespace", "metadata": metadata})
    _make_account(server, metadata["name"])


def _make_account(server: ApiOnly, namespace: Any) -> None:
    body = {"kind": "ServiceAccount", "metadata": {"name": "default"}}
    server.api.create(f"{_NAMESPACES}/{namespace}/serviceaccounts", body)


def _namespace(inject: str) -> str:
    return f"test-{inject or 'plain'}"


def _wait_until_applied(server: ApiOnly, way: str) -> None:
    """The API server evaluates a new object some hundred milliseconds after it has stored it."""

    def is_injecting() -> bool:
        gates = _gates(_create(server, cases.INJECTED[0]))
        return len(gates) == 2

    def is_validating() -> bool:
        return _create(server, cases.MISSPELT).code >= 400

    polling.wait_until(f"gates are injected by {way}", is_injecting)
    polling.wait_until("probe specs are validated", is_validating)
    polling.wait_until("hosts are warned of", lambda: _create(server, cases.HOSTS[0]).warnings)


def _create(server: ApiOnly, case: Case) -> Answer:
    """Create the case's object, without storing it."""
    group = "/api/v1" if case.kind == "Pod" else "/apis/apps/v1"
    path = f"{group}/namespaces/{_namespace(case.inject)}/{case.kind.lower()}s?dryRun=All"
    return server.send("POST", path, case.body)


def _gates(answer: Answer) -> list[str]:
    gates = answer.body.get("spec", {}).get("readinessGates", [])
    return [one["conditionType"] for one in gates]


def _check(group: str, name: str, found: Json) -> None:
    """Compare an answer with the recorded one, or record it."""
    if not os.environ.get("PODGATE_TEST_RECORD"):
        assert found == cases.recorded()[group][name]
        return
    known = cases.recorded() if cases.RECORDED.exists() else {}
    known.setdefault(group, {})[name] = found
    text = json.dumps(known, indent=1, sort_keys=True) + "\n"
    cases.RECORDED.write_text(text, encoding="utf-8")


def _message(answer: Answer) -> Json:
    return {"message": answer.message}


def _rejection(answer: Answer) -> Json:
    return {"code": answer.code, "message": answer.message}


@pytest.mark.parametrize("case", cases.INJECTED, ids=lambda case: case.name)
def test_gates_are_added_to_the_same_pods_either_way(server: ApiOnly, case: Case) -> None:
    answer = _create(server, case)
    assert answer.code == 201, answer.message
    gates = _gates(answer)
    # Two admission policies are applied in any order (1.36, calculatePolicyData in
    # apiserver/pkg/admission/plugin/policy/generic/policy_source.go iterates a map).
    known = cases.recorded()["injected"].get(case.name, {}).get("gates", [])
    _check("injected", case.name, {"gates": known if sorted(gates) == sorted(known) else gates})


def test_nothing_else_of_a_pod_is_changed(server: ApiOnly) -> None:
    body = cases.INJECTED[0].body
    # Its volume has another name in each pod.
    body["spec"] = body["spec"] | {"automountServiceAccountToken": False}
    path = "{}/{}/pods?dryRun=All"
    plain = server.send("POST", path.format(_NAMESPACES, _namespace("")), body).body["spec"]
    injected = server.send("POST", path.format(_NAMESPACES, _namespace("all")), body).body["spec"]
    assert injected.pop("readinessGates")
    assert injected == plain


def test_pods_of_podgate_s_own_namespace_are_left_out(server: ApiOnly) -> None:
    path = f"{_NAMESPACES}/{deployment.NAMESPACE}"
    server.api.patch(path, {"metadata": {"labels": {"podgate.io/inject": "all"}}})
    answer = server.send("POST", f"{path}/pods?dryRun=All", cases.INJECTED[0].body)
    assert (answer.code, _gates(answer)) == (201, [])


@pytest.mark.parametrize("case", cases.PROBE_SPECS, ids=lambda case: case.name)
def test_probe_spec_is_validated_when_a_pod_is_created(server: ApiOnly, case: Case) -> None:
    _check("probe specs", case.name, _rejection(_create(server, case)))


@pytest.mark.parametrize("case", cases.HOSTS, ids=lambda case: case.name)
def test_host_of_a_probe_or_hook_is_warned_of(server: ApiOnly, case: Case) -> None:
    answer = _create(server, case)
    _check("host warnings", case.name, {"code": answer.code, "warnings": list(answer.warnings)})


def test_host_of_a_probe_or_hook_is_denied_by_the_optional_binding(server: ApiOnly) -> None:
    (binding,) = manifests.read("optional/deny-probe-hosts.yaml")
    path = f"{_ADMISSION}/validatingadmissionpolicybindings"
    server.api.create(path, binding)
    try:
        polling.wait_until("it is denied", lambda: _create(server, cases.HOSTS[0]).code >= 400)
        for case in cases.HOSTS:
            _check("host denials", case.name, _rejection(_create(server, case)))
    finally:
        server.api.delete(f"{path}/{binding['metadata']['name']}")


@pytest.fixture
def pods(server: ApiOnly) -> Iterator[dict[str, Json]]:
    """An agent's pod, a pod of its node and one of another, by name."""
    made = {
        "agent": _make_pod(server, deployment.NAMESPACE, "agent", cases.NODE, "podgate"),
        "own": _make_pod(server, _namespace(""), "own", cases.NODE),
        "foreign": _make_pod(server, _namespace(""), "foreign", cases.OTHER_NODE),
    }
    yield made
    for pod in made.values():
        server.api.delete(_path(pod), gracePeriodSeconds="0")


def _make_pod(
    server: ApiOnly, namespace: str, name: str, node: str, account: str = "default"
) -> Json:
    spec = _spec_of_a_pod() | {"nodeName": node, "serviceAccountName": account}
    metadata = {"name": name, "annotations": {"podgate.io/probe-spec": _usable()}}
    return server.api.create(
        f"{_NAMESPACES}/{namespace}/pods", {"kind": "Pod", "metadata": metadata, "spec": spec}
    )


def _spec_of_a_pod() -> Json:
    return cases.PROBE_SPECS[0].spec


def _usable() -> str:
    return str(cases.PROBE_SPECS[0].annotations["podgate.io/probe-spec"])


def _path(pod: Json) -> str:
    metadata = pod["metadata"]
    return f"{_NAMESPACES}/{metadata['namespace']}/pods/{metadata['name']}"


_OWN_CONDITION = {"type": "podgate.io/isolation-ready", "status": "True", "reason": "Enforced"}
_STATUS_PATCHES: dict[str, tuple[str, Json]] = {
    "own condition": ("own", {"status": {"conditions": [_OWN_CONDITION]}}),
    "pod of another node": ("foreign", {"status": {"conditions": [_OWN_CONDITION]}}),
    "condition of the kubelet": (
        "own",
        {"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
    ),
    "pod address": ("own", {"status": {"podIP": "198.18.1.1", "podIPs": [{"ip": "198.18.1.1"}]}}),
    "phase": ("own", {"status": {"phase": "Failed"}}),
    "label": ("own", {"metadata": {"labels": {"app": "database"}}}),
    "annotation": ("own", {"metadata": {"annotations": {"podgate.io/relay": "off"}}}),
    "probe spec": ("own", {"metadata": {"annotations": {"podgate.io/probe-spec": "{}"}}}),
}


@pytest.mark.parametrize("name", _STATUS_PATCHES)
def test_agent_s_token_writes_its_own_conditions_of_its_own_pods_only(
    server: ApiOnly, pods: dict[str, Json], name: str
) -> None:
    target, body = _STATUS_PATCHES[name]
    token = server.token("podgate", pod=pods["agent"])
    path = f"{_path(pods[target])}/status"
    found = _rejection(server.send("PATCH", path, body, content_type=_STRATEGIC, token=token))
    # Two policies reject this one, and the server names either.
    if name == "probe spec" and found["code"] != HTTPStatus.FORBIDDEN:
        _check_frozen(found)
    else:
        _check("agent", name, found)


def _is_rejected_by_a_guard(answer: Answer) -> bool:
    """And not by a right that the account lacks."""
    is_guarded = "denied request: the podgate agent" in answer.message
    return answer.code == HTTPStatus.FORBIDDEN and is_guarded


def test_agent_s_token_replaces_no_condition_by_another_one_twice(
    server: ApiOnly, pods: dict[str, Json]
) -> None:
    """As many as before, and each was there: but the gate of another controller is gone."""
    path = f"{_path(pods['own'])}/status"
    foreign = [{"type": one, "status": "True"} for one in ("Ready", "example.com/gate", "Other")]
    server.send("PATCH", path, {"status": {"conditions": foreign}}, content_type=_STRATEGIC)
    before = server.api.get(_path(pods["own"]))["status"]["conditions"]
    others = [one for one in before if one["type"] != "example.com/gate"]
    assert len(others) == len(before) - 1
    changed = {"status": {"conditions": [*others, others[0]]}}
    token = server.token("podgate", pod=pods["agent"])
    answer = server.send("PATCH", path, changed, content_type=MERGE, token=token)
    assert _is_rejected_by_a_guard(answer), answer
    assert server.api.get(_path(pods["own"]))["status"]["conditions"] == before


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"observedGeneration": 3}},
        {"status": {"resources": {"limits": {"cpu": "1"}}}},
        {"status": {"allocatedResources": {"cpu": "1"}}},
        {"metadata": {"generateName": "own-"}},
    ],
    ids=lambda change: next(iter(next(iter(change.values())))),
)
def test_agent_s_token_writes_no_newer_field_of_a_pod(
    server: ApiOnly, pods: dict[str, Json], change: Json
) -> None:
    path = f"{_path(pods['own'])}/status"
    token = server.token("podgate", pod=pods["agent"])
    answer = server.send("PATCH", path, change, content_type=MERGE, token=token)
    assert _is_rejected_by_a_guard(answer), answer


def test_agent_s_token_writes_events_of_its_node_only(
    server: ApiOnly, pods: dict[str, Json]
) -> None:
    path = f"/apis/events.k8s.io/v1/namespaces/{pods['own']['metadata']['namespace']}/events"
    token = server.token("podgate", pod=pods["agent"])
    own = _event("own", "podgate.io/agent", pods["own"])
    kubelet = _event("of-the-kubelet", "kubelet", pods["foreign"])
    try:
        assert server.send("POST", path, own, token=token).code == HTTPStatus.CREATED
        rejected = server.send("POST", path, kubelet, token=token)
        assert _is_rejected_by_a_guard(rejected), rejected
        server.api.create(path, kubelet)
        changed = {"series": {"count": 2, "lastObservedTime": "2026-11-21T08:00:01.000000Z"}}
        file = f"{path}/of-the-kubelet"
        rejected = server.send("PATCH", file, changed, content_type=MERGE, token=token)
        assert _is_rejected_by_a_guard(rejected), rejected
    finally:
        for event in (own, kubelet):
            server.send("DELETE", f"{path}/{event['metadata']['name']}", {})


def _event(name: str, controller: str, pod: Json) -> Json:
    metadata = pod["metadata"]
    return {
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "eventTime": "2026-11-21T08:00:00.000000Z",
        "reportingController": controller,
        "reportingInstance": cases.NODE,
        "action": "Probing",
        "reason": "ProbeFailing",
        "type": "Warning",
        "note": "It fails.",
        "regarding": {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
        },
    }


def test_agent_s_token_writes_no_finalizer_of_its_report(
    server: ApiOnly, pods: dict[str, Json]
) -> None:
    """It would block the removal of the definition of reports."""
    metadata = {"name": cases.NODE, "finalizers": ["example.com/forever"]}
    answer = server.send(
        "PATCH",
        f"/apis/podgate.io/v1alpha1/nodereports/{cases.NODE}?fieldManager=podgate-agent&force=true",
        {"apiVersion": "podgate.io/v1alpha1", "kind": "NodeReport", "metadata": metadata},
        content_type="application/apply-patch+yaml",
        token=server.token("podgate", pod=pods["agent"]),
    )
    assert _is_rejected_by_a_guard(answer), answer


@pytest.mark.parametrize("name", [cases.NODE, cases.OTHER_NODE])
def test_agent_s_token_writes_the_report_of_its_node_only(
    server: ApiOnly, pods: dict[str, Json], name: str
) -> None:
    body = {
        "apiVersion": "podgate.io/v1alpha1",
        "kind": "NodeReport",
        "metadata": {"name": name},
        "status": {"agentVersion": "0.1.0"},
    }
    answer = server.send(
        "PATCH",
        f"/apis/podgate.io/v1alpha1/nodereports/{name}?fieldManager=podgate-agent&force=true",
        body,
        content_type="application/apply-patch+yaml",
        token=server.token("podgate", pod=pods["agent"]),
    )
    _check("agent", f"report of {name}", {"is_stored": answer.code < 300} | _message(answer))


def test_token_without_a_node_writes_nothing(server: ApiOnly, pods: dict[str, Json]) -> None:
    """As one that was requested outside of a pod."""
    body = {"status": {"conditions": [_OWN_CONDITION]}}
    path = f"{_path(pods['own'])}/status"
    token = server.token("podgate")
    answer = server.send("PATCH", path, body, content_type=_STRATEGIC, token=token)
    _check("agent", "token without a node", _rejection(answer))


def test_probe_spec_changes_with_the_pod_and_not_with_its_status(
    server: ApiOnly, pods: dict[str, Json]
) -> None:
    path = _path(pods["own"])

    def change(to: str, text: str | None) -> Json:
        body = {"metadata": {"annotations": {"podgate.io/probe-spec": text}}}
        return _rejection(server.send("PATCH", to, body, content_type=MERGE))

    _check_frozen(change(f"{path}/status", None))
    invalid = change(path, '{"apiVersion": "podgate.io/v2", "containers": [{}]}')
    assert invalid["code"] == HTTPStatus.UNPROCESSABLE_ENTITY
    assert change(path, None)["code"] == HTTPStatus.OK
    assert change(path, _usable())["code"] == HTTPStatus.OK


def _check_frozen(found: Json) -> None:
    assert found["code"] == HTTPStatus.UNPROCESSABLE_ENTITY
    assert "may not change with a pod's status" in found["message"]


def test_api_server_trusts_the_webhooks_and_previous_ones_are_gone(server: ApiOnly) -> None:
    path = f"{_ADMISSION}/validatingwebhookconfigurations/podgate-webhook-probe-spec"
    found = server.api.get(path)
    assert found["webhooks"][0]["clientConfig"]["caBundle"]
    for path in webhook_certificate.OBSOLETE:
        assert server.api.find(f"{_ADMISSION}/{path}") is None


@pytest.mark.parametrize("options", [(), ("--server-side", "--force-conflicts")])
def test_bundle_outlives_the_next_apply(
    server: ApiOnly, options: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    path = f"{_ADMISSION}/validatingwebhookconfigurations/podgate-webhook-probe-spec"
    before = server.api.get(path)["webhooks"]
    (thing,) = (
        one for one in manifests.read("webhooks.yaml") if one["kind"].startswith("Validating")
    )
    file = tmp_path / "webhooks.json"
    kubeconfig = server.control_plane.kubeconfig("admin")
    for seconds in (3, 5):
        thing["webhooks"][0]["timeoutSeconds"] = seconds
        file.write_text(json.dumps(thing), encoding="utf-8")
        command = ["kubectl", f"--kubeconfig={kubeconfig}", "apply", *options, f"--filename={file}"]
        subprocess.run(command, check=True, timeout=60)
    after = server.api.get(path)["webhooks"]
    assert after[0].pop("timeoutSeconds") == 5
    before[0].pop("timeoutSeconds")
    assert after == before
    assert after[0]["clientConfig"]["caBundle"]


def test_job_has_no_rights_any_more(server: ApiOnly) -> None:
    for path in webhook_certificate.own_bindings(deployment.NAMESPACE):
        assert server.api.find(path) is None
    path = f"{_ADMISSION}/validatingwebhookconfigurations/podgate-webhook-probe-spec"
    answer = server.send(
        "PATCH",
        path,
        {"webhooks": []},
        content_type=MERGE,
        token=server.token(webhook_certificate.NAME),
    )
    assert answer.code == HTTPStatus.FORBIDDEN


_OF_THE_CLUSTER = (
    "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies",
    f"/api/v1/namespaces/{deployment.NAMESPACE}/secrets",
    f"/api/v1/namespaces/{deployment.NAMESPACE}/pods",
)
_EARLIER_NAMES = tuple(path.partition("/")[2] for path in webhook_certificate.OBSOLETE)


def test_controller_s_token_writes_no_admission_objects_secrets_and_roles(server: ApiOnly) -> None:
    """The content of webhooks and policies is free: they are worth the cluster."""
    token = server.token("podgate-controller")
    for path in _OF_THE_CLUSTER:
        for name in ("podgate-webhook-inject", *_EARLIER_NAMES):
            body = {"metadata": {"name": name}}
            answers = [
                server.send("POST", path, body, token=token),
                server.send("PATCH", f"{path}/{name}", body, content_type=MERGE, token=token),
                server.send("DELETE", f"{path}/{name}", {}, token=token),
            ]
            assert {answer.code for answer in answers} == {HTTPStatus.FORBIDDEN}, path
