"""ConditionOwners: valid ones, errors of others, and that the API server has the same rules."""

import re
from typing import Any

import jsonschema
import pytest
import yaml

from agent.api.conditions import owner
from agent.api.conditions.owner import OwnerError
from tests.agent.api.conditions.node import owner as document
from tests.chart import rendering

GOOD: list[dict[str, Any]] = [
    {"reporters": [{"user": 0}]},
    {"reporters": [{"systemdUnit": "gpu@1.service"}, {"cgroup": "/system.slice/a.service"}]},
    {"reporters": [{"pods": {"namespace": "gpu", "serviceAccount": "agent"}, "user": 7}]},
    {
        "reporters": [{"user": 1}],
        "staleAfterSeconds": 0,
        "whenStale": "Keep",
        "maxPerPod": 16,
        "changesPerSecond": 1000,
    },
    {
        "reporters": [{"user": 1}],
        "inject": {"types": ["healthy", "tested"], "podSelector": {"matchLabels": {"gpu": "a"}}},
    },
    {"reporters": [{"user": 1}], "inject": {"types": ["a.b-c_D"], "namespaceSelector": {}}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "missing required field `reporters`"),
    ({"reporters": []}, "`array` of length >= 1"),
    ({"reporters": [{}]}, "spec.reporters[0]: set user, systemdUnit, cgroup or pods"),
    ({"reporters": [{"user": -1}]}, "`int` >= 0 - at `$.spec.reporters[0].user`"),
    ({"reporters": [{"user": 1 << 32}]}, "`$.spec.reporters[0].user`"),
    ({"reporters": [{"systemdUnit": "a.slice"}]}, "`$.spec.reporters[0].systemdUnit`"),
    ({"reporters": [{"systemdUnit": "/a.service"}]}, "`$.spec.reporters[0].systemdUnit`"),
    ({"reporters": [{"cgroup": "system.slice"}]}, "`$.spec.reporters[0].cgroup`"),
    ({"reporters": [{"cgroup": "/"}]}, "`$.spec.reporters[0].cgroup`"),
    ({"reporters": [{"pods": {"namespace": "a"}}]}, "missing required field `serviceAccount`"),
    ({"reporters": [{"user": 1}], "whenStale": "True"}, "Invalid enum value 'True'"),
    ({"reporters": [{"user": 1}], "staleAfterSeconds": -1}, "`$.spec.staleAfterSeconds`"),
    ({"reporters": [{"user": 1}], "maxPerPod": 17}, "`$.spec.maxPerPod`"),
    ({"reporters": [{"user": 1}], "changesPerSecond": 0}, "`$.spec.changesPerSecond`"),
    ({"reporters": [{"user": 1}], "inject": {"types": ["a"]}}, "spec.inject: set podSelector"),
    (
        {"reporters": [{"user": 1}], "inject": {"types": [], "podSelector": {}}},
        "`$.spec.inject.types`",
    ),
    (
        {"reporters": [{"user": 1}], "inject": {"types": ["a/b"], "podSelector": {}}},
        "`$.spec.inject.types[0]`",
    ),
]
_NAMES = {
    "gpu.example.com": "",
    "example": "is not the domain of condition types",
    "podgate.io": "is reserved",
    "gpu.podgate.io": "is reserved",
    "node.kubernetes.io": "is reserved",
    "k8s.io": "is reserved",
    "notk8s.io": "",
}


def definition() -> Any:
    """The schema of the chart's CustomResourceDefinition."""
    text = (rendering.CHART / "files" / "conditionowners.yaml").read_text(encoding="utf-8")
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def is_admitted(spec: dict[str, Any]) -> bool:
    """By the definition; what CEL adds is in the names only."""
    try:
        jsonschema.validate({"spec": spec}, definition())
    except jsonschema.ValidationError:
        return False
    return True


@pytest.mark.parametrize("spec", GOOD)
def test_valid_owner_is_read_and_admitted(spec: dict[str, Any]) -> None:
    read = owner.read(document("gpu.example.com") | {"spec": spec})
    assert read.domain == "gpu.example.com"
    assert is_admitted(spec)


@pytest.mark.parametrize(("spec", "sentence"), WRONG)
def test_invalid_owner_is_named_and_rejected_by_its_definition(
    spec: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(OwnerError, match=re.escape(sentence)):
        owner.read(document("gpu.example.com") | {"spec": spec})
    assert not is_admitted(spec)


@pytest.mark.parametrize(("name", "sentence"), _NAMES.items())
def test_name_is_a_domain_that_is_not_reserved(name: str, sentence: str) -> None:
    made = document(name, {"user": 1})
    if sentence:
        with pytest.raises(OwnerError, match=sentence):
            owner.read(made)
    else:
        assert owner.read(made).domain == name


def test_unknown_field_is_named() -> None:
    spec = {"reporters": [{"user": 1, "unit": "a.service"}]}
    with pytest.raises(OwnerError, match="unknown field `unit`"):
        owner.read(document("gpu.example.com") | {"spec": spec})


def test_defaults_are_those_of_the_definition() -> None:
    properties = definition()["properties"]["spec"]["properties"]
    read = owner.read(document("gpu.example.com", {"user": 1})).spec
    assert {name: one["default"] for name, one in properties.items() if "default" in one} == {
        "staleAfterSeconds": read.stale_after_seconds,
        "whenStale": read.when_stale,
        "maxPerPod": read.max_per_pod,
        "changesPerSecond": read.changes_per_second,
    }
