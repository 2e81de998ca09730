"""Selectors match as the API server's do, and their mistakes are named with their field."""

import itertools
from typing import Literal

import pytest

from agent.policy.selectors import LabelSelector, PodSelector, Requirement

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]
LABELS = {"app": "web", "tier": "front"}


@pytest.mark.parametrize(
    ("operator", "values", "matching"),
    [
        ("In", ("web", "api"), "web"),
        ("NotIn", ("web", "api"), "other none"),
        ("Exists", (), "web other"),
        ("DoesNotExist", (), "none"),
    ],
)
def test_requirement_matches_by_its_operator(
    operator: Operator, values: tuple[str, ...], matching: str
) -> None:
    labels = {"web": {"app": "web"}, "other": {"app": "other"}, "none": {"tier": "front"}}
    requirement = Requirement("app", operator, values)
    found = [name for name, one in labels.items() if requirement.matches(one)]
    assert found == matching.split()
    assert requirement.problem() is None


@pytest.mark.parametrize(
    ("operator", "values", "problem"),
    [
        ("In", (), "In needs values"),
        ("NotIn", (), "NotIn needs values"),
        ("Exists", ("x",), "Exists takes no values"),
        ("DoesNotExist", ("x",), "DoesNotExist takes no values"),
    ],
)
def test_requirement_with_the_wrong_values_is_named_with_its_field(
    operator: Operator, values: tuple[str, ...], problem: str
) -> None:
    good = Requirement("tier", "Exists")
    selector = LabelSelector(match_expressions=(good, Requirement("app", operator, values)))
    where = "matchExpressions[1]"
    assert selector.problem("spec.x") == f"spec.x.{where}: {problem}"
    assert PodSelector(pod_selector=selector).problem("spec.pods") == (
        f"spec.pods.podSelector.{where}: {problem}"
    )
    assert PodSelector(namespace_selector=selector).problem("spec.pods") == (
        f"spec.pods.namespaceSelector.{where}: {problem}"
    )


def test_all_labels_and_all_expressions_have_to_match() -> None:
    for app, tier in itertools.product(("web", "other"), ("front", "back")):
        by_labels = LabelSelector(match_labels={"app": app, "tier": tier})
        mixed = LabelSelector(
            match_labels={"app": app}, match_expressions=(Requirement("tier", "In", (tier,)),)
        )
        expected = (app, tier) == ("web", "front")
        assert by_labels.matches(LABELS) is expected
        assert mixed.matches(LABELS) is expected
    assert LabelSelector().matches({})


def test_all_fields_of_a_pod_selector_have_to_match() -> None:
    web, prod = LabelSelector({"app": "web"}), LabelSelector({"env": "prod"})
    for namespace, app, env in itertools.product(("shop", "edge"), ("web", "db"), ("prod", "dev")):
        selector = PodSelector(("shop",), web, prod)
        expected = (namespace, app, env) == ("shop", "web", "prod")
        assert selector.matches(namespace, {"app": app}, {"env": env}) is expected
    everything = PodSelector(pod_selector=LabelSelector())
    assert everything.matches("any", {}, {})
    assert everything.problem("spec.pods") is None


def test_selector_without_a_field_is_a_mistake() -> None:
    problem = PodSelector().problem("spec.pods")
    assert problem is not None
    assert problem.startswith("spec.pods: name namespaces, namespaceSelector or podSelector")
