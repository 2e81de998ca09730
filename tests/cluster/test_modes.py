"""Modes by labels under the manifests' own --mode=audit, with a real kubelet."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests import polling
from tests.cluster.api import ApiError
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import PATHS, Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    MODE,
    PROBED,
    PROBES_PASSING,
    Workloads,
    condition,
    is_reachable,
)
from tests.image import manifests
from tests.networks import records

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)
MAX_MODE = "podgate.io/max-mode"
OVERRIDE = "podgate.io/mode-override"


@pytest.fixture
def limit(node: OneNode) -> Iterator[Callable[[str | None], None]]:
    """Sets the ceiling of the node."""
    yield lambda mode: node.label(MAX_MODE, mode)
    node.label(MAX_MODE, None)


@pytest.fixture
def unguarded(node: OneNode) -> Iterator[None]:
    """The API server takes any label, as where the guard of labels is not deployed; it may have
    failed or come later than a label, too."""
    path = f"{PATHS['ValidatingAdmissionPolicyBinding']}/podgate-labels"
    node.api.delete(path)
    yield
    for thing in manifests.applied():
        if (thing["kind"], thing["metadata"]["name"]) == (
            "ValidatingAdmissionPolicyBinding",
            "podgate-labels",
        ):
            node.api.apply(path, thing)


def label_namespace(node: OneNode, users: Workloads, mode: str | None) -> None:
    path = f"/api/v1/namespaces/{users.namespace}"
    node.api.patch(path, {"metadata": {"labels": {MODE: mode}}})


def test_ladder_is_climbed_by_the_label_of_one_namespace(
    node: OneNode,
    podgate: Deployment,
    namespaces: Namespaces,
    record_property: Callable[[str, object], None],
) -> None:
    record_property(records.MODES, "audit,enforce,strict")
    users, others = namespaces(), namespaces()
    users.run("web", PROBED, gates=BOTH)
    others.run("web", PROBED, gates=BOTH)
    users.until_ready("web")
    for mode, reason in (
        (None, "Audit"),
        ("enforce", "Enforced"),
        ("strict", "Strict"),
        ("off", "Off"),
        ("enforce", "Enforced"),
        (None, "Audit"),
    ):
        label_namespace(node, users, mode)
        pod = users.until("web", ISOLATION_READY, "True", reason)
        assert is_reachable(pod) == (mode in (None, "off")), mode
        assert condition(pod, "Ready")["status"] == "True"
    assert condition(others.pod("web"), ISOLATION_READY)["reason"] == "Audit"
    assert users.restarts() == {}
    assert users.unhealthy() == []


def test_ceiling_of_the_node_opens_enforced_pods_and_is_reported(
    podgate: Deployment, namespaces: Namespaces, limit: Callable[[str | None], None]
) -> None:
    users = namespaces("enforce")
    users.run("web", PROBED, gates=BOTH)
    (pod,) = users.until_ready("web")
    assert not is_reachable(pod)

    limit("audit")
    pod = users.until("web", ISOLATION_READY, "True", "Audit")
    assert is_reachable(pod)
    problem = "Mode enforce is limited to audit by the node's label podgate.io/max-mode."
    assert problem in condition(pod, ISOLATION_READY)["message"]
    status = podgate.pod_status(users.namespace, "web")
    assert status is not None
    assert [one.message for one in status.mode_problems] == [problem]

    limit(None)
    pod = users.until("web", ISOLATION_READY, "True", "Enforced")
    assert not is_reachable(pod)
    assert users.restarts() == {}
    assert users.unhealthy() == []


def test_label_of_a_pod_is_stricter_or_allowed_by_its_namespace(
    podgate: Deployment, namespaces: Namespaces
) -> None:
    open_, closed = namespaces("audit"), namespaces("enforce")
    allowing = namespaces("enforce", **{OVERRIDE: "allowed"})
    for users, mode, reason in (
        (open_, "strict", "Strict"),
        (closed, "audit", "Enforced"),
        (allowing, "audit", "Audit"),
    ):
        users.run("web", PROBED, gates=BOTH, labels={MODE: mode})
        users.until("web", ISOLATION_READY, "True", reason)
        (pod,) = users.until_ready("web")
        assert is_reachable(pod) == (reason == "Audit")
        message = condition(pod, ISOLATION_READY)["message"]
        assert ("is less strict than enforce and is ignored" in message) == (users is closed)


def test_label_that_is_no_mode_keeps_pods_closed_over_a_killed_agent(
    node: OneNode, podgate: Deployment, namespaces: Namespaces, unguarded: None
) -> None:
    users = namespaces("enforce")
    users.run("web", PROBED, gates=BOTH)
    (pod,) = users.until_ready("web")

    def is_labelled() -> bool:
        # The API server may have the guard a little longer.
        with contextlib.suppress(ApiError):
            label_namespace(node, users, "enfroce")
            return True
        return False

    polling.wait_until("the label is taken", is_labelled)

    def is_reported() -> bool:
        status = podgate.pod_status(users.namespace, "web")
        return status is not None and bool(status.mode_problems) and status.mode == "enforce"

    polling.wait_until("the problem is reported", is_reported)
    killed = podgate.kill_agent()
    podgate.until("another agent", lambda report: report.pid != killed and report.is_synced)
    polling.wait_until("the problem is reported", is_reported)
    assert not is_reachable(pod)
    users.run("new", gates=BOTH[:1])
    users.until("new", ISOLATION_READY, "True", "Enforced")
    # The condition may precede the pod's address.
    (pod,) = users.until_ready("new")
    assert not is_reachable(pod)
