"""The conformance suite of tests/cnp with one agent, and a policy's life with restarts."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

from agent.admin import finding_kinds as kinds
from agent.lab.kubelet_stub import KubeletStub
from agent.policy.cluster_network_policies.source import NETWORK_POLICIES, POLICIES
from tests.agent.kube.apiserver import NODES
from tests.cnp import cases
from tests.cnp.cases import ADMITTED, DROPPED, Case
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.node.node import NAME, NAMESPACE, PORT, Node, status_of

pytestmark = pytest.mark.kernel

CLOSE = ("--mode", "audit", "--cluster-network-policies", "close")


def put_policies(node: Node, case: Case) -> None:
    for one in case.cluster_network_policies():
        one["metadata"]["uid"] = one["metadata"]["name"]
        node.server.put(one, path=POLICIES.path)
    for one in case.own_network_policies(NAMESPACE):
        one["metadata"]["uid"] = one["metadata"]["name"]
        node.server.put(one, path=NETWORK_POLICIES.path)


@contextlib.contextmanager
def origins(kubelet_cgroup: Cgroup) -> Iterator[tuple[KubeletStub, KubeletStub]]:
    """A kubelet, and a container of a hostNetwork pod."""
    with cgroups.cgroup("kubepods") as pods, cgroups.cgroup("podx", below=pods) as pod:
        stubs = KubeletStub(kubelet_cgroup.directory), KubeletStub(pod.directory)
        try:
            yield stubs
        finally:
            for stub in stubs:
                stub.stop()


async def test_each_case_of_the_suite(node: Node, kubelet_cgroup: Cgroup) -> None:
    suite = cases.read()
    await node.start_agent(*CLOSE)
    for case in suite:
        node.create(case.name, labels=case.labels)
        await node.run_pod(case.name)
        put_policies(node, case)
    await node.ready(*(case.name for case in suite))
    closed = {case.name for case in suite if case.host_process == DROPPED}

    report = await node.report(
        "the modes",
        lambda report: (
            {pod.name for pod in report.pods if pod.mode == "enforce" and pod.gates} == closed
            and all(pod.addresses for pod in report.pods)
        ),
    )
    await node.ready(*(case.name for case in suite))
    found = {}
    with origins(kubelet_cgroup) as (kubelet, hosted):
        for case in suite:
            [address] = status_of(report, case.name).addresses
            probe = kubelet.probe("tcp", address, PORT)
            dropped = traffic.is_dropped(address, PORT)
            of_pod = hosted.probe("tcp", address, PORT)
            found[case.name] = {
                "kubelet": ADMITTED if probe == "success" else DROPPED,
                "host-process": DROPPED if dropped else ADMITTED,
                "host-network": ADMITTED if of_pod == "success" else DROPPED,
            }
    assert found == {case.name: case.expected for case in suite}
    text = (await node.get_http("/metrics"))[1]
    assert f"podgate_cluster_network_policy_closed_pods {float(len(closed))}" in text
    rules = await node.rules("an answer", lambda rules: True)
    denied = {name for one in rules.cluster_network_policies for name in one.denied}
    assert denied == {f"{NAMESPACE}/{name}" for name in closed}


async def test_policy_closes_a_pod_until_it_is_deleted(node: Node) -> None:
    """Also without API server and previous agent; a HostAccessPolicy and a ceiling still open."""
    [case] = [one for one in cases.read() if one.name == "admin-deny"]
    await node.start_agent(*CLOSE)
    node.create("web", labels=case.labels)
    await node.run_pod("web")
    await node.ready("web")
    report = await node.report("a gate", lambda report: status_of(report, "web").gates)
    [address] = status_of(report, "web").addresses
    assert traffic.is_reached(address, PORT)

    put_policies(node, case)
    await node.until("the closed pod", lambda: traffic.is_dropped(address, PORT))
    report = await node.report("its origin", lambda report: status_of(report, "web").mode_origin)
    web = status_of(report, "web")
    assert (web.mode, web.mode_origin) == ("enforce", "ClusterNetworkPolicy admin-deny-0")
    explained = await asyncio.to_thread(
        node.operator.run,
        "explain",
        "pod",
        f"{NAMESPACE}/web",
        "--run-directory",
        str(node.operator.run_directory),
        "--bpffs",
        str(node.operator.bpffs),
    )
    assert "enforce, by ClusterNetworkPolicy admin-deny-0" in explained.stdout
    assert "denies all ingress; podgate drops host processes" in explained.stdout
    assert node.is_ready("web")

    await node.saved("web")
    saved = node.operator.run_directory / "state" / "clusternetworkpolicies.json"
    await node.until("its file", lambda: saved.exists() and "admin-deny-0" in saved.read_text())
    await node.stop_api()
    await node.stop_agent(signal.SIGKILL)
    await node.start_agent(*CLOSE)
    report = await node.report("its pod", lambda report: status_of(report, "web").gates)
    assert traffic.is_dropped(address, PORT)
    await node.start_api()

    labels = {"podgate.io/max-mode": "audit"}
    node.server.put({"kind": "Node", "metadata": {"name": NAME, "labels": labels}}, path=NODES)
    await node.until("the ceiling", lambda: traffic.is_reached(address, PORT))
    report = await node.report("a finding", lambda report: report.findings)
    found = {one.kind: one.pod_names for one in report.findings}
    assert found[kinds.CLUSTER_NETWORK_POLICY_NOT_FOLLOWED.name] == [f"{NAMESPACE}/web"]
    node.server.put({"kind": "Node", "metadata": {"name": NAME}}, path=NODES)
    await node.until("the closed pod", lambda: traffic.is_dropped(address, PORT))

    node.server.delete("admin-deny-0", namespace="", path=POLICIES.path)
    await node.until("its end", lambda: traffic.is_reached(address, PORT))
