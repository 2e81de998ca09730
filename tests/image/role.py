"""What the ClusterRole grants, and what a request needs (apiserver's RequestInfo, in small)."""

from collections.abc import Iterable

from tests.agent.kube.apiserver import RecordedRequest
from tests.image import manifests

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""

_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def granted() -> set[Right]:
    return {
        (group, resource, verb)
        for rule in manifests.of_kind("ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(asked: Iterable[RecordedRequest]) -> set[Right]:
    return {_right(one) for one in asked}


def _right(asked: RecordedRequest) -> Right:
    kind, *parts = asked.path.strip("/").split("/")
    group = "" if kind == "api" else parts.pop(0)
    del parts[0]  # the version
    if parts[0] == "namespaces" and len(parts) > 2:
        del parts[:2]
    resource, *rest = parts
    name, *subresource = rest or [""]
    verb = _VERBS.get(asked.method) or ("watch" if asked.is_watch else "get" if name else "list")
    return group, "/".join((resource, *subresource)), verb
