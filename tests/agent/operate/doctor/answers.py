"""What a real API server answers to reviews of rights; tests/cluster/test_doctor.py records it."""

import json
import pathlib
from typing import Any

Json = dict[str, Any]

FILE = pathlib.Path(__file__).parent / "recorded" / "reviews.json"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def requests() -> dict[str, Json]:
    """One review that is allowed, and one that is not."""
    return {
        "allowed": _request("", "pods", "status", "patch"),
        "denied": _request("", "secrets", "", "list"),
    }


def recorded() -> dict[str, Json]:
    found: dict[str, Json] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def review(attributes: Json, *, is_allowed: bool) -> Json:
    """The recorded answer, to a review of these attributes."""
    answer = recorded()["allowed" if is_allowed else "denied"]
    return {**answer, "spec": {"resourceAttributes": attributes}}


def constant(answer: Json) -> Json:
    """Without what differs from run to run."""
    answer.get("metadata", {}).pop("managedFields", None)
    return answer


def _request(group: str, resource: str, subresource: str, verb: str) -> Json:
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "group": group,
                "resource": resource,
                "subresource": subresource,
                "verb": verb,
            }
        },
    }
