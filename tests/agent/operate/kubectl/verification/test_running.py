"""Runs in a made cluster: what they find, and that they leave nothing."""

import threading

import pytest

from agent.operate.kubectl.cluster import KubectlError
from agent.operate.kubectl.verification import node_run, running
from agent.operate.kubectl.verification.results import Report
from agent.operate.kubectl.verification.running import Options
from tests.agent.operate.kubectl.verification import made_cluster
from tests.agent.operate.kubectl.verification.made_cluster import (
    MadeCluster,
    closed,
    opened,
    sample,
)

NO_WAIT = Options(wait_seconds=0)


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_run, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(node_run, "_DELETE_SECONDS", 0.0)


def verdicts(report: Report) -> dict[str, str]:
    """By pod's mode, of the first family."""
    return {
        f"{path.node} {path.target.mode}": path.verdict
        for path in report.paths
        if path.family == "IPv4"
    }


def test_each_node_has_a_canary_of_each_closed_mode_and_nothing_is_left() -> None:
    cluster = MadeCluster("a", "b")
    report = running.run(cluster, Options())
    assert verdicts(report) == {
        f"{node} {mode}": "closed" for node in ("a", "b") for mode in ("enforce", "strict")
    }
    assert (report.is_well, report.has_hole) == (True, False)
    assert len(cluster.made) == 6
    # Their agents write conditions.
    gated = ["readinessGates" in pod["spec"] for pod in cluster.made]
    assert gated == ["hostNetwork" not in pod["spec"] for pod in cluster.made]
    assert cluster.pods == {}
    assert [one["regarding"]["kind"] for one in cluster.events] == ["DaemonSet"]
    (sentence,) = report.sentences()
    assert sentence == "Closed: host processes of a, b reach no address of 4 pods."


def test_hole_is_named_with_its_pods_and_nodes() -> None:
    cluster = MadeCluster("a")
    cluster.answer = opened
    report = running.run(cluster, Options())
    assert set(verdicts(report).values()) == {"HOLE"}
    assert not report.is_well
    assert report.sentences()[0].startswith(
        "Hole open: host processes reach 2 pods that should be closed, on a: "
        "podgate/podgate-verify-enforce-0, "
    )
    assert cluster.pods == {}


def test_one_port_of_one_family_is_a_hole() -> None:
    cluster = MadeCluster("a")

    def answer(address: str, protocol: str, port: int) -> tuple[str, str]:
        is_open = (":" in address, protocol, port) == (True, "UDP", 8081)
        return ("open", "answered") if is_open else closed(address, protocol, port)

    cluster.answer = answer
    report = running.run(cluster, Options(modes=("strict",)))
    assert [path.verdict for path in report.paths] == ["closed", "HOLE"]


def test_namespace_has_a_canary_of_its_own_mode() -> None:
    cluster = MadeCluster("a", namespaces={"shop": {"podgate.io/mode": "audit"}})
    cluster.answer = opened
    cluster.samples = [sample("web"), sample("vault", **{"podgate.io/mode": "strict"})]
    report = running.run(cluster, Options(of="shop"))
    (canary,) = (one for one in cluster.made if not one["spec"].get("hostNetwork"))
    assert canary["metadata"]["namespace"] == "shop"
    assert "podgate.io/mode" not in canary["metadata"]["labels"]
    assert {path.target.name: path.verdict for path in report.paths} == {
        canary["metadata"]["name"]: "open",
        "web": "open",
        "vault": "HOLE",
    }
    regarding = [(one["regarding"]["kind"], one["regarding"]["name"]) for one in cluster.events]
    assert regarding == [("DaemonSet", "podgate"), ("Pod", "vault"), ("Pod", "web")]


def test_only_some_pods_of_a_node_are_tried() -> None:
    cluster = MadeCluster("a", "b")
    cluster.samples = [sample(f"web-{number}", node="ab"[number % 2]) for number in range(8)]
    report = running.run(cluster, Options(samples=2, has_canaries=False))
    found = {(path.node, path.target.name) for path in report.paths}
    assert found == {("a", "web-0"), ("a", "web-2"), ("b", "web-1"), ("b", "web-3")}


def test_kubelet_that_is_blocked_is_no_success() -> None:
    cluster = MadeCluster("a")
    cluster.kubelet_passes = False
    report = running.run(cluster, NO_WAIT)
    assert set(verdicts(report).values()) == {"kubelet blocked"}
    assert not report.is_well
    assert report.sentences()[0].startswith("The kubelet does not reach 2 pods")


def test_canary_that_does_not_get_into_its_mode_in_time_is_tried_as_it_is() -> None:
    cluster = MadeCluster("a")
    cluster.has_gate_passed = False
    cluster.answer = opened
    report = running.run(cluster, NO_WAIT)
    assert set(verdicts(report).values()) == {"HOLE"}


def test_node_whose_canary_does_not_start_is_not_proven() -> None:
    cluster = MadeCluster("a")
    cluster.canary = "waiting"
    report = running.run(cluster, NO_WAIT)
    assert not report.is_well
    assert report.sentences() == [
        f"a: its canary podgate-verify-{mode}-{number} does not run: ImagePullBackOff."
        for number, mode in enumerate(("enforce", "strict"))
    ]
    assert cluster.pods == {}


def test_canary_that_may_not_be_made_is_named() -> None:
    cluster = MadeCluster("a")
    cluster.forbidden = ["canary"]
    report = running.run(cluster, NO_WAIT)
    assert not report.is_well
    assert report.sentences() == [f"a: no canary can be made: {made_cluster.FORBIDDEN}."]
    assert cluster.pods == {}


def test_node_that_is_not_ready_is_named_and_not_tried() -> None:
    cluster = MadeCluster("a", "b")
    cluster.not_ready = ["b"]
    report = running.run(cluster, Options())
    assert not report.is_well
    assert report.sentences()[0] == "b: its Node is NotReady."
    assert {pod["spec"]["nodeName"] for pod in cluster.made} == {"a"}


def test_agents_container_tries_where_pods_on_the_nodes_network_are_forbidden() -> None:
    cluster = MadeCluster("a")
    cluster.forbidden = ["node"]
    report = running.run(cluster, Options())
    assert [node.origin for node in report.nodes] == ["agent"]
    assert cluster.commands[0][:2] == ("podgate", "agent-a")
    assert report.is_well


def test_node_is_not_tried_where_only_a_pod_may_and_it_is_forbidden() -> None:
    cluster = MadeCluster("a")
    cluster.forbidden = ["node"]
    report = running.run(cluster, Options(origin="pod"))
    assert report.sentences() == [f"a: {made_cluster.FORBIDDEN}."]
    assert (report.is_well, cluster.commands, cluster.pods) == (False, [], {})


def test_event_that_may_not_be_written_is_no_reason_to_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = MadeCluster("a")
    cluster.forbidden = ["events"]
    assert running.run(cluster, Options()).is_well
    assert "No Event of podgate/podgate" in capsys.readouterr().err


def test_pod_whose_address_another_pod_may_have_by_now_is_no_hole() -> None:
    cluster = MadeCluster("a")
    cluster.samples = [sample("web", **{"podgate.io/mode": "enforce"})]

    def answer(address: str, protocol: str, port: int) -> tuple[str, str]:
        cluster.samples = []
        return "open", "answered"

    cluster.answer = answer
    report = running.run(cluster, Options(has_canaries=False))
    assert report.paths == []
    assert report.sentences() == ["Nothing was tried."]
    assert not report.is_well


def test_what_a_killed_run_left_is_deleted() -> None:
    cluster = MadeCluster("a")
    labels = {"app.kubernetes.io/name": "podgate-verify", "podgate.io/verify-run": "old"}
    metadata = {"name": "old", "namespace": "podgate", "labels": labels}
    cluster.pods["old"] = {
        "metadata": metadata,
        "spec": {"nodeName": "z"},
        "status": {"phase": "Failed"},
    }
    running.run(cluster, Options())
    assert cluster.deleted[0] == "old"
    assert cluster.pods == {}


def test_interrupted_run_leaves_nothing() -> None:
    cluster = MadeCluster("a", "b")
    cluster.has_gate_passed = False
    has_begun = threading.Event()
    create = cluster.create

    def interrupt(path: str, body: made_cluster.Json) -> made_cluster.Json:
        made = create(path, body)
        if made["kind"] == "Pod":
            has_begun.set()
            raise KeyboardInterrupt
        return made

    cluster.create = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        running.run(cluster, Options())
    assert has_begun.is_set()
    assert cluster.pods == {}


def test_pods_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MadeCluster("a")
    monkeypatch.setattr(cluster, "delete", lambda path: None)
    report = running.run(cluster, Options(modes=("enforce",)))
    assert not report.is_well
    assert report.sentences()[0] == (
        "a: its pods are still ending: podgate-verify-enforce-0, podgate-verify-node-1."
    )


def test_hole_is_shown_before_podgate_is_installed() -> None:
    cluster = MadeCluster("a")
    cluster.daemonset = None
    cluster.answer = opened
    with pytest.raises(KubectlError, match=r"podgate is not installed .* name podgate's image"):
        running.run(cluster, Options())
    report = running.run(cluster, Options(image="example.com/podgate:1"))
    assert set(verdicts(report).values()) == {"HOLE"}
    assert all("readinessGates" not in pod["spec"] for pod in cluster.made)


def test_pods_run_podgates_image_as_the_daemonset_pulls_it_without_rights() -> None:
    cluster = MadeCluster("a")
    running.run(cluster, Options())
    for pod in cluster.made:
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert container["image"] == "podgate:1"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["automountServiceAccountToken"] is False
        assert "volumes" not in spec
        rights = container["securityContext"]
        added = rights["capabilities"].get("add", [])
        assert added == (["NET_RAW"] if spec.get("hostNetwork") else [])
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert spec["activeDeadlineSeconds"] <= 300
        if not spec.get("hostNetwork"):
            assert spec["securityContext"]["runAsNonRoot"] is True
            probe = container["readinessProbe"]
            assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (1, 1)


def test_unknown_node_is_an_error() -> None:
    with pytest.raises(KubectlError, match="z is no node that podgate's DaemonSet selects"):
        running.run(MadeCluster("a"), Options(nodes=("z",)))


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"waiting": {"reason": "ErrImagePull", "message": "no such image."}},
            "ErrImagePull: no such image",
        ),
        ({"terminated": {"reason": "Error"}}, "Error"),
        ({"waiting": {}}, "Failed"),
    ],
)
def test_pod_that_tries_nothing_is_named_with_its_reason(
    state: made_cluster.Json, text: str
) -> None:
    cluster = MadeCluster("a")
    create = cluster.create

    def create_failing(path: str, body: made_cluster.Json) -> made_cluster.Json:
        made = create(path, body)
        if made.get("spec", {}).get("hostNetwork"):
            made["status"] = {"phase": "Failed", "containerStatuses": [{"state": state}]}
        return made

    cluster.create = create_failing  # type: ignore[method-assign]
    report = running.run(cluster, Options(modes=("enforce",)))
    (sentence,) = report.sentences()
    assert sentence == f"a: its pod podgate-verify-node-1 does not try anything: {text}."
    assert cluster.pods == {}


def test_tries_that_print_something_else_are_named() -> None:
    cluster = MadeCluster("a")
    cluster.text = lambda path: "no JSON\n"  # type: ignore[method-assign]
    report = running.run(cluster, Options(modes=("enforce",)))
    assert report.sentences() == ["a: its tries printed no JSON."]


def test_chosen_nodes_are_tried_once_in_order() -> None:
    cluster = MadeCluster("a", "b", "c")
    report = running.run(cluster, Options(nodes=("c", "a", "c"), modes=("strict",)))
    assert [node.node for node in report.nodes] == ["a", "c"]
    assert {pod["spec"]["nodeName"] for pod in cluster.made} == {"a", "c"}


@pytest.mark.parametrize("change", [{"uid": "other"}, {"deletionTimestamp": "2026-01-01"}])
def test_pod_that_was_replaced_or_ends_is_no_hole(change: dict[str, str]) -> None:
    cluster = MadeCluster("a")
    cluster.samples = [sample("web", **{"podgate.io/mode": "enforce"})]

    def answer(address: str, protocol: str, port: int) -> tuple[str, str]:
        cluster.samples[0]["metadata"] |= change
        return "open", "answered"

    cluster.answer = answer
    assert running.run(cluster, Options(has_canaries=False)).paths == []
