"""What `isolation-ready` says, by what the gates came to and what the self-test found."""

import dataclasses
import ipaddress
from collections.abc import Mapping

import pytest

from agent.gates import path_test
from agent.gates.path_test import PathTester, PathTestResult
from agent.linux.pod_network import NodeInterface, PodNetwork
from agent.metrics import Metrics
from agent.pods.conditions import FALSE, TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims, IsolationStatus, PodState
from bpf.path_tests import PathTestCounters
from bpf.verdicts import Mode
from probes.netns import Netns

IPV4, IPV6 = "198.18.1.1", "fd00:18:0:1::1"
NETNS = Netns("/run/netns/web", 4, 1000)
ENFORCED = IsolationStatus(TRUE, "Enforced", "Gate on veth1.")


class _NoGates(PathTestCounters):
    def __init__(self) -> None:
        pass


def guarded(mode: Mode = Mode.ENFORCE) -> PodState:
    veth = NodeInterface(7, "veth1")
    addresses = (ipaddress.ip_address(IPV4), ipaddress.ip_address(IPV6))
    return PodState(
        Pod(uid="u", namespace="shop", name="web", mode=mode),
        netns=NETNS,
        network=PodNetwork((veth,), addresses, (), 0),
        claims=AddressClaims(addresses),
        gates={7: veth},
        gated_netns=NETNS,
    )


@pytest.fixture
def self_test() -> PathTester:
    return PathTester(_NoGates(), Metrics(Conditions()), lambda uid: None)


def found(
    self_test: PathTester,
    pod: PodState,
    ipv4: PathTestResult,
    ipv6: PathTestResult = PathTestResult.CONFIRMED,
) -> IsolationStatus | None:
    """What is said after a self-test with these results."""
    results: Mapping[str, PathTestResult] = {IPV4: ipv4, IPV6: ipv6}
    assert pod.gated_netns is not None
    tested = path_test.PathTestRecord(
        pod.gated_netns, pod.pod.mode, frozenset(pod.gates), dict(results)
    )
    self_test._note(pod, tested)
    return self_test.judge(pod, ENFORCED)


def test_a_pod_of_which_nothing_is_confirmed_yet_waits_for_its_condition(
    self_test: PathTester,
) -> None:
    pod = guarded()
    pod.claims = AddressClaims(is_settling=True)
    assert pod.gated_netns is not None
    tested = path_test.PathTestRecord(pod.gated_netns, pod.pod.mode, frozenset(pod.gates), {})
    self_test._note(pod, tested)
    assert self_test.judge(pod, ENFORCED) is None
    pod.claims = AddressClaims(is_settling=False)
    assert self_test.judge(pod, ENFORCED) == ENFORCED


def test_nothing_is_said_before_the_first_result(self_test: PathTester) -> None:
    assert self_test.judge(guarded(), ENFORCED) is None


def test_a_confirmed_gate_is_what_was_said_of_it(self_test: PathTester) -> None:
    assert found(self_test, guarded(), PathTestResult.CONFIRMED) == ENFORCED


def test_a_bypassed_gate_is_not_ready(self_test: PathTester) -> None:
    said = found(self_test, guarded(), PathTestResult.BYPASSED)
    assert said is not None
    assert (said.status, said.reason) == (FALSE, "GateBypassed")
    assert IPV4 in said.message
    assert IPV6 not in said.message


@pytest.mark.parametrize("result", [PathTestResult.UNREACHABLE, PathTestResult.FAILED])
def test_what_cannot_be_confirmed_is_ready_and_said(
    self_test: PathTester, result: PathTestResult
) -> None:
    said = found(self_test, guarded(), result)
    assert said is not None
    assert (said.status, said.reason) == (TRUE, "Enforced")
    assert "Not confirmed by a self-test: " in said.message
    assert IPV4 in said.message


def test_ready_once_is_ready_for_the_sandbox_s_life(self_test: PathTester) -> None:
    pod = guarded()
    found(self_test, pod, PathTestResult.CONFIRMED)
    said = found(self_test, pod, PathTestResult.BYPASSED)
    assert said is not None
    assert said.status == TRUE
    assert "past the gate" in said.message
    pod.gated_netns = dataclasses.replace(NETNS, inode=1001)
    assert self_test.judge(pod, ENFORCED) is None
    said = found(self_test, pod, PathTestResult.BYPASSED)
    assert said is not None
    assert said.status == FALSE


def test_a_result_counts_only_for_the_pod_as_it_was_tested(self_test: PathTester) -> None:
    pod = guarded()
    found(self_test, pod, PathTestResult.BYPASSED)
    pod.gates[8] = NodeInterface(8, "veth2")
    assert self_test.of(pod) is None
    assert self_test.judge(pod, ENFORCED) is None


@pytest.mark.parametrize(
    ("mode", "isolation"),
    [
        (Mode.AUDIT, IsolationStatus(TRUE, "Audit", "Gate on veth1.")),
        (Mode.OFF, IsolationStatus(TRUE, "Off", "Not gated.")),
        (Mode.ENFORCE, IsolationStatus(FALSE, "GateFailed", "The kernel refused.")),
    ],
)
def test_where_nothing_is_to_be_tested_the_gates_alone_say(
    self_test: PathTester, mode: Mode, isolation: IsolationStatus
) -> None:
    assert self_test.judge(guarded(mode), isolation) == isolation


def test_a_pod_that_is_gone_leaves_nothing(self_test: PathTester) -> None:
    pod = guarded()
    found(self_test, pod, PathTestResult.CONFIRMED)
    self_test.forget("u")
    assert self_test.status(pod) == []
    assert self_test.judge(pod, ENFORCED) is None
