"""Pods in strict report whether the relay proxies their connections, with a real agent."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.exits import has_ended
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import TRUE, Condition
from bpf import pins
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.secondagent import SecondAgent
from tests.polling import wait_until
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

RANGES = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")
PROBE = {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 3600}}


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()  # strict is not possible without
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(8080) as listener:
        listener.settimeout(None)
        echo = threading.Thread(target=_echo, args=(listener,))
        echo.start()
        yield made
        listener.shutdown(socket.SHUT_RDWR)
        echo.join()


def _echo(listener: socket.socket) -> None:
    """Serve one connection after the other, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while received := connection.recv(100):
                    connection.sendall(received)


def start(operator: AgentProcess, kubelet: Cgroup, *extra: str) -> None:
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES, *extra)


def isolation_of(report: AgentReport, name: str = "web") -> Condition | None:
    return condition_of(report, name, labels.ISOLATION_READY)


def is_strict(report: AgentReport) -> bool:
    condition = isolation_of(report)
    return condition is not None and (condition.status, condition.reason) == (TRUE, "Strict")


def is_enforced(report: AgentReport) -> bool:
    condition = isolation_of(report)
    return condition is not None and (condition.status, condition.reason) == (TRUE, "Enforced")


def is_enforced_because(why: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = isolation_of(report)
        return (
            condition is not None
            and (condition.status, condition.reason) == (TRUE, "Enforced")
            and f"Strict unavailable: {why}" in condition.message
        )

    return holds


def dial(kubelet: Cgroup, address: str) -> str:
    """Result of a connect of the kubelet to port 8080: the peer's address, or the error."""
    script = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], 8080), 2) as s: print(s.getpeername()[0])"
    )
    done = kubelet.run([*BARE_PYTHON, "-c", script, address])
    return done.stdout.decode().strip() or done.stderr.decode().splitlines()[-1]


def relay_pid(operator: AgentProcess) -> int:
    lines = list(operator.log_lines(Event.RELAY_STARTED))
    return int(lines[-1]["pid"])


@contextlib.contextmanager
def tap_inside(pod: LabPod) -> Iterator[None]:
    """As Kata has one, next to the pod's own interface."""
    command = ["nsenter", f"--net={pod.netns.path}", "ip", "tuntap"]
    subprocess.run([*command, "add", "tap0_kata", "mode", "tap"], check=True)
    yield


def manifest(pod: LabPod, **annotations: str) -> str:
    metadata = {
        "name": pod.name,
        "namespace": "demo",
        "labels": {labels.MODE_LABEL: "strict"},
        "annotations": {labels.NETNS_ANNOTATION: pod.netns.path, **annotations},
    }
    container = {"name": "app", "image": "none", **PROBE}
    spec: dict[str, Any] = {"containers": [container]}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def test_pod_is_strict_when_the_relay_has_it_and_its_connections_are_counted(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    for address in (pod.ipv4, pod.ipv6):
        assert dial(kubelet, address) == address

    def has_counted(report: AgentReport) -> bool:
        found = pod_of(report, "web")
        return found is not None and [
            (one.container, one.handler, one.port, one.outcomes) for one in found.relayed
        ] == [("app", "readiness", 8080, {"proxied": 2})]

    report = operator.wait_for("both counted", has_counted)
    with urllib.request.urlopen(f"http://{report.http_address}/metrics", timeout=20) as answer:
        shown = answer.read().decode()
    assert (
        'podgate_relay_connections_total{container="app",handler="readiness",namespace="demo",'
        'outcome="proxied",pod="web"} 2.0'
    ) in shown
    assert 'podgate_component_up{component="relay"} 1.0' in shown


def test_killed_relay_is_reported_replaced_and_leaves_no_interface(
    no_relays: None, operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    os.kill(relay_pid(operator), signal.SIGKILL)
    operator.event(Event.STRICT_UNAVAILABLE, problem="the relay failed: it exited")
    operator.event(Event.CONDITION_CHANGED, type=labels.ISOLATION_READY, reason="Enforced")
    assert dial(kubelet, pod.ipv4) == pod.ipv4
    report = operator.wait_for("strict again", is_strict)
    assert report.relay.restarts == 1
    relays = [name for _, name in socket.if_nameindex() if name.startswith("podgate-relay")]
    assert relays == ["podgate-relay0"]


def test_relay_that_ends_when_no_pod_needs_it_leaves_no_link(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    offers.need_tcx()  # a filter ends with its interface
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    installation = pins.Pins(operator.bpffs)
    *_, started = operator.log_lines(Event.RELAY_STARTED)
    ifindex = socket.if_nametoindex(started["interface"])
    assert _links(installation, ifindex)
    operator.write_manifest(pod, mode="enforce", container=PROBE)
    operator.wait_for("enforced", is_enforced)
    os.kill(relay_pid(operator), signal.SIGKILL)
    wait_until("its links are unpinned", lambda: not _links(installation, ifindex))


def _links(installation: pins.Pins, ifindex: int) -> list[str]:
    return [path.name for path in installation.links.glob(f"*-{ifindex}")]


def test_relay_that_hangs_is_replaced(operator: AgentProcess, pod: LabPod, kubelet: Cgroup) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    os.kill(relay_pid(operator), signal.SIGSTOP)
    operator.event(Event.STRICT_UNAVAILABLE, problem="the relay does not respond")
    operator.event(Event.CONDITION_CHANGED, type=labels.ISOLATION_READY, reason="Enforced")
    assert dial(kubelet, pod.ipv4) == pod.ipv4
    operator.wait_for("strict again", is_strict)


def test_relay_outlives_its_agent_and_the_next_agent_takes_the_next_slot(
    operator: AgentProcess, second: SecondAgent, pod: LabPod, kubelet: Cgroup
) -> None:
    """The agent hands the node over: a relay without an agent runs for half a minute, and an
    emulated machine needs as long to start an agent."""
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    script = (
        "import socket, sys\n"
        "s = socket.create_connection((sys.argv[1], 8080), 2)\n"
        "print('open', flush=True); sys.stdin.readline(); s.sendall(b'x'); print(s.recv(1))"
    )
    arguments = [*BARE_PYTHON, "-c", script, pod.ipv4]
    with kubelet.popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        assert held.stdout.readline() == b"open\n"
        second.start_standby("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
        report = second.wait_for("strict", lambda r: r.pid == second.pid and is_strict(r))
        # The old relay's addresses are blocked for the host like the new ones.
        gated = {gate.interface for gate in report.relay.gates}
        assert gated == {"podgate-relay0", "podgate-relay1"}
        held.stdin.write(b"\n")
        held.stdin.flush()
        assert held.stdout.readline() == b"b'x'\n"
    second.wait_for("the old one gone", lambda report: len(report.relay.gates) == 1)


def test_annotation_keeps_the_relay_off(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_file("web.yaml", manifest(pod, **{labels.RELAY_ANNOTATION: "off"}))
    start(operator, kubelet)
    why = 'Annotation podgate.io/relay is "off".'
    operator.wait_for("the reason", is_enforced_because(why))
    assert dial(kubelet, pod.ipv4) == pod.ipv4
    operator.write_file("web.yaml", manifest(pod))
    operator.wait_for("strict", is_strict)


def test_virtual_machine_stays_enforced(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    with tap_inside(pod):
        operator.write_manifest(pod, mode="strict", container=PROBE)
        start(operator, kubelet)
        why = "The pod runs in a virtual machine behind tap0_kata"
        operator.wait_for("the reason", is_enforced_because(why))


def test_hand_over_on_demand_leaves_one_relay(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    first = relay_pid(operator)
    done = operator.run("relay", "restart", "--run-directory", str(operator.run_directory))
    assert (done.returncode, done.stdout) == (0, "A new relay has taken over.\n")
    assert relay_pid(operator) != first
    assert dial(kubelet, pod.ipv4) == pod.ipv4
    operator.wait_for("the old one gone", lambda report: len(report.relay.gates) == 1)
    assert not [
        line
        for line in operator.log_lines()
        if line["event"] == Event.CONDITION_CHANGED.key
        and line.get("was")
        and line["reason"] != "Strict"
        and line["type"] == labels.ISOLATION_READY
    ]


def test_restart_without_a_relay_is_rejected_with_a_sentence(
    operator: AgentProcess, lab: Lab, kubelet: Cgroup
) -> None:
    start(operator, kubelet)
    operator.wait_for("the agent", lambda report: report.is_synced)
    done = operator.run("relay", "restart", "--run-directory", str(operator.run_directory))
    assert done.returncode == 1
    assert "no relay runs, since no pod is in strict" in done.stderr


def test_connect_to_the_relays_range_is_rejected_counted_and_named(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    with socket.socket() as sock:
        sock.settimeout(2)
        # Rejected by a hook; without hooks in the kernel, dropped.
        assert sock.connect_ex(("198.18.64.16", 8080)) in (errno.EPERM, errno.EAGAIN)
    report = operator.report()
    assert report is not None
    drops = [gate.packets.get("drop", {}).get("node", 0) for gate in report.relay.gates]
    assert sum(drops) >= 1
    done = operator.run("drops", "--run-directory", str(operator.run_directory))
    (line,) = [line for line in done.stdout.splitlines() if "8080" in line]
    assert line.split()[0] == "relay"


def test_relay_whose_interface_is_removed_exits_and_is_replaced(
    no_relays: None, operator: AgentProcess, kubelet: Cgroup, pod: LabPod
) -> None:
    operator.write_file("web.yaml", manifest(pod))
    start(operator, kubelet)
    operator.wait_for("strict", is_strict)
    first = relay_pid(operator)
    subprocess.run(["ip", "link", "del", "podgate-relay0"], check=True)
    operator.wait_for("another relay", lambda _: relay_pid(operator) != first)
    operator.wait_for("strict", is_strict)
    assert has_ended(first)
    assert dial(kubelet, pod.ipv4) == pod.ipv4
