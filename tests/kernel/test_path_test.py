"""The path test detects a gate that host packets bypass, and its packets disturb no process."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator

import pyroute2
import pytest

from agent import labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.pods.conditions import FALSE, TRUE, Condition
from agent.settings import admin_socket
from tests.kernel import foreign

pytestmark = pytest.mark.kernel


@pytest.fixture
def web(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


def isolation(report: AgentReport, name: str = "web") -> Condition | None:
    return condition_of(report, name, labels.ISOLATION_READY)


def isolated_as(reason: str, name: str = "web") -> Callable[[AgentReport], bool]:
    return lambda report: (c := isolation(report, name)) is not None and c.reason == reason


def results(report: AgentReport, name: str = "web") -> dict[str, str]:
    pod = pod_of(report, name)
    return {path.address: path.result for path in pod.paths} if pod else {}


def start(operator: AgentProcess, *pods: LabPod, mode: str = "enforce") -> None:
    for pod in pods:
        write_manifest(operator, pod, mode)
    operator.start()


@pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
def test_an_enforced_pod_is_ready_when_every_path_is_confirmed(
    operator: AgentProcess, lab: Lab, is_bridged: bool
) -> None:
    pod = lab.add_pod("web", 2, bridged=is_bridged)
    start(operator, pod)
    report = operator.wait_for("the gate", isolated_as("Enforced"))
    assert results(report) == {pod.ipv4: "confirmed", pod.ipv6: "confirmed"}


def write_manifest(operator: AgentProcess, pod: LabPod, mode: str = "enforce") -> None:
    """With the addresses in its status: the host's routes may not confirm them."""
    operator.write_manifest(
        pod, mode=mode, container={}, addresses=[str(address) for address in pod.addresses]
    )


@pytest.fixture
def detour(web: LabPod) -> Iterator[Callable[[], None]]:
    """Routes the host's packets to the pod's IPv4 address into a veth pair of the host, whose
    program redirects them into the pod: as CNIs do that bypass the pod's veth."""
    with pyroute2.IPRoute() as netlink:

        def route() -> None:
            netlink.link("add", ifname="cni0", kind="veth", peer={"ifname": "cni1"})
            (near,), (far,) = (netlink.link_lookup(ifname=name) for name in ("cni0", "cni1"))
            for ifindex in (near, far):
                netlink.link("set", index=ifindex, state="up")
            hardware = netlink.link("get", index=far)[0].get("address")
            netlink.neigh("add", dst=web.ipv4, lladdr=hardware, ifindex=near, state="permanent")
            foreign.add_peer_redirect(far, web.ifindex)
            netlink.route("replace", dst=f"{web.ipv4}/32", oif=near, scope="link")

        yield route
        for ifindex in netlink.link_lookup(ifname="cni0"):
            netlink.link("del", index=ifindex)


def straighten(pod: LabPod) -> None:
    with pyroute2.IPRoute() as netlink:
        netlink.route("replace", dst=f"{pod.ipv4}/32", oif=pod.ifindex, scope="link")


def test_path_around_the_gate_is_detected(
    operator: AgentProcess, web: LabPod, detour: Callable[[], None]
) -> None:
    detour()
    start(operator, web)
    report = operator.wait_for("the bypass", isolated_as("GateBypassed"))
    condition = isolation(report)
    assert condition is not None
    assert condition.status == FALSE
    assert web.ipv4 in condition.message
    assert web.ipv6 not in condition.message
    assert results(report) == {web.ipv4: "bypassed", web.ipv6: "confirmed"}


def test_pod_becomes_ready_when_its_path_is_corrected(
    operator: AgentProcess, web: LabPod, detour: Callable[[], None]
) -> None:
    detour()
    start(operator, web)
    operator.wait_for("the bypass", isolated_as("GateBypassed"))
    straighten(web)
    touch(operator, web)
    operator.wait_for("the gate", isolated_as("Enforced"))


def test_bypass_found_later_is_reported_and_the_condition_stays(
    operator: AgentProcess, web: LabPod, detour: Callable[[], None]
) -> None:
    start(operator, web)
    operator.wait_for("the gate", isolated_as("Enforced"))
    detour()
    touch(operator, web)
    report = operator.wait_for("the bypass", lambda r: results(r).get(web.ipv4) == "bypassed")
    condition = isolation(report)
    assert condition is not None
    assert condition.status == TRUE
    assert "without passing the gate" in condition.message
    assert any(line.get("result") == "bypassed" for line in operator.log_lines())
    series = fetch(report, "/metrics")
    assert 'podgate_path_test_addresses{namespace="demo",pod="web",result="bypassed"} 1.0' in series


def touch(operator: AgentProcess, pod: LabPod) -> None:
    """Make the agent test the pod's path again: audit for a moment, then enforce."""
    for mode, reason in (("audit", "Audit"), ("enforce", "")):
        operator.write_manifest(pod, mode=mode, container={})
        if reason:
            operator.wait_for(reason, isolated_as(reason, pod.name))


def fetch(report: AgentReport, path: str) -> str:
    with urllib.request.urlopen(f"http://{report.http_address}{path}", timeout=20) as answer:
        content: bytes = answer.read()
        return content.decode()


@pytest.fixture
def swallower() -> Iterator[str]:
    """An interface behind which no host answers."""
    with pyroute2.IPRoute() as netlink:
        netlink.link("add", ifname="nowhere0", kind="veth", peer={"ifname": "nowhere1"})
        for name in ("nowhere0", "nowhere1"):
            netlink.link("set", index=netlink.link_lookup(ifname=name)[0], state="up")
    yield "nowhere0"
    subprocess.run(["ip", "link", "del", "nowhere0"], check=True)


@pytest.mark.parametrize("route", ["del {0}/32", "replace {0}/32 dev {1}"])
def test_unreachable_pod_is_ready_with_a_message_that_its_path_is_not_confirmed(
    operator: AgentProcess, web: LabPod, swallower: str, route: str
) -> None:
    command = route.format(web.ipv4, swallower).split()
    subprocess.run(["ip", "route", *command], check=True)
    start(operator, web)
    report = operator.wait_for("the gate", isolated_as("Enforced"))
    assert results(report) == {web.ipv4: "unreachable", web.ipv6: "confirmed"}
    condition = isolation(report)
    assert condition is not None
    assert f"packets from the host do not reach {web.ipv4}" in condition.message


def test_path_test_waits_for_neighbour_resolution(operator: AgentProcess, web: LabPod) -> None:
    subprocess.run(["ip", "neigh", "flush", "all"], check=True)
    start(operator, web)
    report = operator.wait_for("the gate", isolated_as("Enforced"))
    assert set(results(report).values()) == {"confirmed"}


def test_audit_sends_no_path_test(operator: AgentProcess, web: LabPod) -> None:
    with web.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as inside:
        start(operator, web, mode="audit")
        report = operator.wait_for("audit", isolated_as("Audit"))
        assert results(report) == {}
        write_manifest(operator, web, "enforce")
        operator.wait_for("the gate", isolated_as("Enforced"))
        inside.settimeout(0)
        sources = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                sources.add(inside.recvfrom(64)[1][0])
        # The agent itself dials inside the pod, by its loopback.
        assert sources <= {web.ipv4}


def test_path_test_packets_are_in_no_list_of_drops(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web)
    report = operator.wait_for("the gate", isolated_as("Enforced"))
    pod = pod_of(report, "web")
    assert pod is not None
    assert pod.gates[0].packets.get("drop", {}).get("node", 0) == 0
    where = ("--run-directory", str(operator.run_directory))
    done = operator.run("drops", "--output", "json", *where)
    no_drops = {"sources": [], "lostPackets": 0, "rawSockets": [], "namespace": ""}
    assert json.loads(done.stdout) == no_drops
    document = asyncio.run(admin_client.fetch(admin_socket(operator.run_directory), "/drop-events"))
    assert json.loads(document)["events"] == []


def test_drop_is_counted_without_path_tests_after_a_restart(
    operator: AgentProcess, web: LabPod
) -> None:
    start(operator, web)
    operator.wait_for("the gate", isolated_as("Enforced"))
    operator.wait_for(
        "a drop", lambda _: attempts.datagram_from_node(web, "IPv4") == "does not arrive"
    )
    operator.stop(signal.SIGKILL)
    operator.start()
    report = operator.wait_for("the gate", isolated_as("Enforced"))
    pod = pod_of(report, "web")
    assert pod is not None
    assert pod.gates[0].packets["drop"] == {"node": 1}


def test_status_shows_the_path_test_result(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web)
    operator.wait_for(
        "the result", lambda report: set(results(report, "web").values()) == {"confirmed"}
    )
    shown = operator.run("status", "-o", "wide", "--run-directory", str(operator.run_directory))
    assert "confirmed" in shown.stdout


def test_many_pods_are_all_tested(operator: AgentProcess, lab: Lab) -> None:
    pods = [lab.add_pod(f"web{number}", number) for number in range(1, 31)]
    start(operator, *pods)
    report = operator.wait_for(
        "every gate", lambda r: all(isolated_as("Enforced", pod.name)(r) for pod in pods)
    )
    assert {result for pod in pods for result in results(report, pod.name).values()} == {
        "confirmed"
    }
