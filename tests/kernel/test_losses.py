"""Gates that are lost or cannot be attached: what the agent reports, and when it retries."""

import contextlib
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE, Condition
from bpf import errors, syscalls
from tests.kernel import foreign, offers

pytestmark = pytest.mark.kernel

LATE_ADDRESS = "198.18.99.9"
EGRESS = syscalls.BPF_TCX_EGRESS


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


def isolation(report: AgentReport) -> Condition | None:
    return condition_of(report, "web", labels.ISOLATION_READY)


def has_condition(status: str, reason: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = isolation(report)
        return condition is not None and (condition.status, condition.reason) == (status, reason)

    return holds


def start(operator: AgentProcess, pod: LabPod, *arguments: str) -> None:
    operator.write_manifest(pod, mode="enforce", container={})
    operator.start(*arguments)


def inside(pod: LabPod, *command: str) -> None:
    subprocess.run(["nsenter", f"--net={pod.netns.path}", *command], check=True)


@contextlib.contextmanager
def full_chain(pod: LabPod) -> Iterator[None]:
    """A chain without room for another program: the kernel's limit is 63 or 64 (BPF_MPROG_MAX)."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(errors.BpfError):
            while True:
                stack.enter_context(foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_UNSPEC))
        yield


@contextlib.contextmanager
def stopped(operator: AgentProcess) -> Iterator[None]:
    """The agent's process does not run meanwhile."""
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(operator.pid, signal.SIGCONT)


def detach_gate(operator: AgentProcess, pod: LabPod) -> None:
    (link,) = operator.bpffs.glob(f"podgate/v*/links/gate_egress-{pod.ifindex}")
    with os.fdopen(syscalls.open_pin(str(link)), "rb") as opened:
        syscalls.link_detach(opened.fileno())
    link.unlink()


def test_gate_that_cannot_be_attached_is_reported_and_retried(
    operator: AgentProcess, pod: LabPod
) -> None:
    offers.need_tcx()
    with full_chain(pod):
        start(operator, pod, "--attach", "tcx")
        report = operator.wait_for("the failure", has_condition(FALSE, "GateFailed"))
        condition = isolation(report)
        assert condition is not None
        assert f"interface {pod.ifindex}" in condition.message
    operator.wait_for("the gate", has_condition(TRUE, "Enforced"))


def test_lost_gate_is_attached_again_and_its_pod_stays_ready(
    operator: AgentProcess, pod: LabPod
) -> None:
    offers.need_tcx()
    start(operator, pod, "--attach", "tcx")
    operator.wait_for("the gate", has_condition(TRUE, "Enforced"))
    (ours,) = syscalls.query_programs(pod.ifindex, EGRESS)
    with full_chain(pod), contextlib.ExitStack() as stack:
        with stopped(operator):  # it would put the gate back
            detach_gate(operator, pod)
            in_its_place = foreign.attached_by_tcx(pod.ifindex, foreign.TC_ACT_UNSPEC)
            stack.enter_context(in_its_place)
        report = operator.wait_for("the loss reported", has_condition(TRUE, "GateLost"))
        assert losses(report) > 0
    operator.wait_for("the gate", lambda _: syscalls.query_programs(pod.ifindex, EGRESS) == [ours])
    changes = [
        line["status"]
        for line in operator.log_lines()
        if line.get("type") == labels.ISOLATION_READY and "status" in line
    ]
    assert FALSE not in changes[1:]


def losses(report: AgentReport) -> float:
    with urllib.request.urlopen(f"http://{report.http_address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("podgate_gates_lost_total ")
    )


def test_lost_filter_is_added_again_at_the_next_poll(operator: AgentProcess, pod: LabPod) -> None:
    start(operator, pod, "--attach", "clsact")
    operator.wait_for("the gate", has_condition(TRUE, "Enforced"))
    subprocess.run(["tc", "qdisc", "del", "dev", pod.interface, "clsact"], check=True)
    inside(
        pod, "ip", "addr", "add", f"{LATE_ADDRESS}/32", "dev", "eth0"
    )  # triggers a reconcile of the pod
    operator.wait_for("the gate", lambda _: "gate_egress" in filters(pod))


def filters(pod: LabPod) -> str:
    command = ["tc", "filter", "show", "dev", pod.interface, "egress"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", ["macvlan", "macvtap"])
def test_interface_that_cannot_be_gated_is_named(
    operator: AgentProcess, pod: LabPod, kind: str
) -> None:
    subprocess.run(["ip", "link", "add", "pgparent", "type", "veth"], check=True)
    try:
        subprocess.run(
            [*("ip", "link", "add", "link", "pgparent", "name", "net1", "type", kind)], check=True
        )
        subprocess.run(["ip", "link", "set", "net1", "netns", pod.netns.path], check=True)
        inside(pod, "ip", "link", "set", "net1", "up")
        start(operator, pod)
        report = operator.wait_for("the interface reported", has_condition(TRUE, "NotSupported"))
    finally:
        subprocess.run(["ip", "link", "del", "pgparent"], check=True)
    condition = isolation(report)
    assert condition is not None
    assert condition.message == f"interface net1 ({kind}) cannot be gated."
    # The other interfaces are gated.
    known = pod_of(report, "web")
    assert known is not None
    assert [gate.interface for gate in known.gates] == [pod.interface]


def test_changes_are_found_despite_lost_netlink_messages(
    operator: AgentProcess, pod: LabPod
) -> None:
    start(operator, pod)
    operator.wait_for("the gate", has_condition(TRUE, "Enforced"))
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        flood_netlink()
        # No other message reports it.
        inside(pod, "ip", "addr", "add", f"{LATE_ADDRESS}/32", "dev", "eth0")
    finally:
        os.kill(operator.pid, signal.SIGCONT)
    operator.wait_for("the loss reported", lambda _: any(operator.log_lines(Event.NETLINK_OVERRUN)))
    operator.wait_for("the new address", lambda r: LATE_ADDRESS in addresses(r))


def addresses(report: AgentReport) -> list[str]:
    known = pod_of(report, "web")
    return [*known.addresses, *known.unconfirmed] if known else []


def flood_netlink() -> None:
    """More messages than an unread socket has room for: 8 MiB, at 1 KiB each or more."""
    lines = [f"link set dev lo alias {number}" for number in range(12_000)]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
