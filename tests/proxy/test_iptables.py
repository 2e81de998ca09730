"""iptables: what other programs and other processes of the proxy do to its chains."""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.services.linux.iptables import IptablesVariant
from agent.services.proxy import iptables
from agent.services.proxy.backend import BackendError
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

_VARIANTS = [IptablesVariant.NFT, IptablesVariant.LEGACY]
# Each service's first client gets one of three endpoints: without its session, all of them would
# get the same endpoint again once in 3**12 runs.
_SERVICES = 12


@pytest.fixture(params=_VARIANTS, ids=["nft", "legacy"])
def variant(request: pytest.FixtureRequest, isolated: None) -> Iterator[IptablesVariant]:
    chosen = request.param
    assert isinstance(chosen, IptablesVariant)
    with scene.routed():
        yield chosen
        asyncio.run(iptables.remove())


def opened(variant: IptablesVariant) -> Proxy:
    return Proxy(asyncio.run(iptables.IptablesBackend.open(variant=variant)))


def run(variant: IptablesVariant, *arguments: str) -> None:
    subprocess.run([f"iptables{variant.value}", "--wait", *arguments], check=True)


def saved(variant: IptablesVariant) -> list[str]:
    """Rules and chains of all tables, without comments and counters."""
    output = subprocess.run(
        [f"iptables{variant.value}-save"], check=True, capture_output=True, text=True
    ).stdout
    return [line.partition(" [")[0] for line in output.splitlines() if line[0] != "#"]


@pytest.mark.kernel
def test_flushed_chains_are_complete_after_two_changes(
    variant: IptablesVariant, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    """`iptables -t nat -F`, as the restart of a firewall does it, removes the jumps to ours."""
    proxy = opened(variant)
    web = service("web", endpoints(pods[0]))
    proxy.serve(web)
    run(variant, "-t", "nat", "-F")
    with pytest.raises(BackendError, match="iptables cannot apply the services"):
        proxy.serve(web, service("other", endpoints(pods[1]), number=1))
    proxy.serve(web, service("third", endpoints(pods[2]), number=2))
    assert request(cluster_ip(4)) == "one"
    assert request(cluster_ip(4, 2)) == "three"


@pytest.mark.kernel
def test_next_process_keeps_sessions_and_removes_old_chains(
    variant: IptablesVariant, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    services = [
        service(f"s{number}", endpoints(*pods), number=number, affinity_seconds=600)
        for number in range(_SERVICES)
    ]
    gone = service("gone", endpoints(pods[1]), number=_SERVICES)
    opened(variant).serve_all([*services, gone])
    before = [request(cluster_ip(4, number)) for number in range(_SERVICES)]
    chains = len([line for line in saved(variant) if line.startswith(":PODGATE-")])
    opened(variant).serve_all(services)
    assert [request(cluster_ip(4, number)) for number in range(_SERVICES)] == before
    after = [line for line in saved(variant) if line.startswith(":PODGATE-")]
    assert len(after) == chains - 1
    jumps = [line for line in saved(variant) if line.startswith("-A PREROUTING")]
    assert len(jumps) == 2  # of nat and mangle


@pytest.mark.kernel
def test_rules_of_other_programs_stay(
    variant: IptablesVariant, pods: list[labs.LabPod], servers: scene.Servers
) -> None:
    """Also those that have our mark in their text, but not our chains."""
    for rule in (
        ("-t", "nat", "-N", "KUBE-SERVICES"),
        ("-t", "nat", "-A", "PREROUTING", "-j", "KUBE-SERVICES"),
        ("-A", "INPUT", "-m", "comment", "--comment", "no PODGATE-NODE", "-j", "ACCEPT"),
    ):
        run(variant, *rule)
    try:
        proxy = opened(variant)
        proxy.serve()
        empty = set(saved(variant))
        proxy.serve(service("web", endpoints(pods[0]), affinity_seconds=600))
        assert request(cluster_ip(4)) == "one"
        proxy.serve()
        assert set(saved(variant)) == empty
        asyncio.run(iptables.remove())
        left = saved(variant)
        assert not [line for line in left if "PODGATE-" in line and "comment" not in line]
        assert "-A PREROUTING -j KUBE-SERVICES" in left
        assert '-A INPUT -m comment --comment "no PODGATE-NODE" -j ACCEPT' in left
    finally:
        run(variant, "-F", "INPUT")
        run(variant, "-t", "nat", "-F", "PREROUTING")
        run(variant, "-t", "nat", "-X", "KUBE-SERVICES")
