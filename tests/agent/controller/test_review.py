"""Answers to AdmissionReviews: recorded requests, and recorded answers of a real API server."""

import base64
import json
from typing import Any

import pytest

from agent import labels
from agent.controller import review
from agent.controller.review import ReviewError, ReviewRequest
from tests.agent.controller import admission_cases as cases
from tests.agent.controller.admission_cases import Case
from tests.agent.controller.leases import RECORDED

GATES = (labels.ISOLATION_READY, labels.PROBES_PASSING)
_PREFIX = 'admission webhook "probe-spec.podgate.io" denied the request: '


def _recorded_review(name: str) -> bytes:
    return (RECORDED / f"admissionreview-{name}.json").read_bytes()


def _patched(pod: Any, response: Any) -> Any:
    """RFC 6902, as far as it is used."""
    if "patch" not in response:
        return pod
    for change in json.loads(base64.b64decode(response["patch"])):
        assert change["op"] == "add"
        *parents, last = change["path"].strip("/").split("/")
        target = pod
        for name in parents:
            target = target[name]
        if last == "-":
            target.append(change["value"])
        else:
            target[last] = change["value"]
    return pod


@pytest.mark.parametrize("name", ["bare", "d-6ddb588df5"])
def test_gate_is_added_once_and_nothing_else_changes(name: str) -> None:
    request = review.read(_recorded_review(name))
    before = json.loads(json.dumps(request.object))
    for _ in range(2):
        for gate in GATES:
            answer = review.inject(request, gate)
            assert answer["response"]["uid"] == request.uid
            assert answer["response"]["allowed"] is True
            request.object = _patched(request.object, answer["response"])
    # It has all of them.
    assert answer == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": request.uid, "allowed": True},
    }
    gates = request.object["spec"].pop("readinessGates")
    already = before["spec"].pop("readinessGates", [])
    assert gates[: len(already)] == already
    assert {one["conditionType"] for one in gates} >= set(GATES)
    assert len(gates) == len({one["conditionType"] for one in gates})
    assert request.object == before


@pytest.mark.parametrize(
    "case", [one for one in cases.INJECTED if one.name.startswith("has ")], ids=lambda one: one.name
)
def test_webhook_adds_what_the_api_server_recorded(case: Case) -> None:
    pod = case.body
    for gate in GATES:
        answer = review.inject(ReviewRequest("1", pod), gate)["response"]
        pod = _patched(pod, answer)
    found = [one["conditionType"] for one in pod["spec"]["readinessGates"]]
    assert found == cases.recorded()["injected"][case.name]["gates"]


@pytest.mark.parametrize("case", cases.PROBE_SPECS, ids=lambda one: one.name)
def test_probe_spec_is_rejected_with_the_sentence_that_users_read(case: Case) -> None:
    recorded = cases.recorded()["probe specs"][case.name]
    answer = review.validate_probe_spec(ReviewRequest("1", case.body))["response"]
    assert answer["allowed"] is (recorded["code"] == 201)
    if answer["allowed"]:
        return
    # A policy of the chart is evaluated before the webhook, and rejects some in its own words.
    if "podgate-probe-spec-form" not in recorded["message"]:
        assert _PREFIX + answer["status"]["message"] == recorded["message"]
    (cause,) = answer["status"]["details"]["causes"]
    assert cause["field"].startswith("metadata.annotations[podgate.io/probe-spec]")
    message = answer["status"]["message"]
    assert answer == {
        "uid": "1",
        "allowed": False,
        "status": {
            "code": recorded["code"],
            "reason": "Invalid",
            "message": message,
            "details": {"causes": [{**cause, "message": message}]},
        },
    }


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"request": {}}', b"[" * 100_000])
def test_request_that_is_no_review_is_an_error(content: bytes) -> None:
    with pytest.raises(ReviewError):
        review.read(content)


def test_pod_with_null_in_place_of_gates_gets_one() -> None:
    pod = {"spec": {"readinessGates": None}}
    answer = review.inject(ReviewRequest("1", pod), GATES[0])["response"]
    assert _patched(pod, answer)["spec"]["readinessGates"] == [{"conditionType": GATES[0]}]


@pytest.mark.parametrize("pod", [None, {}, [], {"spec": []}, {"spec": {"readinessGates": [1]}}])
def test_object_that_is_no_pod_is_an_error(pod: Any) -> None:
    with pytest.raises(ReviewError):
        review.inject(ReviewRequest("1", pod), GATES[0])
