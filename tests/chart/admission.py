"""Evaluates the chart's ValidatingAdmissionPolicies without an API server, by CEL's C++ library.

It has the optional types and the string functions that Kubernetes' environment has as well
(k8s.io/apiserver, pkg/cel/environment/base.go), and none of the checker's types. tests/cluster
sends the same kinds of requests to a real API server.
"""

import functools
import re
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from tests.chart import rendering

Json = dict[str, Any]

_NODE_NAME = "authentication.kubernetes.io/node-name"
_VARIABLE = re.compile(r"\bvariables\.(\w+)")


@functools.cache
def _policies(domains: tuple[str, ...]) -> dict[str, Json]:
    """The chart's, by name. domains: of conditions of other owners."""
    return {
        one["metadata"]["name"]: one
        for one in rendering.objects({"conditions": {"domains": list(domains)}})
        if one["kind"] == "ValidatingAdmissionPolicy"
    }


def rejects(
    name: str,
    thing: Json,
    old: Json | None = None,
    *,
    user: str = "system:serviceaccount:podgate:podgate",
    node: str | None = None,
    domains: tuple[str, ...] = (),
) -> list[str]:
    """The messages with which the policy rejects a request; none if it admits it.

    old: the object before, None when it is created; node: of the user's token; domains:
    the chart's conditions.domains.
    """
    spec = _policies(domains)[name]["spec"]
    extra = {_NODE_NAME: [node]} if node else {}
    request = {"userInfo": {"username": user, "extra": extra}}
    data = {"object": thing, "oldObject": old, "request": request}
    if not all(_evaluate(one["expression"], {}, data) for one in spec.get("matchConditions", ())):
        return []
    variables = {one["name"]: one["expression"] for one in spec.get("variables", ())}
    return [
        one["message"] if "message" in one else _evaluate(one["messageExpression"], variables, data)
        for one in spec["validations"]
        if not _evaluate(one["expression"], variables, data)
    ]


def _evaluate(expression: str, variables: dict[str, str], data: Json) -> Any:
    while _VARIABLE.search(expression):
        expression = _VARIABLE.sub(lambda found: f"({variables[found[1]]})", expression)
    found = _compiled(expression, *data).eval(data=data)
    # The API server would apply the policy's failurePolicy.
    assert found.type() != cel.Type.ERROR, f"{expression}: {found.value()}"
    return found.plain_value()


@functools.cache
def _compiled(expression: str, *variables: str) -> cel.Expression:
    environment = cel.NewEnv(
        variables=dict.fromkeys(variables, cel.Type.DYN),
        extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
    )
    return environment.compile(expression)
