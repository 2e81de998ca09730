"""Answers to AdmissionReviews (admission.k8s.io/v1) of new pods."""

import base64
from typing import Any, Final

import msgspec

from agent import labels
from agent.controller import injection
from agent.errors import PodgateError
from agent.kube import responses
from agent.kube.objects import ReadinessGate
from probes.spec import probespec
from probes.spec.specs import parse_pod

PROBE_SPEC_PATH: Final = "/validate/probe-spec"
INJECT_PATHS: Final = {
    gate: f"/inject/{gate.removeprefix(f'{labels.DOMAIN}/')}" for gate in injection.VALUES
}


class ReviewError(PodgateError):
    """A request that is no AdmissionReview."""


class ReviewRequest(msgspec.Struct):
    """The part of an AdmissionRequest that is read; `object` is a v1.Pod."""

    uid: str
    object: Any = None


class Review(msgspec.Struct):
    """An AdmissionReview as the API server sends it."""

    request: ReviewRequest


class _Spec(msgspec.Struct, rename="camel"):
    readiness_gates: list[ReadinessGate] | None = None


class _Pod(msgspec.Struct):
    spec: _Spec


def read(content: bytes) -> ReviewRequest:
    """Raises `ReviewError`."""
    try:
        return responses.decode(content, Review).request
    except msgspec.DecodeError as error:
        raise ReviewError(f"this is no AdmissionReview ({error})") from error


def inject(request: ReviewRequest, gate: str) -> injection.Json:
    """Add a readiness gate to the pod, unless it has it. Raises `ReviewError`."""
    try:
        pod = msgspec.convert(request.object, _Pod)
    except msgspec.ValidationError as error:
        raise ReviewError(f"the review's object is no pod ({error})") from error
    gates = [one.condition_type for one in pod.spec.readiness_gates or ()]
    response: injection.Json = {"uid": request.uid, "allowed": True}
    if patch := injection.patch(gates, gate):
        encoded = base64.b64encode(msgspec.json.encode(patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    return _answered(response)


def validate_probe_spec(request: ReviewRequest) -> injection.Json:
    """Reject a pod whose annotation `podgate.io/probe-spec` the agent would not use.

    The agent reads it with the same code (`probes/spec/specs.py`).
    """
    errors = [
        error for error in parse_pod(request.object).errors if probespec.is_annotation_error(error)
    ]
    if not errors:
        return _answered({"uid": request.uid, "allowed": True})
    status = {
        "code": 422,
        "reason": "Invalid",
        "message": " ".join(error.message for error in errors),
        "details": {
            "causes": [
                {"reason": error.reason, "message": error.message, "field": error.path}
                for error in errors
            ]
        },
    }
    return _answered({"uid": request.uid, "allowed": False, "status": status})


def _answered(response: injection.Json) -> injection.Json:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
