"""The sources that a gate would admit today; and a kernel that cannot close a flow."""

import dataclasses
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
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from probes import sock_diag
from probes.netns import Netns

KUBELET, SOURCE, ABOVE, GONE, POD, PODS = 10, 20, 30, 40, 50, 60
CGROUPS = {
    found.id: found
    for found in (
        Cgroup(KUBELET, "/kubelet", (1, KUBELET)),
        Cgroup(SOURCE, "/above/source", (1, ABOVE, SOURCE)),
        Cgroup(ABOVE, "/above", (1, ABOVE)),
        Cgroup(POD, "/pods/pod", (1, PODS, POD)),
    )
}
NODE = NodeFacts(kubelet_cgroup=KUBELET, pods_cgroup=PODS, pods_level=1)


def flow(cgroup: int | None = SOURCE, port: int = 80) -> sock_diag.InetSocket:
    protocol = socket.IPPROTO_TCP
    nowhere = bytes(16)
    return sock_diag.InetSocket(
        socket.AF_INET, protocol, nowhere, 40000, nowhere, port, 0, cgroup, bytes(48)
    )


def access_of(flow: sock_diag.InetSocket, *rules: Rule, node: NodeFacts = NODE) -> Access:
    return AccessCheck(node, 1, CGROUPS).of(rules, flow)


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
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE, level=1), SOURCE, Access.ADMITTED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE, level=1), ABOVE, Access.ADMITTED),
        (Rule(SourceKind.ANCESTOR, cgroup=SOURCE, level=2), ABOVE, Access.DROPPED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE, level=1), KUBELET, Access.DROPPED),
        (Rule(SourceKind.ANCESTOR, cgroup=ABOVE, level=1), GONE, Access.UNKNOWN),
        (Rule(SourceKind.ANCESTOR, cgroup=GONE, level=1), SOURCE, Access.DROPPED),
        (Rule(SourceKind.KUBELET), KUBELET, Access.ADMITTED),
        (Rule(SourceKind.KUBELET), SOURCE, Access.DROPPED),
    ],
)
def test_access_follows_from_the_rule_of_the_gate(
    rule: Rule, cgroup: int | None, access: Access
) -> None:
    assert access_of(flow(cgroup), rule) is access


@pytest.mark.parametrize(
    ("cgroup", "access"),
    [
        (SOURCE, Access.UNKNOWN),
        (GONE, Access.UNKNOWN),
        (POD, Access.DROPPED),
        (None, Access.UNKNOWN),
    ],
)
def test_without_a_kubelet_any_process_outside_pods_may_be_it(
    cgroup: int | None, access: Access
) -> None:
    node = dataclasses.replace(NODE, kubelet_cgroup=0)
    assert access_of(flow(cgroup), Rule(SourceKind.KUBELET), node=node) is access


@pytest.mark.parametrize("found_before", [0, GONE])
def test_kubelet_that_the_kernel_followed_is_admitted(found_before: int) -> None:
    node = NodeFacts(kubelet_cgroup=found_before, remade_cgroup=KUBELET, is_unit_followed=True)
    rule = Rule(SourceKind.KUBELET)
    assert access_of(flow(KUBELET), rule, node=node) is Access.ADMITTED
    assert access_of(flow(SOURCE), rule, node=node) is Access.DROPPED


def test_one_rule_that_admits_is_enough() -> None:
    rules = [Rule(SourceKind.CGROUP, cgroup=ABOVE), Rule(SourceKind.KUBELET), Rule(SourceKind.ANY)]
    assert access_of(flow(), *rules) is Access.ADMITTED


def test_without_rules_no_source_is_admitted() -> None:
    assert access_of(flow()) is Access.DROPPED


class _CannotClose(sock_diag.SockDiag):
    """A kernel without CONFIG_INET_DIAG_DESTROY."""

    def __init__(self) -> None:
        self.attempts = 0

    def destroy(self, destroyed: sock_diag.InetSocket) -> bool:
        self.attempts += 1
        raise OSError(errno.EOPNOTSUPP, "sock_diag: not supported")


class _CanClose(sock_diag.SockDiag):
    def __init__(self) -> None:
        self.closed: list[sock_diag.InetSocket] = []

    def destroy(self, destroyed: sock_diag.InetSocket) -> bool:
        self.closed.append(destroyed)
        return True


class _NoReplies(ReplyTables):
    def __init__(self) -> None:
        pass


def existing(*, closes: bool = True) -> existing_flows.ExistingFlows:
    return existing_flows.ExistingFlows(
        store=PodStore(Conditions()), node=lambda: NODE, replies=_NoReplies(), closes=closes
    )


def counted(
    flows: existing_flows.ExistingFlows,
    host: sock_diag.SockDiag,
    opened: list[sock_diag.InetSocket],
    *rules: Rule,
) -> dict[str, existing_flows.FlowCount]:
    target = existing_flows.EnforcedPod(
        Pod(uid="web", namespace="shop", name="web"),
        Netns("/run/netns/web", 1, 1),
        (7,),
        (bytes(16),),
        rules,
    )
    found: dict[str, existing_flows.FlowCount] = {}
    flows._count_flows(host, opened, {bytes(16): target}, found)
    return found


@pytest.mark.parametrize("closes", [True, False])
def test_flows_that_are_dropped_for_certain_are_closed_if_that_is_enabled(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """The number of a cgroup that is gone may be another's by now."""
    paths = {SOURCE: "/above/source", KUBELET: "/kubelet", GONE: "/new", POD: "/removed"}
    levels = {"/above/source": [1, ABOVE, SOURCE], "/kubelet": [1, KUBELET], "/new": [1, 99]}
    monkeypatch.setattr(existing_flows, "cgroup2_mount", lambda: "/sys/fs/cgroup")
    monkeypatch.setattr(
        existing_flows, "cgroup_paths", lambda ids: {id: paths[id] for id in ids & paths.keys()}
    )
    monkeypatch.setattr(existing_flows, "ancestors", lambda root, path: levels.get(path, []))
    host = _CanClose()
    opened = [flow(SOURCE), flow(KUBELET), flow(GONE), flow(POD), flow(None)]
    rule = Rule(SourceKind.ANCESTOR, cgroup=ABOVE, level=1)
    assert counted(existing(closes=closes), host, opened, rule) == {
        "web": existing_flows.FlowCount(open=3 if closes else 4, closed=int(closes))
    }
    assert host.closed == ([flow(KUBELET)] if closes else [])


def test_a_kernel_that_cannot_close_flows_is_logged_once() -> None:
    host = _CannotClose()
    with structlog.testing.capture_logs() as lines:
        found = counted(existing(), host, [flow(), flow()], Rule(SourceKind.KERNEL))
    assert found == {"web": existing_flows.FlowCount(open=2, closed=0)}
    assert host.attempts == 1
    assert [line["event"] for line in lines] == [Event.EXISTING_FLOWS_NOT_CLOSABLE]
