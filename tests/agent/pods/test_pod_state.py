"""What follows from a pod's state: which addresses and path tests count, and what it waits for."""

import asyncio
import dataclasses
import ipaddress

import pytest

from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims, PathTestRecord, PathTestResult, PodState
from bpf.verdicts import Mode
from probes.netns import Netns

NETNS = Netns("/run/netns/web", 4, 1000)
ADDRESS = "198.18.1.1"


def claims(*unconfirmed: str, is_settling: bool = False) -> AddressClaims:
    why = dict.fromkeys(map(ipaddress.ip_address, unconfirmed), "claimed by another pod")
    return AddressClaims(unconfirmed=why, is_settling=is_settling)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (claims(), ""),
        (claims("198.18.0.1", is_settling=True), ""),
        # Istio gives it to each pod.
        (claims("::6"), ""),
        (claims("::6", "198.18.0.1"), "198.18.0.1 is claimed by another pod."),
        (
            claims(*(f"198.18.0.{number}" for number in range(1, 5))),
            "; ".join(f"198.18.0.{number} is claimed by another pod" for number in range(1, 5))
            + ".",
        ),
        (
            claims(*(f"198.18.0.{number}" for number in range(1, 7))),
            "; ".join(f"198.18.0.{number} is claimed by another pod" for number in range(1, 5))
            + "; and 2 more.",
        ),
    ],
)
def test_addresses_that_only_the_pod_claims_are_one_sentence(
    found: AddressClaims, problem: str
) -> None:
    start = "Addresses that only the pod itself claims count in its own gate alone: "
    assert found.problem == (start + problem if problem else "")


def path_test(state: PodState, **results: PathTestResult) -> PathTestRecord:
    """A path test of the pod as it is. results: by number of an address."""
    assert state.gated_netns is not None
    by_address = {f"198.18.1.{number[1:]}": result for number, result in results.items()}
    return PathTestRecord(
        state.gated_netns, state.pod.mode, frozenset(state.gates), by_address or {}
    )


@pytest.fixture
def state() -> PodState:
    veth = HostInterface(7, "veth7")
    return PodState(
        Pod(uid="u", namespace="shop", name="web", mode=Mode.ENFORCE),
        network=PodNetwork((veth, HostInterface(8, "veth8")), (), (), 0),
        claims=AddressClaims((ipaddress.ip_address(ADDRESS),)),
        gates={7: veth, 9: HostInterface(9, "gone")},
        gated_netns=NETNS,
    )


CONFIRMED, UNREACHABLE, FAILED, BYPASSED = (
    PathTestResult.CONFIRMED,
    PathTestResult.UNREACHABLE,
    PathTestResult.FAILED,
    PathTestResult.BYPASSED,
)


def test_worst_result_of_a_path_test_counts(state: PodState) -> None:
    found = [CONFIRMED, UNREACHABLE, FAILED, BYPASSED]
    worst = [
        path_test(state, **{f"a{n}": one for n, one in enumerate(found[:count], 1)}).worst
        for count in range(5)
    ]
    assert worst == [None, *found]


def counting(state: PodState) -> tuple[PathTestRecord | None, PathTestRecord | None]:
    """The path tests that count for the pod as it is, and for its sandbox."""
    return state.current_path_test, state.sandbox_path_test


def test_path_test_counts_for_the_pod_as_it_was(state: PodState) -> None:
    record = state.path_test = path_test(state, a1=CONFIRMED)
    assert counting(state) == (record, record)
    changed = {
        "mode": dataclasses.replace(record, mode=Mode.STRICT),
        "gates": dataclasses.replace(record, gates=frozenset({7})),
        "address": dataclasses.replace(record, results={"198.18.1.9": CONFIRMED}),
    }
    for name, one in changed.items():
        state.path_test = one
        assert counting(state) == (None, one), name
    state.path_test = dataclasses.replace(record, netns=Netns(NETNS.path, 4, 1001))
    assert counting(state) == (None, None)
    state.path_test = None
    assert counting(state) == (None, None)


@pytest.mark.parametrize("mode", Mode)
def test_path_is_tested_where_gates_are_attached_and_drop(state: PodState, mode: Mode) -> None:
    state.pod = Pod(uid="u", namespace="shop", name="web", mode=mode)
    assert state.is_path_tested is (mode in (Mode.ENFORCE, Mode.STRICT))
    gates, state.gates = state.gates, {}
    assert not state.is_path_tested
    state.gates, state.gated_netns = gates, None
    assert not state.is_path_tested


@pytest.mark.looptime
async def test_plugin_may_gate_an_interface_for_a_while(state: PodState) -> None:
    assert not state.awaits_plugin
    state.recheck_until = asyncio.get_running_loop().time() + 5
    await asyncio.sleep(4)
    assert (state.awaits_plugin, state.needs_recheck) == (True, True)
    await asyncio.sleep(1)
    assert (state.awaits_plugin, state.needs_recheck) == (False, False)


def test_interfaces_are_those_of_the_network_and_of_gates(state: PodState) -> None:
    assert state.interface_indexes == {7, 8, 9}
    state.network = None
    assert state.interface_indexes == {7, 9}


def probed(state: PodState) -> tuple[str, ...]:
    """Where probes dial."""
    return state.probe_addresses


def test_probes_dial_what_is_confirmed_and_else_what_the_namespace_shows(state: PodState) -> None:
    shown = ipaddress.ip_address("198.18.1.7")
    network = state.network = PodNetwork((), (shown,), (), 0)
    assert probed(state) == (ADDRESS,)
    state.claims = AddressClaims()
    assert probed(state) == network.probe_addresses != ()
    state.network = None
    assert probed(state) == ()
