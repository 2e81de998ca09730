"""`kubectl podgate verify` on a real node: it finds each hole, and leaves nothing."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from agent.operate.kubectl.verification.manifests import NAME
from bpf import syscalls
from tests import polling
from tests.chart import rendering
from tests.cluster import families
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import PATHS, Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.plugin import Plugin
from tests.cluster.workloads import WEB, Workloads
from tests.image.node import BPFFS

pytestmark = pytest.mark.kernel

OPT_IN = {"podgate.io/verify": "true"}
JOBS = "/apis/batch/v1/namespaces/podgate/jobs"
DECLARED = {**WEB, "ports": [{"containerPort": 8080}]}


@pytest.fixture(scope="module", autouse=True)
def dual_stack(bare_cluster: OneNode, podgate: Deployment) -> Iterator[None]:
    with families.dual_stack(bare_cluster):
        yield


def verified(plugin: Plugin, *arguments: str) -> tuple[int, Any]:
    status, output = plugin.run("verify", "-o", "json", *arguments)
    return status, json.loads(output)


def verdicts(report: Any) -> dict[tuple[str, str], str]:
    """By mode and family."""
    return {(path["mode"], path["family"]): path["verdict"] for path in report["paths"]}


def outcomes(report: Any) -> set[str]:
    """With the tries that are unclear."""
    tries = [one for path in report["paths"] for one in path["tries"]]
    unclear = {str(one) for one in tries if one["outcome"] == "unclear"}
    return {one["outcome"] for one in tries} | unclear


def left(node: OneNode, *namespaces: str) -> list[str]:
    """Pods of runs."""
    return [
        pod["metadata"]["name"]
        for namespace in ("podgate", *namespaces)
        for pod in node.api.items(
            f"/api/v1/namespaces/{namespace}/pods",
            labelSelector=f"app.kubernetes.io/name={NAME}",
        )
    ]


def each(verdict: str, *modes: str) -> dict[tuple[str, str], str]:
    return {(mode, family): verdict for mode in modes for family in ("IPv4", "IPv6")}


def test_closed_pods_are_proven_and_ten_runs_leave_nothing(node: OneNode, plugin: Plugin) -> None:
    for _ in range(10):
        status, report = verified(plugin)
        assert verdicts(report) == each("closed", "enforce", "strict"), report
        assert outcomes(report) == {"closed"}
        assert [path["kubelet"] for path in report["paths"]] == ["passes", "-"] * 2
        assert (status, report["isWell"], report["hasHole"]) == (0, True, False)
        assert left(node) == []
    events = node.api.items(
        "/api/v1/namespaces/podgate/events", fieldSelector="reason=IsolationVerified"
    )
    assert {one["involvedObject"]["kind"] for one in events} == {"DaemonSet"}


@pytest.mark.parametrize("mode", ["off", "audit"])
def test_hole_is_found_while_podgate_is_off_or_audits(
    node: OneNode, plugin: Plugin, podgate: Deployment, mode: str
) -> None:
    ceiling(node, podgate, mode)
    try:
        status, report = verified(plugin)
    finally:
        ceiling(node, podgate, None)
    assert verdicts(report) == each("HOLE", "enforce", "strict"), report
    assert outcomes(report) == {"open"}
    assert (status, report["hasHole"]) == (1, True)
    assert left(node) == []


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [("off", "open"), ("audit", "open"), ("enforce", "closed"), ("strict", "closed")],
)
def test_namespace_is_verified_in_its_own_mode(
    node: OneNode, plugin: Plugin, namespaces: Namespaces, mode: str, verdict: str
) -> None:
    users = namespaces(mode)
    users.run("web", DECLARED, labels=OPT_IN)
    users.run("other", DECLARED)
    users.until_ready("web", "other")
    status, report = verified(plugin, "-n", users.namespace)
    assert verdicts(report) == each(verdict, mode), report
    assert {path["pod"] for path in report["paths"] if not path["isCanary"]} == {"web"}
    assert {path["isCanary"] for path in report["paths"]} == {True, False}
    assert status == 0
    assert left(node, users.namespace) == []
    events = [one["involvedObject"] for one in users.events("IsolationVerified")]
    assert [(one["kind"], one["name"]) for one in events] == [("Pod", "web")]
    assert users.restarts() == {}


def test_gate_that_was_detached_behind_its_back_is_found(
    plugin: Plugin, podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    users.run("web", DECLARED, labels=OPT_IN)
    users.until_ready("web")
    polling.wait_until("the gate is in force", lambda: is_enforced(podgate, users))
    arguments = ("-n", users.namespace, "--no-canaries")
    assert verified(plugin, *arguments)[0] == 0
    report = podgate.report()
    assert report is not None
    (pod,) = (one for one in report.pods if one.namespace == users.namespace)
    # An agent that runs attaches it again at once.
    os.kill(report.pid, signal.SIGSTOP)
    try:
        for gate in pod.gates:
            for path in BPFFS.glob(f"podgate/v*/links/gate_egress-{gate.ifindex}"):
                with os.fdopen(syscalls.open_pin(str(path)), "rb") as opened:
                    syscalls.link_detach(opened.fileno())
        status, found = verified(plugin, *arguments)
    finally:
        os.kill(report.pid, signal.SIGCONT)
    assert verdicts(found) == each("HOLE", "enforce"), found
    assert status == 1
    polling.wait_until("the gate is back", lambda: verified(plugin, *arguments)[0] == 0)


def test_agents_container_tries_as_well(node: OneNode, plugin: Plugin) -> None:
    status, report = verified(plugin, "--from", "agent")
    assert verdicts(report) == each("closed", "enforce", "strict"), report
    assert [one["origin"] for one in report["nodes"]] == ["agent"]
    assert status == 0
    assert left(node) == []


def test_job_of_the_chart_fails_while_the_hole_is_open(node: OneNode, podgate: Deployment) -> None:
    text = rendering.texts({"verify": {"enabled": True}}, service="kubectl")["verify-cronjob.yaml"]
    (*others, cronjob) = yaml.safe_load_all(text)
    for one in others:
        node.api.create(PATHS[one["kind"]], one)
    try:
        assert finished(node, cronjob, "closed") == ("Complete", False)
        ceiling(node, podgate, "off")
        assert finished(node, cronjob, "open") == ("Failed", True)
    finally:
        ceiling(node, podgate, None)
        for one in others:
            node.api.delete(f"{PATHS[one['kind']]}/{one['metadata']['name']}")
    assert left(node) == []


def finished(node: OneNode, cronjob: Json, name: str) -> tuple[str, bool]:
    """How a Job of it ended, and whether it reported a hole."""
    body = {"metadata": {"name": name}, "spec": cronjob["spec"]["jobTemplate"]["spec"]}
    node.api.create(JOBS, {"apiVersion": "batch/v1", "kind": "Job", **body})

    def ended() -> str:
        conditions = node.api.get(f"{JOBS}/{name}").get("status", {}).get("conditions") or ()
        true = {one["type"] for one in conditions if one["status"] == "True"}
        return "".join(true & {"Complete", "Failed"})

    how = polling.wait_until("the job has ended", ended, seconds=180)
    pods = "/api/v1/namespaces/podgate/pods"
    (pod,) = node.api.items(pods, labelSelector=f"job-name={name}")
    log = node.api.text(f"{pods}/{pod['metadata']['name']}/log")
    report = json.loads(log.splitlines()[-1])
    node.api.delete(f"{JOBS}/{name}", propagationPolicy="Background")
    return how, report["hasHole"]


def ceiling(node: OneNode, podgate: Deployment, mode: str | None) -> None:
    """Set the cluster's, and wait until the agent has it."""
    labels: Json = {"podgate.io/max-mode": mode}
    node.api.patch("/api/v1/namespaces/podgate", {"metadata": {"labels": labels}})
    wanted = mode or "strict"
    podgate.until(f"at most {wanted}", lambda report: report.max_mode == wanted)


def is_enforced(podgate: Deployment, users: Workloads) -> bool:
    report = podgate.report()
    return report is not None and any(
        pod.namespace == users.namespace and pod.gates for pod in report.pods
    )
