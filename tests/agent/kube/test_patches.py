"""Since when a condition in the API is true of the current sandbox, and which errors mean that the
pod is another one."""

from collections.abc import Mapping

import pytest

from agent import labels
from agent.kube import patches
from agent.kube.client import ApiError
from agent.kube.objects import ApiPod, ApiPodStatus, ObjectMetadata, PodCondition
from agent.kube.patches import SandboxStamp

NOW = SandboxStamp("sandbox-1", "boot-1")
KIND = labels.PROBES_PASSING


def since(fields: Mapping[str, str] | None = None, *, now: SandboxStamp = NOW) -> float | None:
    """Of a pod whose condition differs in these fields."""
    condition = {
        "type": KIND,
        "status": "True",
        "message": f"All pass.{NOW}",
        "last_transition_time": "1970-01-01T00:16:40Z",
        **(fields or {}),
    }
    found = PodCondition(**condition)  # type: ignore[arg-type]
    pod = ApiPod(
        metadata=ObjectMetadata(name="a", namespace="demo", uid="u"),
        status=ApiPodStatus(conditions=(found,)),
    )
    return patches.true_since(pod, KIND, now)


def test_condition_of_this_sandbox_is_true_since_it_became_so() -> None:
    assert since() == 1000.0


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "False"},
        {"message": "All pass."},
        {"message": f"All pass.{SandboxStamp('sandbox-0', 'boot-1')}"},
        {"message": f"All pass.{SandboxStamp('sandbox-1', 'boot-0')}"},
        {"last_transition_time": "yesterday"},
        {"type": labels.ISOLATION_READY},
    ],
    ids=["false", "without a stamp", "other sandbox", "other boot", "odd time", "other kind"],
)
def test_other_conditions_are_true_since_never(fields: dict[str, str]) -> None:
    assert since(fields) is None


def test_condition_of_an_unknown_sandbox_is_none_of_this_one() -> None:
    unknown = SandboxStamp("", "boot-1")
    assert since({"message": f"All pass.{unknown}"}, now=unknown) is None


@pytest.mark.parametrize(
    ("code", "field", "is_replaced"),
    [
        (404, "", True),
        (409, "", True),
        (422, "metadata.uid", True),
        (422, "status.conditions", False),
        (403, "metadata.uid", False),
        (503, "", False),
    ],
)
def test_pod_is_another_one_if_it_is_gone_or_its_uid_differs(
    code: int, field: str, *, is_replaced: bool
) -> None:
    causes = ((field, "FieldValueInvalid"),) if field else ()
    assert patches.is_pod_replaced(ApiError("x", code=code, causes=causes)) is is_replaced
