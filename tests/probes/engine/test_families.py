"""A probe dials the families that it names, or both; the result has those that answered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from probes.engine import families, joint, prober
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import IpFamily, IpFamilyPolicy, OtherNetwork, Probe, TcpSocket
from tests.probes.conftest import Sandbox, sandbox_netns

V4, V6 = "198.18.0.1", "fd00:18::1"
PREFER: IpFamilyPolicy = "PreferDualStack"
REQUIRE: IpFamilyPolicy = "RequireDualStack"


@pytest.mark.parametrize(
    ("family", "policy", "addresses", "asked"),
    [
        (None, None, (V4, V6), ((V4, V6),)),
        (None, None, (V6, V4), ((V6, V4),)),
        (None, None, (V6, V6, "fe80::1"), ((V6,),)),
        ("IPv4", None, (V6, V4), ((V4,),)),
        ("IPv6", None, (V4, V6, "fd00:18::2"), ((V6, "fd00:18::2"),)),
        (None, "SingleStack", (V6, V4), ((V6,),)),
        ("IPv4", "SingleStack", (V6, V4), ((V4,),)),
        (None, PREFER, (V4, V6), ((V4,), (V6,))),
        (None, PREFER, (V6,), ((V6,),)),
        ("IPv6", PREFER, (V4, V6), ((V6,), (V4,))),
        ("IPv6", PREFER, (V4,), ((V4,),)),
        (None, REQUIRE, (V6, V4), ((V6,), (V4,))),
        ("IPv4", REQUIRE, (V6, V4), ((V4,), (V6,))),
    ],
)
def test_addresses_are_chosen_by_family_and_policy(
    family: IpFamily | None,
    policy: IpFamilyPolicy | None,
    addresses: tuple[str, ...],
    asked: tuple[tuple[str, ...], ...],
) -> None:
    probe = Probe(TcpSocket(80), ip_family=family, ip_family_policy=policy)
    assert families.groups(probe, addresses) == asked


@pytest.mark.parametrize(
    ("family", "policy", "addresses", "text"),
    [
        (None, None, (), "the pod has no address to probe"),
        (None, None, ("fe80::1",), "the pod has no address to probe"),
        ("IPv6", None, (V4,), "the pod has no IPv6 address to probe"),
        ("IPv4", "SingleStack", (V6,), "the pod has no IPv4 address to probe"),
        (None, REQUIRE, (V4,), "the pod has no IPv6 address to probe"),
        (None, REQUIRE, (V6,), "the pod has no IPv4 address to probe"),
    ],
)
def test_missing_address_is_a_failure_that_names_the_family(
    family: IpFamily | None, policy: IpFamilyPolicy | None, addresses: tuple[str, ...], text: str
) -> None:
    probe = Probe(TcpSocket(80), ip_family=family, ip_family_policy=policy)
    with pytest.raises(families.NoAddressError, match=text):
        families.groups(probe, addresses)
    assert prober.plan(probe, addresses).rejection == text


def test_localhost_is_probed_only_if_the_probe_names_it() -> None:
    probe = Probe(TcpSocket(80), target="localhost")
    assert families.groups(probe, (V4,)) == (("127.0.0.1", "::1"),)
    only_v6 = Probe(TcpSocket(80), target="localhost", ip_family="IPv6")
    assert families.groups(only_v6, (V4,)) == (("::1",),)


INTERFACES = families.PodInterfaces(
    {"eth0": (V4,), "net1": ("198.18.9.1", "fd00:18:9::1", "fe80::9")}, {"shop/storage": "net1"}
)


@pytest.mark.parametrize(
    "target", [OtherNetwork(interface="net1"), OtherNetwork(network="shop/storage")]
)
def test_further_network_is_probed_at_the_addresses_of_its_interface(target: OtherNetwork) -> None:
    found = families.groups(Probe(TcpSocket(80), target=target), (V4, V6), INTERFACES)
    assert found == (("198.18.9.1", "fd00:18:9::1"),)
    both = Probe(TcpSocket(80), target=target, ip_family_policy=PREFER)
    assert families.groups(both, (V4,), INTERFACES) == (("198.18.9.1",), ("fd00:18:9::1",))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (OtherNetwork(interface="net2"), 'the pod has no interface "net2" with an address'),
        (OtherNetwork(network="shop/x"), 'the pod has no interface of the network "shop/x"'),
    ],
)
def test_missing_network_is_a_failure_that_names_it_and_no_verdict(
    target: OtherNetwork, text: str
) -> None:
    plan = prober.plan(Probe(TcpSocket(80), target=target), (V4,), INTERFACES)
    assert (plan.rejection, plan.is_unknown) == (text, True)


async def run_probe(
    sandbox: Sandbox,
    port: int,
    *addresses: str,
    family: IpFamily | None = None,
    policy: IpFamilyPolicy | None = None,
    localhost: bool = False,
) -> ProbeOutcome:
    probe = Probe(
        TcpSocket(port),
        timeout_seconds=5.0,
        ip_family=family,
        ip_family_policy=policy,
        target="localhost" if localhost else "pod",
    )
    return await prober.probe(probe, netns=sandbox.netns, addresses=addresses or (V4, V6))


@contextlib.contextmanager
def listening(sandbox: Sandbox, *addresses: str) -> Iterator[int]:
    """All of them on one port."""
    with contextlib.ExitStack() as stack:
        port = 0
        for address in addresses:
            sock = stack.enter_context(sandbox.listen(address, port))
            port = sock.getsockname()[1]
        yield port


@pytest.mark.kernel
@pytest.mark.parametrize(("served", "family"), [(V4, "IPv4"), (V6, "IPv6")])
@pytest.mark.parametrize("addresses", [(V4, V6), (V6, V4)])
async def test_one_family_is_enough_and_is_named(
    shared_sandbox: Sandbox, served: str, family: str, addresses: tuple[str, ...]
) -> None:
    with listening(shared_sandbox, served) as port:
        outcome = await run_probe(shared_sandbox, port, *addresses)
    assert (outcome.result, outcome.address) == (ProbeResult.SUCCESS, served)
    assert outcome.families == (family,)


@pytest.mark.kernel
@pytest.mark.parametrize("policy", [PREFER, REQUIRE])
async def test_dual_stack_policies_need_both_families(
    shared_sandbox: Sandbox, policy: IpFamilyPolicy
) -> None:
    with listening(shared_sandbox, V4) as port:
        outcome = await run_probe(shared_sandbox, port, policy=policy)
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message == f"dial tcp [{V6}]:{port}: connect: connection refused"
    assert outcome.families == ("IPv6",)
    with listening(shared_sandbox, V4, V6) as port:
        outcome = await run_probe(shared_sandbox, port, policy=policy)
    assert outcome.result is ProbeResult.SUCCESS
    assert outcome.families == ("IPv4", "IPv6")


@pytest.mark.kernel
async def test_failures_of_both_families_are_both_reported(shared_sandbox: Sandbox) -> None:
    outcome = await run_probe(shared_sandbox, 9, policy=REQUIRE)
    assert outcome.families == ("IPv4", "IPv6")
    assert f"{V4}:9" in outcome.message
    assert f"[{V6}]:9" in outcome.message


@pytest.mark.kernel
async def test_named_family_is_the_only_one_probed(shared_sandbox: Sandbox) -> None:
    with listening(shared_sandbox, V4) as port:
        outcome = await run_probe(shared_sandbox, port, family="IPv6")
    assert (outcome.result, outcome.families) == (ProbeResult.FAILURE, ("IPv6",))


@pytest.mark.kernel
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_localhost_server_passes_only_by_request(
    shared_sandbox: Sandbox, address: str
) -> None:
    with listening(shared_sandbox, address) as port:
        assert not (await run_probe(shared_sandbox, port)).passed
        assert (await run_probe(shared_sandbox, port, localhost=True)).address == address


@pytest.mark.kernel
async def test_localhost_of_one_pod_is_not_anothers() -> None:
    with sandbox_netns() as first, sandbox_netns() as second, listening(first, "::1") as port:
        assert (await run_probe(first, port, localhost=True)).passed
        assert not (await run_probe(second, port, localhost=True)).passed


def outcome(result: ProbeResult, address: str, *, error: bool = False) -> ProbeOutcome:
    return ProbeOutcome(result, f"{result} {address}", error, 0.5, address)


def test_warning_of_one_family_is_kept() -> None:
    both = [outcome(ProbeResult.SUCCESS, V4), outcome(ProbeResult.WARNING, V6)]
    assert joint.together(both).result is ProbeResult.WARNING


def test_pods_failure_counts_for_more_than_the_probers() -> None:
    both = [outcome(ProbeResult.UNKNOWN, V4, error=True), outcome(ProbeResult.FAILURE, V6)]
    assert joint.together(both) == outcome(ProbeResult.FAILURE, V6)


def test_failures_of_both_families_are_one_with_both_addresses() -> None:
    both = [outcome(ProbeResult.FAILURE, V4), outcome(ProbeResult.FAILURE, V6)]
    found = joint.together(both)
    assert (found.address, found.other_address) == (V4, V6)
    assert found.message == f"{both[0].message}; {both[1].message}"
    assert joint.together([both[0], outcome(ProbeResult.SUCCESS, V6)]).other_address is None


@pytest.mark.parametrize(
    ("both", "found"),
    [
        (
            (ProbeOutcome(ProbeResult.SUCCESS, "a", False, 0.5, V4),) * 2,
            ProbeOutcome(ProbeResult.SUCCESS, "a", False, 0.5, V4, V4),
        ),
        (
            (
                ProbeOutcome(ProbeResult.SUCCESS, "a", False, 0.25, V4),
                ProbeOutcome(ProbeResult.WARNING, "b", False, 0.5, V6),
            ),
            ProbeOutcome(ProbeResult.WARNING, "b", False, 0.5, V4, V6),
        ),
        (
            (
                ProbeOutcome(ProbeResult.FAILURE, "a", False, 0.5, V4),
                ProbeOutcome(ProbeResult.FAILURE, "a", False, 0.75, V6),
            ),
            ProbeOutcome(ProbeResult.FAILURE, "a", False, 0.75, V4, V6),
        ),
        (
            (
                ProbeOutcome(ProbeResult.UNKNOWN, "a", True, 0.5, V4),
                ProbeOutcome(ProbeResult.SUCCESS, "b", False, 0.25, V6),
            ),
            ProbeOutcome(ProbeResult.UNKNOWN, "a", True, 0.5, V4),
        ),
    ],
)
def test_outcome_of_both_families_has_the_longer_duration(
    both: tuple[ProbeOutcome, ...], found: ProbeOutcome
) -> None:
    assert joint.together(list(both)) == found


class Run:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_outcome_is_reported_once_all_runs_have_ended() -> None:
    reported: list[ProbeOutcome] = []
    run = joint.JointRun(2, reported.append)
    run.ender(1)(outcome(ProbeResult.FAILURE, V6))
    assert (run.over, reported) == (False, [])
    run.ender(0)(outcome(ProbeResult.SUCCESS, V4))
    assert (run.over, reported) == (True, [outcome(ProbeResult.FAILURE, V6)])


def test_cancelled_run_reports_nothing() -> None:
    reported: list[ProbeOutcome] = []
    run = joint.JointRun(2, reported.append)
    runs = [Run(), Run()]
    for each in runs:
        run.add(each)
    run.ender(0)(outcome(ProbeResult.SUCCESS, V4))
    run.cancel()
    assert run.over
    assert [each.cancelled for each in runs] == [True, True]
    run.ender(1)(outcome(ProbeResult.SUCCESS, V6))
    assert reported == []
