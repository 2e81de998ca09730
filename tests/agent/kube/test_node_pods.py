"""The pods of a node by what API server and kubelet report, whichever of them is late."""

from typing import Any

import msgspec
import pytest
import structlog.testing

from agent import labels
from agent.kube.node_pods import NodePods
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import API, KUBELET
from agent.logs import Event
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import pod


class Confirmed(NodePods):
    """The API server has listed its pods."""

    @property
    def is_confirmed(self) -> bool:
        return True


def at(version: str, name: str = "a", **metadata: Any) -> ApiPod:
    """A version of a pod; empty for the kubelet's own manifest of a static one."""
    return msgspec.convert(pod(name, resourceVersion=version, **metadata), ApiPod)


@pytest.fixture
def modes() -> PodModes:
    return PodModes(Mode.ENFORCE)


@pytest.fixture
def pods(modes: PodModes) -> NodePods:
    return Confirmed(modes)


def test_late_change_does_not_bring_back_what_the_kubelet_has_deleted(pods: NodePods) -> None:
    pods.set_pod(API, at("5"))
    pods.set_pod(KUBELET, at("5"))
    pods.remove_pod(KUBELET, "uid-a")
    pods.set_pod(API, at("6"))
    assert (pods.current, pods.uids) == ({}, set())
    # The API server's watch reports the deletion, too.
    pods.remove_pod(API, "uid-a")
    pods.set_pod(API, at("9"))
    assert set(pods.current) == {"uid-a"}


def test_pod_that_the_kubelet_has_again_counts_again(pods: NodePods) -> None:
    pods.set_pod(API, at("5"))
    pods.remove_pod(KUBELET, "uid-a")
    pods.set_pod(KUBELET, at("5"))
    pods.set_pod(API, at("6"))
    assert pods.of_api("uid-a") == at("6")


@pytest.mark.parametrize("is_current", [True, False])
def test_api_server_decides_what_is_deleted_while_the_kubelet_does_not_report(
    pods: NodePods, *, is_current: bool
) -> None:
    pods.set_pod(API, at("5"))
    pods.set_pod(KUBELET, at("5"))
    if not is_current:
        pods.disconnect_kubelet()
    pods.remove_pod(API, "uid-a")
    assert set(pods.current) == ({"uid-a"} if is_current else set())


def test_kubelets_whole_list_leaves_what_it_or_the_api_server_has(pods: NodePods) -> None:
    pods.set_pod(API, at("5", "listed"))
    for name in ("listed", "sent", "gone"):
        pods.set_pod(KUBELET, at("5", name))
    pods.disconnect_kubelet()
    pods.set_pod(KUBELET, at("5", "sent"))
    changes = pods.changes.subscribe()
    before = pods.is_synced
    pods.complete_kubelet_list()
    assert (before, pods.is_synced) == (False, True)
    assert set(pods.current) == pods.uids == {"uid-listed", "uid-sent"}
    assert changes.take() == ["uid-gone"]


def test_reports_are_outdated_once_the_kubelets_stream_has_ended(pods: NodePods) -> None:
    pods.set_pod(API, at("5"))
    pods.set_pod(KUBELET, at("6"))
    before = pods.reports("uid-a")
    changes = pods.changes.subscribe()
    pods.disconnect_kubelet()
    after = pods.reports("uid-a")
    assert (before.of_api, before.of_kubelet) == (at("5"), at("6"))
    assert (before.is_current, after.is_current) == (True, False)
    assert (before.is_confirmed, after.is_confirmed) == (True, True)
    assert after.of_kubelet == at("6")
    assert changes.take() == ["uid-a"]


def test_pods_that_only_the_kubelet_has_are_those_that_the_api_server_stored_once(
    modes: PodModes,
) -> None:
    pods = Confirmed(modes)
    pods.set_pod(API, at("5", "both"))
    for name, version in (("both", "5"), ("only", "5"), ("static", ""), ("ended", "5")):
        pods.set_pod(KUBELET, at(version, name))
    pods.remove_pod(KUBELET, "uid-ended")
    assert pods.only_of_kubelet == {"uid-only"}
    unconfirmed = NodePods(modes)
    unconfirmed.set_pod(KUBELET, at("5"))
    assert unconfirmed.only_of_kubelet == set()


def test_every_report_is_marked_though_the_pod_stays_the_same(pods: NodePods) -> None:
    changes = pods.changes.subscribe()
    pods.set_pod(API, at("5"))
    assert changes.take() == ["uid-a"]
    pods.set_pod(API, at("6"))
    assert changes.take() == ["uid-a"]
    pods.remove_pod(API, "uid-other")
    assert changes.take() == []


def test_modes_of_a_namespace_change_its_pods_alone(pods: NodePods, modes: PodModes) -> None:
    pods.set_pod(API, at("5"))
    pods.set_pod(API, at("5", "b", namespace="other"))
    changes = pods.changes.subscribe()
    modes.set_namespace("other", {labels.MODE_LABEL: "strict"})
    pods.refresh_namespace("other")
    assert changes.take() == ["uid-b"]
    found = {uid: one.mode for uid, one in pods.current.items()}
    assert found == {"uid-a": Mode.ENFORCE, "uid-b": Mode.STRICT}
    modes.set_node({labels.MODE_LABEL: "audit"})
    pods.refresh_all()
    assert pods.current["uid-a"].mode is Mode.AUDIT
    assert set(changes.take()) == {"uid-a", "uid-b"}


def test_setting_without_effect_is_logged_once_in_a_pods_life(pods: NodePods) -> None:
    wrong = {labels.RELAY_ANNOTATION: "of"}
    with structlog.testing.capture_logs() as logs:
        for version in ("5", "6"):
            pods.set_pod(API, at(version, annotations=wrong))
        assert [(one["event"], one["reason"]) for one in logs] == [
            (Event.POD_SETTING_REJECTED, "InvalidAnnotation")
        ]
        pods.set_pod(API, at("7", annotations={**wrong, labels.NETNS_ANNOTATION: "/x"}))
        assert [one["reason"] for one in logs[1:]] == ["AnnotationIgnored"]
        pods.remove_pod(API, "uid-a")
        pods.set_pod(API, at("8", annotations=wrong))
        assert len(logs) == 3
