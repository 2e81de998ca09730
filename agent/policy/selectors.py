"""Selectors of policies: pods by namespace and labels, nodes by labels, by the API's rules.

k8s.io/apimachinery/pkg/apis/meta/v1, LabelSelector: all requirements must match; an empty selector
matches everything.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec


class Requirement(
    msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True
):
    """One of `matchExpressions`. NotIn and DoesNotExist match pods without the label."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Why the API server would reject it (apis/meta/v1/validation)."""
        if self.operator in ("In", "NotIn"):
            return None if self.values else f"{self.operator} needs values"
        return f"{self.operator} takes no values" if self.values else None

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """metav1.LabelSelector."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def problem(self, where: str) -> str | None:
        """The first mistake, with its field below `where`, or None."""
        for index, requirement in enumerate(self.match_expressions):
            if problem := requirement.problem():
                return f"{where}.matchExpressions[{index}]: {problem}"
        return None

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class PodSelector(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Pods: all of its fields must match. One is set: `podSelector: {}` selects all pods."""

    namespaces: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None

    def problem(self, where: str) -> str | None:
        """The first mistake, with its field below `where`, or None."""
        if self == PodSelector():
            return (
                f"{where}: name namespaces, namespaceSelector or podSelector; podSelector: {{}} "
                "selects all pods"
            )
        for name, selector in (
            ("podSelector", self.pod_selector),
            ("namespaceSelector", self.namespace_selector),
        ):
            if selector and (problem := selector.problem(f"{where}.{name}")):
                return problem
        return None

    def matches(
        self, namespace: str, labels: Mapping[str, str], namespace_labels: Mapping[str, str]
    ) -> bool:
        """Whether it selects a pod with these labels, in a namespace with this name and labels."""
        return (
            (self.namespaces is None or namespace in self.namespaces)
            and (self.pod_selector is None or self.pod_selector.matches(labels))
            and (
                self.namespace_selector is None or self.namespace_selector.matches(namespace_labels)
            )
        )
