"""Labels of the node and of namespaces, and labels that the next pod of a workload has, too."""

import platform

from agent.pods.lasting_labels import lasting_labels
from agent.pods.object_labels import NODE, LabelSnapshot, ObjectLabels


def test_only_changes_are_reported() -> None:
    labels = ObjectLabels()
    changes = labels.changes.subscribe()
    labels.set_namespace("shop", {"a": "1"})
    labels.set_node({"zone": "z"})
    assert changes.take() == ["shop", NODE]
    labels.set_namespace("shop", {"a": "1"})
    labels.set_node({"zone": "z"})
    labels.set_namespace("gone", {})
    assert changes.take() == []
    labels.set_namespace("shop", {})
    assert changes.take() == ["shop"]
    assert labels.snapshot() == LabelSnapshot({"zone": "z"}, {})


def test_node_without_a_cluster_has_the_name_of_its_host() -> None:
    assert ObjectLabels().snapshot().node == {"kubernetes.io/hostname": platform.node()}


def test_snapshot_does_not_change() -> None:
    labels = ObjectLabels()
    labels.set_namespace("shop", {"a": "1"})
    before = labels.snapshot()
    labels.set_namespace("shop", {"a": "2"})
    assert before.of_namespace("shop") == {"a": "1"}


def test_namespace_has_at_least_the_label_with_its_name() -> None:
    assert LabelSnapshot().of_namespace("shop") == {"kubernetes.io/metadata.name": "shop"}


def test_labels_of_single_pods_and_of_podgate_do_not_last() -> None:
    labels = {
        "tier": "front",
        "app": "web",
        "pod-template-hash": "1",
        "batch.kubernetes.io/job-name": "x",
        "podgate.io/mode": "strict",
        "podgate.iodine": "kept",
    }
    assert list(lasting_labels(labels).items()) == [
        ("app", "web"),
        ("podgate.iodine", "kept"),
        ("tier", "front"),
    ]
