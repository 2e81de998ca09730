"""Conditions of pods that podgate leaves behind."""

from typing import Any

from agent.operate.kubectl import conditions
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.standin import KubectlStandin

ISOLATION, PROBES, POLICIES = conditions.CONDITIONS
SINCE = "2026-11-22T10:00:00Z"


def pod(
    *found: dict[str, Any], gates: tuple[str, ...] = (), name: str = "web", phase: str = "Running"
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}"},
        "spec": {"readinessGates": [{"conditionType": gate} for gate in gates]},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}, *found]},
    }


def condition(kind: str, status: str = "True", reason: str = "Off") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": SINCE}


def changed(patch: dict[str, Any] | None) -> list[dict[str, Any]]:
    assert patch is not None
    found: list[dict[str, Any]] = patch["status"]["conditions"]
    return found


def test_condition_with_a_gate_stays_true_with_reason_removed() -> None:
    found = pod(condition(ISOLATION), gates=(ISOLATION, "other/gate"))
    stays = {
        "type": ISOLATION,
        "status": "True",
        "reason": "Removed",
        "message": "podgate is removed from this cluster; nothing maintains this condition any "
        "more.",
        "lastTransitionTime": SINCE,
    }
    assert conditions.patch_of(found) == {
        "metadata": {"uid": "uid-web"},
        "status": {"conditions": [stays]},
    }


def test_false_and_missing_conditions_become_true() -> None:
    gates = (ISOLATION, PROBES, POLICIES)
    found = pod(condition(ISOLATION, "False", "NetnsMissing"), gates=gates)
    made = changed(conditions.patch_of(found))
    assert {one["type"]: one["status"] for one in made} == dict.fromkeys(gates, "True")
    assert min(one["lastTransitionTime"] for one in made) > SINCE


def test_condition_without_a_gate_is_deleted() -> None:
    patch = conditions.patch_of(pod(condition(ISOLATION), condition(PROBES), gates=(PROBES,)))
    assert {"$patch": "delete", "type": ISOLATION} in changed(patch)


def test_pod_that_is_as_it_should_be_is_not_patched() -> None:
    done = condition(ISOLATION, reason="Removed")
    assert conditions.patch_of(pod(done, gates=(ISOLATION,))) is None
    assert conditions.patch_of(pod()) is None
    for phase in ("Succeeded", "Failed"):
        assert conditions.patch_of(pod(gates=(ISOLATION,), phase=phase)) is None
    assert conditions.patch_of(pod(gates=(ISOLATION,), phase="Pending"))
    is_false = condition(ISOLATION, "False", "Removed")
    assert changed(conditions.patch_of(pod(is_false, gates=(ISOLATION,))))


def test_one_pass_patches_the_status_of_each_pod(kubectl: KubectlStandin, cluster: Cluster) -> None:
    kubectl.respond("get", "namespaces", output={"items": [{"metadata": {"name": "shop"}}]})
    pods = [pod(gates=(ISOLATION,), name="web"), pod(name="plain"), pod(gates=(PROBES,), name="db")]
    kubectl.respond("get", "pods", "--namespace=shop", output={"items": pods})
    kubectl.respond("patch")
    assert conditions.settle(cluster) == (2, [])
    assert len(kubectl.calls("patch", "pod", "--subresource=status", "--type=strategic")) == 2
    assert not kubectl.calls("patch", "plain")


def test_pod_that_vanishes_is_no_problem_and_a_rejected_patch_is(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.respond("get", "namespaces", output={"items": [{"metadata": {"name": "shop"}}]})
    pods = [pod(gates=(ISOLATION,), name=name) for name in ("gone", "web")]
    kubectl.respond("get", "pods", output={"items": pods})
    kubectl.respond("patch", "gone", error='Error from server (NotFound): pods "gone" not found\n')
    kubectl.respond("patch", "web", error="Error from server (Forbidden): no\n")
    _, problems = conditions.settle(cluster)
    assert problems == ["pod shop/web: Error from server (Forbidden): no"]
    assert conditions.settle(cluster) == (1, problems)
    assert conditions.describe(["a"]) == "a"
    assert conditions.describe(["a", "b", "c"]) == "a (and 2 more)"


def test_templates_with_a_gate_are_found_by_their_owner(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    template = {"template": {"spec": {"readinessGates": [{"conditionType": ISOLATION}]}}}
    owned = [{"kind": "Deployment", "name": "web", "controller": True}]

    def workload(kind: str, name: str, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"kind": kind, "metadata": {"namespace": "shop", "name": name, **more}, "spec": spec}

    items = [
        workload("Deployment", "web", template),
        workload("ReplicaSet", "web-1", template, ownerReferences=owned),
        workload("ReplicaSet", "old", template, ownerReferences=[{"controller": False}]),
        workload("ReplicationController", "bare", {"template": None}),
        workload("CronJob", "nightly", {"jobTemplate": {"spec": template}}),
        workload("StatefulSet", "db", {"template": {"spec": {}}}),
    ]
    kubectl.respond("get", "--all-namespaces", output={"items": items})
    assert conditions.gated_templates(cluster) == [
        "cronjob/shop/nightly",
        "deployment/shop/web",
        "replicaset/shop/old",
    ]
