"""The condition `isolation-ready`, by what the gates, the path test and the relay found."""

import dataclasses
import datetime
import ipaddress

import pytest

from agent import labels
from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.conditions import FALSE, TRUE, Condition
from agent.pods.isolation import (
    is_path_blocked,
    is_path_trusted,
    isolation_status,
    mode_in_force,
)
from agent.pods.pod import Pod
from agent.pods.pod_state import (
    AddressClaims,
    IsolationStatus,
    PathTestRecord,
    PathTestResult,
    PodState,
)
from bpf.verdicts import Mode
from probes.netns import Netns

IPV4, IPV6 = "198.18.1.1", "fd00:18:0:1::1"
NETNS = Netns("/run/netns/web", 4, 1000)
ENFORCED = IsolationStatus(TRUE, "Enforced", "Gate attached to veth1.")
FAILED = IsolationStatus(FALSE, "GateFailed", "Kernel error: busy.")


def gated(mode: Mode = Mode.ENFORCE, status: IsolationStatus | None = ENFORCED) -> PodState:
    veth = HostInterface(7, "veth1")
    addresses = (ipaddress.ip_address(IPV4), ipaddress.ip_address(IPV6))
    return PodState(
        Pod(uid="u", namespace="shop", name="web", mode=mode),
        netns=NETNS,
        network=PodNetwork((veth,), addresses, (), 0),
        claims=AddressClaims(addresses),
        gates={7: veth},
        gated_netns=NETNS,
        status=status,
    )


def record(state: PodState, **results: PathTestResult) -> None:
    """A path test of the pod as it is, with these results for ipv4 and ipv6."""
    assert state.gated_netns is not None
    addresses = {"ipv4": IPV4, "ipv6": IPV6}
    by_address = {addresses[family]: result for family, result in results.items()}
    state.path_test = PathTestRecord(
        state.gated_netns, state.pod.mode, frozenset(state.gates), by_address
    )


def published(state: PodState, relay_problem: str | None = None) -> IsolationStatus | None:
    """As the agent publishes it, with the trust that follows from it."""
    status = isolation_status(state, relay_problem)
    if status and is_path_trusted(state, status):
        state.trusted_netns = state.gated_netns
    return status


def found(state: PodState, ipv4: PathTestResult) -> IsolationStatus:
    record(state, ipv4=ipv4, ipv6=PathTestResult.CONFIRMED)
    status = published(state)
    assert status is not None
    return status


def test_no_status_before_the_first_pass() -> None:
    assert published(gated(status=None)) is None


def test_no_status_before_the_first_path_test() -> None:
    assert published(gated()) is None


UNREACHABLE, CONFIRMED, BYPASSED = (
    PathTestResult.UNREACHABLE,
    PathTestResult.CONFIRMED,
    PathTestResult.BYPASSED,
)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], None),
        ([UNREACHABLE, UNREACHABLE], ENFORCED),
        ([UNREACHABLE, CONFIRMED], None),
        ([UNREACHABLE, BYPASSED], None),
        ([CONFIRMED], None),
    ],
)
def test_where_the_host_reaches_no_pod_the_first_path_test_is_not_waited_for(
    others: list[PathTestResult], expected: IsolationStatus | None
) -> None:
    states = [gated() for _ in others]
    for other, result in zip(states, others, strict=True):
        record(other, ipv4=result, ipv6=result)
    state = gated()
    is_blocked = is_path_blocked([state, *states])
    assert isolation_status(state, None, is_path_blocked=is_blocked) == expected
    # It is not trusted by that.
    record(state, ipv4=BYPASSED, ipv6=UNREACHABLE)
    status = isolation_status(state, None, is_path_blocked=is_blocked)
    assert status is not None
    assert (status.status, status.reason) == (FALSE, "GateBypassed")


def test_a_confirmed_gate_keeps_its_status() -> None:
    assert found(gated(), PathTestResult.CONFIRMED) == ENFORCED


def test_a_bypassed_gate_is_not_ready() -> None:
    status = found(gated(), PathTestResult.BYPASSED)
    assert (status.status, status.reason) == (FALSE, "GateBypassed")
    assert IPV4 in status.message
    assert IPV6 not in status.message


@pytest.mark.parametrize("result", [PathTestResult.UNREACHABLE, PathTestResult.FAILED])
def test_unconfirmed_path_is_ready_with_a_note(result: PathTestResult) -> None:
    status = found(gated(), result)
    assert (status.status, status.reason) == (TRUE, "Enforced")
    assert status.message.startswith(ENFORCED.message)
    assert "Path test " in status.message
    assert IPV4 in status.message


@pytest.mark.parametrize(
    "first", [PathTestResult.CONFIRMED, PathTestResult.UNREACHABLE, PathTestResult.FAILED]
)
def test_ready_once_is_ready_for_the_life_of_the_sandbox(first: PathTestResult) -> None:
    state = gated()
    found(state, first)
    status = found(state, PathTestResult.BYPASSED)
    assert status.status == TRUE
    assert "without passing the gate" in status.message
    state.gated_netns = dataclasses.replace(NETNS, inode=1001)
    assert published(state) is None
    assert found(state, PathTestResult.BYPASSED).status == FALSE


def test_a_gate_that_is_bypassed_at_first_becomes_ready_when_it_no_longer_is() -> None:
    state = gated()
    assert found(state, PathTestResult.BYPASSED).status == FALSE
    assert found(state, PathTestResult.BYPASSED).status == FALSE
    assert found(state, PathTestResult.CONFIRMED) == ENFORCED


def test_a_trusted_pod_keeps_its_status_while_it_is_tested_again() -> None:
    state = gated()
    found(state, PathTestResult.CONFIRMED)
    state.gates[8] = HostInterface(8, "veth2")
    assert state.current_path_test is None
    assert published(state) == ENFORCED


def test_a_result_counts_only_for_the_pod_as_it_was_tested() -> None:
    state = gated()
    found(state, PathTestResult.BYPASSED)
    state.gates[8] = HostInterface(8, "veth2")
    assert state.current_path_test is None
    assert published(state) is None


def test_a_pod_without_confirmed_addresses_waits_while_they_settle() -> None:
    state = gated()
    state.claims = AddressClaims(is_settling=True)
    record(state)
    assert published(state) is None
    state.claims = AddressClaims(is_settling=False)
    assert published(state) == ENFORCED


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        (Mode.AUDIT, IsolationStatus(TRUE, "Audit", "Gate attached to veth1.")),
        (Mode.OFF, IsolationStatus(TRUE, "Off", "Not gated.")),
        (Mode.ENFORCE, FAILED),
        (Mode.STRICT, FAILED),
    ],
)
def test_without_a_path_test_the_gates_alone_decide(mode: Mode, status: IsolationStatus) -> None:
    assert published(gated(mode, status), relay_problem="the relay is starting.") == status


@pytest.mark.parametrize(
    ("problem", "ending"),
    [
        (None, ", so the relay proxies the kubelet's connections."),
        (
            "the relay is starting.",
            ", and the relay does not proxy the kubelet's connections: the relay is starting.",
        ),
    ],
)
def test_pod_in_enforce_that_needs_the_relay_stays_enforced_with_a_note(
    problem: str | None, ending: str
) -> None:
    state = gated()
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    status = isolation_status(state, problem, relay_need="The kubelet cannot reach it")
    assert status is not None
    assert (status.status, status.reason) == (TRUE, "Enforced")
    assert status.message == f"{ENFORCED.message} The kubelet cannot reach it{ending}"


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT])
def test_note_about_the_relay_is_shown_while_it_proxies(mode: Mode) -> None:
    state = gated(mode)
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    for problem in (None, "the relay is starting."):
        status = isolation_status(state, problem, relay_need="Why", relay_note="A note.")
        assert status is not None
        assert status.message.endswith("A note.") is (problem is None)


@pytest.mark.parametrize(
    ("status", "is_shown"),
    [
        (ENFORCED, True),
        (IsolationStatus(TRUE, "Audit", "Gate attached to veth1."), False),
        (FAILED, False),
    ],
)
def test_kubelet_that_is_not_identified_matters_where_gates_drop(
    status: IsolationStatus, is_shown: bool
) -> None:
    state = gated(status=status)
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    shown = isolation_status(state, None, kubelet_problem="Kubelet not identified.")
    assert shown is not None
    assert shown.message.endswith("Kubelet not identified.") is is_shown
    assert (shown.status, shown.reason) == (status.status, status.reason)


def test_path_test_that_failed_is_not_a_path_that_is_blocked() -> None:
    failed = found(gated(), PathTestResult.FAILED).message
    unreachable = found(gated(), PathTestResult.UNREACHABLE).message
    assert f"Path test failed for {IPV4}" in failed
    assert f"packets from the host do not reach {IPV4}" in unreachable


def test_gates_that_failed_after_a_path_test_do_not_earn_trust() -> None:
    state = gated(status=FAILED)
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    assert published(state) == FAILED
    assert state.trusted_netns is None


@pytest.mark.parametrize(
    ("mode", "problem", "reason", "message"),
    [
        (Mode.STRICT, None, "Strict", "Gate attached to veth1."),
        (
            Mode.STRICT,
            "the relay is starting.",
            "Enforced",
            "Gate attached to veth1. Strict unavailable: the relay is starting.",
        ),
        (Mode.ENFORCE, None, "Enforced", "Gate attached to veth1."),
        (Mode.ENFORCE, "Mode is not strict.", "Enforced", "Gate attached to veth1."),
    ],
)
def test_strict_needs_the_relay(mode: Mode, problem: str | None, reason: str, message: str) -> None:
    state = gated(mode)
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    assert published(state, problem) == IsolationStatus(TRUE, reason, message)


def test_a_bypassed_gate_is_not_ready_in_strict_either() -> None:
    state = gated(Mode.STRICT)
    record(state, ipv4=PathTestResult.BYPASSED, ipv6=PathTestResult.CONFIRMED)
    status = published(state)
    assert status is not None
    assert (status.status, status.reason) == (FALSE, "GateBypassed")


def test_without_fallback_a_pod_stays_strict_and_its_probes_fail() -> None:
    state = gated(Mode.STRICT)
    record(state, ipv4=PathTestResult.CONFIRMED, ipv6=PathTestResult.CONFIRMED)
    status = isolation_status(state, "the relay is starting.", has_fallback=False)
    assert status == IsolationStatus(
        TRUE,
        "Strict",
        "Gate attached to veth1. The kubelet's probes fail (--strict-without-fallback): the relay "
        "is starting.",
    )


@pytest.mark.parametrize(
    ("status", "reason", "mode"),
    [
        (TRUE, "Off", Mode.OFF),
        (TRUE, "Audit", Mode.AUDIT),
        (TRUE, "Enforced", Mode.ENFORCE),
        (TRUE, "Strict", Mode.STRICT),
        (TRUE, "HostNetwork", Mode.OFF),
        (FALSE, "Enforced", Mode.OFF),
        (FALSE, "GateBypassed", Mode.OFF),
    ],
)
def test_mode_in_force_is_that_of_the_condition(status: str, reason: str, mode: Mode) -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    found = Condition(labels.ISOLATION_READY, status, reason, "", now)
    assert mode_in_force(found) is mode
    assert mode_in_force(None) is Mode.OFF
