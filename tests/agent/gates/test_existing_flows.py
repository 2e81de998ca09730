"""Whom a gate would let in today, as the gate says it; and a kernel that cannot end a flow."""

import errno
import socket

import pytest
import structlog.testing

from agent.gates import existing_flows
from agent.gates.existing_flows import Access, AccessCheck
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.replies import ReplyTables
from bpf.rules import Rule, SourceKind
from probes import sock_diag
from probes.netns import Netns

KUBELET, SENDER, ABOVE, GONE = 10, 20, 30, 40
PATHS = {SENDER: "/above/sender", ABOVE: "/above", KUBELET: "/kubelet"}


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        existing_flows,
        "cgroup_paths",
        lambda wanted: {cgroup: PATHS[cgroup] for cgroup in wanted if cgroup in PATHS},
    )


def flow(cgroup: int | None = SENDER, port: int = 80) -> sock_diag.InetSocket:
    protocol = socket.IPPROTO_TCP
    nowhere = bytes(16)
    return sock_diag.InetSocket(
        socket.AF_INET, protocol, nowhere, 40000, nowhere, port, 0, cgroup, bytes(48)
    )


@pytest.mark.parametrize(
    ("rule", "cgroup", "entrance"),
    [
        (Rule(SourceKind.ANY), SENDER, Access.OPEN),
        (Rule(SourceKind.ANY), None, Access.OPEN),
        (Rule(SourceKind.ANY, socket.IPPROTO_UDP), SENDER, Access.SHUT),
        (Rule(SourceKind.ANY, socket.IPPROTO_TCP, 80, 80), SENDER, Access.OPEN),
        (Rule(SourceKind.ANY, socket.IPPROTO_TCP, 81, 90), SENDER, Access.SHUT),
        (Rule(SourceKind.KERNEL), SENDER, Access.SHUT),
        (Rule(SourceKind.CGROUP, cgroup=SENDER), SENDER, Access.OPEN),
        (Rule(SourceKind.CGROUP, cgroup=ABOVE), SENDER, Access.SHUT),
        (Rule(SourceKind.CGROUP, cgroup=SENDER), None, Access.UNKNOWN),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), SENDER, Access.OPEN),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), ABOVE, Access.OPEN),
        (Rule(SourceKind.ANCESTOR, cgroup=SENDER), ABOVE, Access.SHUT),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), KUBELET, Access.SHUT),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), GONE, Access.UNKNOWN),
        (Rule(SourceKind.ANCESTOR, cgroup=GONE), SENDER, Access.SHUT),
        (Rule(SourceKind.KUBELET), KUBELET, Access.OPEN),
        (Rule(SourceKind.KUBELET), SENDER, Access.SHUT),
    ],
)
def test_an_entrance_is_what_the_gate_s_rule_says(
    rule: Rule, cgroup: int | None, entrance: Access
) -> None:
    assert AccessCheck(KUBELET, {cgroup}).of([rule], flow(cgroup)) is entrance


def test_while_no_kubelet_is_known_anybody_may_be_it() -> None:
    assert AccessCheck(0, {SENDER}).of([Rule(SourceKind.KUBELET)], flow()) is Access.UNKNOWN


def test_one_rule_that_lets_in_is_enough() -> None:
    rules = [Rule(SourceKind.CGROUP, cgroup=ABOVE), Rule(SourceKind.KUBELET), Rule(SourceKind.ANY)]
    assert AccessCheck(0, {SENDER}).of(rules, flow()) is Access.OPEN


def test_without_rules_nobody_is_let_in() -> None:
    assert AccessCheck(KUBELET, {SENDER}).of([], flow()) is Access.SHUT


class _CannotEnd(sock_diag.SockDiag):
    """As of a kernel without CONFIG_INET_DIAG_DESTROY."""

    def __init__(self) -> None:
        self.asked = 0

    def destroy(self, destroyed: sock_diag.InetSocket) -> bool:
        self.asked += 1
        raise OSError(errno.EOPNOTSUPP, "sock_diag: not supported")


class _NoReplies(ReplyTables):
    def __init__(self) -> None:
        pass


def test_a_kernel_that_cannot_end_flows_is_told_of_once() -> None:
    flows = existing_flows.ExistingFlows(
        store=PodStore(Conditions()),
        kubelet_cgroup=lambda: KUBELET,
        replies=_NoReplies(),
        ends=True,
    )
    target = existing_flows.EnforcedPod(
        Pod(uid="web", namespace="shop", name="web"),
        Netns("/run/netns/web", 1, 1),
        (7,),
        (bytes(16),),
        (Rule(SourceKind.KERNEL),),
    )
    node = _CannotEnd()
    found: dict[str, existing_flows.FlowCount] = {}
    with structlog.testing.capture_logs() as lines:
        flows._judge(node, [flow(), flow()], {bytes(16): target}, found)
    assert found == {"web": existing_flows.FlowCount(going_on=2, ended=0)}
    assert node.asked == 1
    assert [line["event"] for line in lines] == [Event.EXISTING_FLOWS_NOT_CLOSABLE]
