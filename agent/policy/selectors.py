"""Pod selectors of policies: namespaces and labels, by the API's rules.

k8s.io/apimachinery/pkg/apis/meta/v1, LabelSelector: all requirements must match; an empty selector
matches everything.
"""

from typing import Annotated, Literal

import msgspec

from agent.pods.pod import Pod


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

    def matches(self, labels: dict[str, str]) -> bool:
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

    def matches(self, labels: dict[str, str]) -> bool:
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
    """Pods by namespace and labels; a missing field matches all."""

    namespaces: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    pod_selector: LabelSelector = LabelSelector()

    def matches(self, pod: Pod) -> bool:
        return (self.namespaces is None or pod.namespace in self.namespaces) and (
            self.pod_selector.matches(pod.labels)
        )
