"""The sources that a gate would admit today; and a kernel that cannot close a flow."""

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

KUBELET, SOURCE, ABOVE, GONE = 10, 20, 30, 40
PATHS = {SOURCE: "/above/source", ABOVE: "/above", KUBELET: "/kubelet"}


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        existing_flows,
        "cgroup_paths",
        lambda cgroups: {cgroup: PATHS[cgroup] for cgroup in cgroups if cgroup in PATHS},
    )


def flow(cgroup: int | None = SOURCE, port: int = 80) -> sock_diag.InetSocket:
    protocol = socket.IPPROTO_TCP
    nowhere = bytes(16)
    return sock_diag.InetSocket(
        socket.AF_INET, protocol, nowhere, 40000, nowhere, port, 0, cgroup, bytes(48)
    )


@pytest.mark.parametrize(
    ("rule", "cgroup", "access"),
    [
        (Rule(SourceKind.ANY), SOURCE, Access.ADMITTED),
        (Rule(SourceKind.ANY), None, Access.ADMITTED),
        (Rule(SourceKind.ANY, socket.IPPROTO_UDP), SOURCE, Access.DROPPED),
        (Rule(SourceKind.ANY, socket.IPPROTO_TCP, 80, 80), SOURCE, Access.ADMITTED),
        (Rule(SourceKind.ANY, socket.IPPROTO_TCP, 81, 90), SOURCE, Access.DROPPED),
        (Rule(SourceKind.KERNEL), SOURCE, Access.DROPPED),
        (Rule(SourceKind.CGROUP, cgroup=SOURCE), SOURCE, Access.ADMITTED),
        (Rule(SourceKind.CGROUP, cgroup=ABOVE), SOURCE, Access.DROPPED),
        (Rule(SourceKind.CGROUP, cgroup=SOURCE), None, Access.UNKNOWN),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), SOURCE, Access.ADMITTED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), ABOVE, Access.ADMITTED),
        (Rule(SourceKind.ANCESTOR, cgroup=SOURCE), ABOVE, Access.DROPPED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), KUBELET, Access.DROPPED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE), GONE, Access.UNKNOWN),
        (Rule(SourceKind.ANCESTOR, cgroup=GONE), SOURCE, Access.DROPPED),
        (Rule(SourceKind.KUBELET), KUBELET, Access.ADMITTED),
        (Rule(SourceKind.KUBELET), SOURCE, Access.DROPPED),
    ],
)
def test_access_follows_from_the_rule_of_the_gate(
    rule: Rule, cgroup: int | None, access: Access
) -> None:
    assert AccessCheck(KUBELET, {cgroup}).of([rule], flow(cgroup)) is access


def test_without_a_kubelet_any_process_may_be_it() -> None:
    assert AccessCheck(0, {SOURCE}).of([Rule(SourceKind.KUBELET)], flow()) is Access.UNKNOWN


def test_one_rule_that_admits_is_enough() -> None:
    rules = [Rule(SourceKind.CGROUP, cgroup=ABOVE), Rule(SourceKind.KUBELET), Rule(SourceKind.ANY)]
    assert AccessCheck(0, {SOURCE}).of(rules, flow()) is Access.ADMITTED


def test_without_rules_no_source_is_admitted() -> None:
    assert AccessCheck(KUBELET, {SOURCE}).of([], flow()) is Access.DROPPED


class _CannotClose(sock_diag.SockDiag):
    """A kernel without CONFIG_INET_DIAG_DESTROY."""

    def __init__(self) -> None:
        self.attempts = 0

    def destroy(self, destroyed: sock_diag.InetSocket) -> bool:
        self.attempts += 1
        raise OSError(errno.EOPNOTSUPP, "sock_diag: not supported")


class _NoReplies(ReplyTables):
    def __init__(self) -> None:
        pass


def test_a_kernel_that_cannot_close_flows_is_logged_once() -> None:
    flows = existing_flows.ExistingFlows(
        store=PodStore(Conditions()),
        kubelet_cgroup=lambda: KUBELET,
        replies=_NoReplies(),
        closes=True,
    )
    target = existing_flows.EnforcedPod(
        Pod(uid="web", namespace="shop", name="web"),
        Netns("/run/netns/web", 1, 1),
        (7,),
        (bytes(16),),
        (Rule(SourceKind.KERNEL),),
    )
    host = _CannotClose()
    found: dict[str, existing_flows.FlowCount] = {}
    with structlog.testing.capture_logs() as lines:
        flows._count_flows(host, [flow(), flow()], {bytes(16): target}, found)
    assert found == {"web": existing_flows.FlowCount(open=2, closed=0)}
    assert host.attempts == 1
    assert [line["event"] for line in lines] == [Event.EXISTING_FLOWS_NOT_CLOSABLE]
