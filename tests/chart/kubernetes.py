"""Schemas of the Kubernetes API, as an API server of 1.36.2 serves them at /openapi/v3.

`recorded/openapi.json` has those of the kinds that the chart renders, without texts.
tests/cluster/test_chart.py compares it with the server. `recorded/operator.json` has those of the
Prometheus operator's kinds, as that server describes them with the definitions of operator 0.93.0;
`recorded/cert-manager.json` those of the definitions of cert-manager 1.21.0.
"""

import functools
import pathlib
from collections.abc import Iterator, Mapping

from tests.chart import schemas
from tests.chart.schemas import Json, Schemas

RECORDED = pathlib.Path(__file__).parent / "recorded" / "openapi.json"
# By the group and version, where the API server describes them.
PATHS = {
    "v1": "api/v1",
    "apps/v1": "apis/apps/v1",
    "batch/v1": "apis/batch/v1",
    "networking.k8s.io/v1": "apis/networking.k8s.io/v1",
    "policy/v1": "apis/policy/v1",
    "rbac.authorization.k8s.io/v1": "apis/rbac.authorization.k8s.io/v1",
    "apiextensions.k8s.io/v1": "apis/apiextensions.k8s.io/v1",
    "admissionregistration.k8s.io/v1": "apis/admissionregistration.k8s.io/v1",
}
DEFINED = ("monitoring.coreos.com/v1", "cert-manager.io/v1")
"""Of other projects' definitions."""
_KINDS = "x-kubernetes-group-version-kind"


def problems(thing: Json) -> list[str]:
    """What the API server would not accept in an object's fields."""
    named = _recorded()
    wanted = (thing["apiVersion"], thing["kind"])
    (name,) = (name for name, schema in named.items() if wanted in _kinds(schema))
    name_of_thing = f"{thing['kind']} {thing['metadata']['name']}"
    return list(Schemas(named).problems(thing, named[name], name_of_thing))


def reduced(documents: Mapping[str, Json], kinds: set[tuple[str, str]]) -> Json:
    """The schemas of these kinds (apiVersion, kind) and all that they refer to, by name.

    documents: of the API server, by `PATHS`.
    """
    everything: Json = {}
    for document in documents.values():
        everything |= document["components"]["schemas"]
    todo = [name for name, schema in everything.items() if kinds & set(_kinds(schema))]
    made: Json = {}
    while todo:
        name = todo.pop()
        if name not in made:
            made[name] = _without_texts(everything[name])
            todo += _references(everything[name])
    return dict(sorted(made.items()))


def _kinds(schema: Json) -> Iterator[tuple[str, str]]:
    for one in schema.get(_KINDS, ()):
        yield f"{one['group']}/{one['version']}".removeprefix("/"), one["kind"]


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _without_texts(schema: Json) -> Json:
    """Without descriptions, defaults and extensions, which validate nothing."""
    made: Json = {}
    for key, value in schema.items():
        if key in ("description", "default") or (key.startswith("x-") and key != _KINDS):
            continue
        if key == "properties":
            made[key] = {name: _without_texts(one) for name, one in value.items()}
        elif key in ("allOf", "oneOf"):
            made[key] = [_without_texts(one) for one in value]
        else:
            made[key] = _without_texts(value) if isinstance(value, dict) else value
    return made


@functools.cache
def _recorded() -> Json:
    others = (RECORDED.with_name(name) for name in ("operator.json", "cert-manager.json"))
    made = schemas.read(RECORDED)
    for path in others:
        made |= schemas.read(path)
    return made
