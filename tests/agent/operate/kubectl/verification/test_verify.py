"""`kubectl podgate verify` by a stand-in for kubectl, and the CronJob's command."""

import json
import pathlib
import secrets

import pytest

from agent.operate.kubectl import main
from agent.operate.kubectl.cluster import KubectlError
from agent.operate.kubectl.verification import job, node_run
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.operate.kubectl.verification.made_cluster import (
    DAEMONSET,
    Json,
    MadeCluster,
    closed,
    opened,
    sample,
)

PODS = "/api/v1/namespaces/podgate/pods"
NAME = "podgate-verify-node-x"


@pytest.fixture
def tried(kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch) -> KubectlStandin:
    """A node with a pod that opted in, at which a gate is in force."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "run")
    monkeypatch.setattr(node_run, "_POLL_SECONDS", 0.0)
    cluster = MadeCluster("a")
    cluster.samples = [sample("web", **{"podgate.io/mode": "enforce"})]
    prober = {"metadata": {"name": NAME, "namespace": "podgate"}, "status": {"phase": "Succeeded"}}
    pods: Json = {"items": []}
    made = f"{PODS}?labelSelector=podgate.io/verify-run%3Drun&fieldSelector=spec.nodeName%3Da"
    failed = (
        f"{PODS}?labelSelector=app.kubernetes.io/name%3Dpodgate-verify"
        "&fieldSelector=status.phase%3DFailed"
    )
    for path, output in (
        ("/apis/apps/v1/namespaces/podgate/daemonsets/podgate", DAEMONSET),
        ("/api/v1/nodes", cluster.get("/api/v1/nodes")),
        ("/api/v1/namespaces", cluster.get("/api/v1/namespaces")),
        (f"{PODS}?labelSelector=app.kubernetes.io/name%3Dpodgate", pods),
        ("/api/v1/pods?labelSelector=podgate.io/verify%3Dtrue", {"items": cluster.samples}),
        (failed, pods),
        (made, pods),
        (f"{PODS}/{NAME}", prober),
        ("/api/v1/namespaces/shop/pods/web", cluster.samples[0]),
    ):
        kubectl.respond("get", "--raw", path, output=output)
    kubectl.respond("create", "--raw", PODS, output=prober)
    for namespace in ("podgate", "shop"):
        events = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        kubectl.respond("create", "--raw", events, output={"kind": "Event"})
    answers(kubectl, cluster, closed)
    return kubectl


def answers(kubectl: KubectlStandin, cluster: MadeCluster, answer: object) -> None:
    cluster.answer = answer  # type: ignore[assignment]
    tries = [
        [address, protocol, port]
        for address in ("198.18.0.9", "fd00:18::9")
        for protocol, port in (("TCP", 8080), ("TCP", 9), ("UDP", 9), ("ICMP", 0))
    ]
    output = cluster._tried(json.dumps(tries))
    kubectl.respond("get", "--raw", f"{PODS}/{NAME}/log", output=output)


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "verify", "--no-canaries", *arguments])


def test_closed_pod_is_shown_by_family(
    tried: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tried) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Closed: host processes of a reach no address of 1 pod.",
        "",
        "NODE  POD       MODE     FAMILY  TCP            UDP        ICMP    KUBELET  VERDICT",
        "a     shop/web  enforce  IPv4    closed/closed  -/unclear  closed  -        closed",
        "a     shop/web  enforce  IPv6    closed/closed  -/unclear  closed  -        closed",
    ]
    ((_, content),) = tried.calls("create", PODS)
    assert json.loads(content)["spec"]["hostNetwork"] is True


def test_hole_is_shown_and_is_the_exit_status(
    tried: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(tried, MadeCluster("a"), opened)
    assert run(tried) == 1
    assert capsys.readouterr().out.startswith(
        "Hole open: host processes reach 1 pod that should be closed, on a: shop/web.\n"
    )


@pytest.mark.parametrize(
    ("form", "start"),
    [("json", "{"), ("yaml", "version:"), ("html", "<!doctype html>"), ("junit", "<?xml ")],
)
def test_report_has_several_forms(
    tried: KubectlStandin, capsys: pytest.CaptureFixture[str], form: str, start: str
) -> None:
    assert run(tried, "-o", form) == 0
    assert capsys.readouterr().out.startswith(start)


def test_cluster_without_podgate_is_an_error_with_the_option(
    tried: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    daemonset = "/apis/apps/v1/namespaces/podgate/daemonsets/podgate"
    tried.respond("get", "--raw", daemonset, error="Error from server (NotFound): not found\n")
    assert run(tried) == 1
    assert "podgate is not installed" in capsys.readouterr().err


def test_job_prints_the_report_and_fails_for_a_hole(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = MadeCluster("a")
    assert job.main(["--podgate-namespace=podgate"], cluster) == 0
    cluster.answer = opened
    assert job.main(["--podgate-namespace=podgate"], cluster) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["hasHole"] is True
    cluster.not_ready = ["a"]
    assert job.main(["--podgate-namespace=podgate"], cluster) == 2


def test_job_outside_of_a_pod_has_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert job.main(["--podgate-namespace=podgate"]) == 2
    assert capsys.readouterr().err == "KUBERNETES_SERVICE_HOST is not set; run it in a pod\n"


def test_address_of_the_api_server_is_client_gos() -> None:
    variables = {"KUBERNETES_SERVICE_HOST": "fd00:18::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert job.server(variables) == ("fd00:18::1", 6443)
    with pytest.raises(KubectlError, match="KUBERNETES_SERVICE_HOST is not set"):
        job.server({})
