"""Checks of the API server by the agent's own account: its rights, the definitions, the clock."""

import asyncio
import dataclasses
import datetime
import json
from collections.abc import Iterator
from typing import Any

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.kube import node_report
from agent.kube.client import ApiClient, ApiError
from agent.operate.doctor.results import Passed, Result
from agent.policy import definition

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# Times in conditions and events have whole seconds, and so has the response's; of less than this
# only their order is wrong, at most.
_CLOCK_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Right:
    """What the agent may do, as deploy/manifests/rbac.yaml grants it; a test compares them.

    effect: what is missing without it; is_needed: whether pods are not protected then.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    effect: str
    is_needed: bool = False


_WATCH = ("list", "watch")
_API_CALLEES = "the API server is not admitted to webhooks of enforced namespaces"
_CLIENTS = "clients that read metrics with a token are rejected"
RIGHTS = (
    Right("", "pods", _WATCH, "labels and probes of pods are unknown", is_needed=True),
    Right("", "namespaces", _WATCH, "mode labels of namespaces have no effect", is_needed=True),
    Right("", "nodes", _WATCH, "mode labels of nodes have no effect", is_needed=True),
    Right(
        labels.POLICY_GROUP,
        labels.POLICY_PLURAL,
        _WATCH,
        "HostAccessPolicies have no effect",
        is_needed=True,
    ),
    Right(labels.POLICY_GROUP, labels.EGRESS_PLURAL, _WATCH, "HostEgressPolicies have no effect"),
    Right(
        "", "pods/status", ("patch",), "pods with readiness gates do not get Ready", is_needed=True
    ),
    Right("podgate.io", "nodereports", ("create", "patch"), "policies have no status"),
    Right("discovery.k8s.io", "endpointslices", _WATCH, _API_CALLEES),
    Right("", "services", _WATCH, _API_CALLEES),
    Right("admissionregistration.k8s.io", "mutatingwebhookconfigurations", _WATCH, _API_CALLEES),
    Right("admissionregistration.k8s.io", "validatingwebhookconfigurations", _WATCH, _API_CALLEES),
    Right("apiextensions.k8s.io", "customresourcedefinitions", _WATCH, _API_CALLEES),
    Right("apiregistration.k8s.io", "apiservices", _WATCH, _API_CALLEES),
    Right("events.k8s.io", "events", ("create", "patch"), "pods get no Events"),
    Right("authentication.k8s.io", "tokenreviews", ("create",), _CLIENTS),
    Right("authorization.k8s.io", "subjectaccessreviews", ("create",), _CLIENTS),
)


async def check(api: ApiClient) -> list[Result]:
    """Of an agent in a cluster."""
    try:
        await api.request("GET", "/version")
    except ApiError as error:
        return [found(kinds.API_SERVER_UNREACHABLE, f"The API server does not answer: {error}")]
    return [
        Passed("api-server", "The API server answers."),
        *await _rights(api),
        *await _definitions(api),
        await _clock(api),
    ]


async def _rights(api: ApiClient) -> list[Result]:
    reviews = [(right, verb) for right in RIGHTS for verb in right.verbs]
    try:
        answers = await asyncio.gather(*(_is_allowed(api, right, verb) for right, verb in reviews))
    except ApiError as error:
        text = f"The account's rights cannot be reviewed: {error}"
        return [found(kinds.RIGHT_MISSING_FEATURE, text, remedy="Retry.")]
    denied: dict[Right, list[str]] = {}
    for (right, verb), is_allowed in zip(reviews, answers, strict=True):
        if not is_allowed:
            denied.setdefault(right, []).append(verb)
    if not denied:
        return [
            Passed("rights", f"The account has all {len(reviews)} rights that the agent needs.")
        ]
    return [_denied(right, verbs) for right, verbs in denied.items()]


async def _is_allowed(api: ApiClient, right: Right, verb: str) -> bool:
    """By a SelfSubjectAccessReview, which every account may create (system:basic-user)."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = json.loads(await api.request("POST", _REVIEWS, body=body))
    return bool(answer["status"].get("allowed"))


def _denied(right: Right, verbs: list[str]) -> Result:
    name = f"{right.resource}.{right.group}".rstrip(".")
    text = f"The account may not {' and '.join(verbs)} {name}: {right.effect}"
    return found(kinds.RIGHT_MISSING if right.is_needed else kinds.RIGHT_MISSING_FEATURE, text)


async def _definitions(api: ApiClient) -> list[Result]:
    group, version = node_report.API_VERSION.split("/")
    try:
        policies = await _definition(api, f"{labels.POLICY_PLURAL}.{labels.POLICY_GROUP}")
        reports = await _definition(api, f"nodereports.{group}")
    except ApiError as error:
        return [found(kinds.DEFINITION_OTHER, f"Definitions cannot be read: {error}")]
    wrong: list[Result] = [
        *_compare("HostAccessPolicies", policies, labels.POLICY_VERSION, definition.schema()),
        *_compare("NodeReports", reports, version, None),
    ]
    return wrong or [Passed("definitions", "HostAccessPolicies and NodeReports are defined.")]


async def _definition(api: ApiClient, name: str) -> dict[str, Any] | None:
    """By a list, the only read of them that the agent has a right to."""
    query = {"fieldSelector": f"metadata.name={name}"}
    items = json.loads(await api.request("GET", _DEFINITIONS, query=query))["items"]
    return items[0] if items else None


def _compare(
    kind: str, defined: dict[str, Any] | None, version: str, schema: dict[str, Any] | None
) -> Iterator[Result]:
    """schema: this version's; None where it does not matter to the agent."""
    if defined is None:
        yield found(kinds.DEFINITION_MISSING, f"{kind} are not defined in this cluster")
        return
    served = {one["name"]: one for one in defined["spec"]["versions"] if one.get("served")}
    if version not in served:
        text = f"{kind} are defined in version {', '.join(served) or 'none'}, not in {version}"
        yield found(kinds.DEFINITION_MISSING, text)
    elif schema is not None and served[version]["schema"]["openAPIV3Schema"] != schema:
        yield found(
            kinds.DEFINITION_OTHER,
            f"The definition of {kind} is of another version of podgate: the API server may drop "
            "fields that this one knows, or accept others",
        )


async def _clock(api: ApiClient) -> Result:
    try:
        ahead = datetime.datetime.now(datetime.UTC) - await api.date()
    except ApiError as error:
        text = f"The API server's time cannot be read: {error}"
        return found(kinds.CLOCK_WRONG, text, remedy="Retry.")
    return clock(ahead.total_seconds())


def clock(ahead_seconds: float) -> Result:
    """ahead_seconds: this node's time less the API server's."""
    if abs(ahead_seconds) <= _CLOCK_SECONDS:
        return Passed("clock", "This node's time is the API server's.")
    direction = "ahead of" if ahead_seconds > 0 else "behind"
    return found(
        kinds.CLOCK_WRONG,
        f"This node's clock is {abs(ahead_seconds):.0f} s {direction} the API server's: times in "
        "conditions, events and drops are wrong",
    )
