"""The chains of services, and what restores them; tests/proxy has what packets get."""

import asyncio
import ipaddress
import pathlib
import socket

import pytest

from agent.services.client.diff import Change, Differ
from agent.services.linux import iptables as linux_iptables
from agent.services.linux.iptables import IptablesError, IptablesVariant
from agent.services.proxy import iptables
from agent.services.proxy.backend import BackendError
from agent.services.proxy.frontends import Frontend, FrontendTable
from bpf.services.tables import ServiceAddress
from tests.agent.services.proxy.making import address, frontend
from tests.proxy.scene import service

POD_NETWORKS = (ipaddress.ip_network("198.18.128.0/17"), ipaddress.ip_network("fd00:18:1::/48"))
VIP = "-d 198.18.0.1 -p tcp -m tcp --dport 80"


A, B = address("198.18.1.1", 8080), address("198.18.1.2", 8080)


class Chains:
    """Of one frontend at an address, with the contents of what it jumps to."""

    def __init__(
        self, found: Frontend, *, at: ServiceAddress | None = None, has_networks: bool = False
    ) -> None:
        self._at = at or address("198.18.0.1")
        networks = POD_NETWORKS if has_networks else ()
        self.all = iptables.chains_of({self._at: found}, networks, self._at.address.version)

    def of(self, name: str, table: str = "nat") -> tuple[str, ...]:
        return self.all[table, f"PODGATE-{name}"] or ()

    def target(self, rule: str, table: str = "nat") -> tuple[str, ...]:
        """The rules of the chain that this rule ends in."""
        return self.all[table, rule.split()[-1]] or ()


def test_node_without_services_has_the_chains_that_are_always_there() -> None:
    assert iptables.chains_of({}, (), 4) == {
        ("nat", "PODGATE-NODE"): (),
        ("nat", "PODGATE-OUTSIDE"): ("-j PODGATE-NODE",),
        ("nat", "PODGATE-MASK"): ("-j MARK --or-mark 0x4000",),
        ("nat", "PODGATE-HAIRPIN"): (),
        ("nat", "PODGATE-MASQUERADE"): (
            "-m conntrack --ctstate DNAT -j PODGATE-HAIRPIN",
            "-m mark ! --mark 0x4000/0x4000 -j RETURN",
            "-j MARK --and-mark 0xffffbfff",
            "-j MASQUERADE --random-fully",
        ),
        ("mangle", "PODGATE-SOURCES"): (),
        ("filter", "PODGATE-REJECT"): (
            "-p tcp -j REJECT --reject-with tcp-reset",
            "-j REJECT",
        ),
        ("filter", "PODGATE-CHECK"): (),
        ("filter", "PODGATE-CHECK-OUTSIDE"): ("-j PODGATE-CHECK",),
    }


@pytest.mark.parametrize(("version", "network"), [(4, "198.18.128.0/17"), (6, "fd00:18:1::/48")])
def test_pods_of_a_family_count_as_the_node_does(version: int, network: str) -> None:
    chains = iptables.chains_of({}, POD_NETWORKS, version)
    assert chains["nat", "PODGATE-OUTSIDE"] == (f"-s {network} -g PODGATE-NODE", "-j PODGATE-NODE")
    assert chains["filter", "PODGATE-CHECK-OUTSIDE"] == (
        f"-s {network} -g PODGATE-CHECK",
        "-j PODGATE-CHECK",
    )
    assert chains["nat", "PODGATE-MASK"] == (
        f"-s {network} -j RETURN",
        "-j MARK --or-mark 0x4000",
    )


def test_frontends_of_the_other_family_have_no_chain() -> None:
    found = {address("fd00:18::1"): frontend(address("fd00:18:1::1"))}
    assert iptables.chains_of(found, (), 4) == iptables.chains_of({}, (), 4)


@pytest.mark.parametrize(("has_networks", "mark"), [(False, ()), (True, ("-j PODGATE-MASK",))])
def test_cluster_ip_selects_one_of_its_endpoints_at_random(
    has_networks: bool, mark: tuple[str, ...]
) -> None:
    c = address("198.18.1.3", 8080)
    chains = Chains(frontend(A, B, c), has_networks=has_networks)
    (rule,) = chains.of("NODE")
    assert rule.startswith(f"{VIP} -g PODGATE-")
    assert chains.target(rule) == (
        *mark,
        "-m statistic --mode random --probability 0.3333333333 -p tcp -j DNAT "
        "--to-destination 198.18.1.1:8080",
        "-m statistic --mode random --probability 0.5000000000 -p tcp -j DNAT "
        "--to-destination 198.18.1.2:8080",
        "-p tcp -j DNAT --to-destination 198.18.1.3:8080",
    )
    assert chains.of("OUTSIDE")[-1] == "-j PODGATE-NODE"
    assert len(chains.of("OUTSIDE")) == 1 + has_networks
    assert chains.of("CHECK", "filter") == ()


def test_endpoint_of_the_second_family_is_in_brackets() -> None:
    chains = Chains(
        frontend(address("fd00:18:1::1", 53, socket.IPPROTO_UDP)),
        at=address("fd00:18::1", 53, socket.IPPROTO_UDP),
    )
    (rule,) = chains.of("NODE")
    assert rule.startswith("-d fd00:18::1 -p udp -m udp --dport 53 -g PODGATE-")
    assert chains.target(rule) == ("-p udp -j DNAT --to-destination [fd00:18:1::1]:53",)


@pytest.mark.parametrize(
    ("preserves", "mark"), [(False, ("-j MARK --or-mark 0x4000",)), (True, ())]
)
def test_client_outside_is_masqueraded_unless_its_address_is_kept(
    preserves: bool, mark: tuple[str, ...]
) -> None:
    chains = Chains(
        frontend(A, outside=(B,), is_external=True, preserves_client_ip=preserves),
        has_networks=True,
    )
    (node,) = chains.of("NODE")
    _, outside, last = chains.of("OUTSIDE")
    assert last == "-j PODGATE-NODE"
    assert node.startswith(f"{VIP} -g ")
    assert outside.startswith(f"{VIP} -g ")
    # Only cluster IPs are masked for the node itself.
    assert chains.target(node) == ("-p tcp -j DNAT --to-destination 198.18.1.1:8080",)
    assert chains.target(outside) == (
        *mark,
        "-p tcp -j DNAT --to-destination 198.18.1.2:8080",
    )


@pytest.mark.parametrize(("drops", "verdict"), [(False, "-g PODGATE-REJECT"), (True, "-j DROP")])
@pytest.mark.parametrize("is_external", [False, True])
def test_traffic_without_an_endpoint_is_rejected_or_dropped(
    drops: bool, verdict: str, *, is_external: bool
) -> None:
    chains = Chains(frontend(drops=drops, is_external=is_external))
    assert chains.of("NODE") == ()
    assert chains.of("CHECK", "filter") == (f"{VIP} {verdict}",)
    outside = [f"{VIP} -j RETURN"] if is_external else []
    assert chains.of("OUTSIDE") == (*outside, "-j PODGATE-NODE")
    check = [f"{VIP} {verdict}"] if is_external else []
    assert chains.of("CHECK-OUTSIDE", "filter") == (*check, "-j PODGATE-CHECK")


def test_clients_outside_without_an_endpoint_leave_the_nodes_own_theirs() -> None:
    chains = Chains(frontend(A, outside=(), is_external=True, drops=True))
    assert len(chains.of("NODE")) == 1
    assert chains.of("CHECK", "filter") == ()
    assert chains.of("OUTSIDE") == (f"{VIP} -j RETURN", "-j PODGATE-NODE")
    assert chains.of("CHECK-OUTSIDE", "filter") == (f"{VIP} -j DROP", "-j PODGATE-CHECK")


def test_sources_of_a_load_balancer_are_checked_before_the_translation() -> None:
    networks = (ipaddress.ip_network("198.18.7.0/24"), ipaddress.ip_network("198.18.8.1/32"))
    chains = Chains(frontend(A, is_external=True, sources=networks))
    (rule,) = chains.of("SOURCES", "mangle")
    assert rule.startswith(f"{VIP} -j PODGATE-")
    assert chains.target(rule, "mangle") == (
        "-s 198.18.7.0/24 -j RETURN",
        "-s 198.18.8.1/32 -j RETURN",
        "-j DROP",
    )


def test_pod_that_reaches_itself_by_a_service_is_masqueraded() -> None:
    chains = Chains(frontend(A, B, local=frozenset({A, address("198.18.1.1", 9090)})))
    assert chains.of("HAIRPIN") == ("-s 198.18.1.1 -d 198.18.1.1 -j MASQUERADE --random-fully",)


def test_client_with_affinity_gets_its_endpoint_again() -> None:
    chains = Chains(frontend(A, B, affinity_seconds=60))
    (rule,) = chains.of("NODE")
    first, second, random, other = chains.target(rule)
    names = [found.split()[-1] for found in (first, second)]
    for found, endpoint, again in (
        (first, "198.18.1.1", random),
        (second, "198.18.1.2", other),
    ):
        (own,) = chains.target(found)
        name = own.split()[3]
        assert own == (
            f"-m recent --name {name} --set -p tcp -j DNAT --to-destination {endpoint}:8080"
        )
        assert found.startswith(f"-m recent --name {name} --rcheck --seconds 60 --reap -g ")
        assert again.split()[-1] == found.split()[-1]
    assert random == f"-m statistic --mode random --probability 0.5000000000 -g {names[0]}"
    assert other == f"-g {names[1]}"
    assert names[0] != names[1]


def test_services_with_the_same_endpoints_share_a_chain() -> None:
    two = {
        address("198.18.0.1"): frontend(A),
        address("198.18.0.2"): frontend(A, port_id=8),
    }
    first, second = iptables.chains_of(two, (), 4)["nat", "PODGATE-NODE"] or ()
    assert first.split()[-1] == second.split()[-1]
    with_affinity = {key: frontend(A, port_id=n, affinity_seconds=9) for n, key in enumerate(two)}
    first, second = iptables.chains_of(with_affinity, (), 4)["nat", "PODGATE-NODE"] or ()
    assert first.split()[-1] != second.split()[-1]


SAVED = """# Generated
*nat
:PREROUTING ACCEPT [0:0]
:PODGATE-NODE - [0:0]
:OTHER - [0:0]
-A PREROUTING -j PODGATE-OUTSIDE
-A PREROUTING -j OTHER
-A PODGATE-NODE -d 198.18.0.1 -j PODGATE-1
-A OTHER -m comment -j PODGATE-NODE
COMMIT
*filter
:PODGATE-CHECK - [0:0]
-A INPUT -j PODGATE-CHECK
COMMIT
"""


def test_chains_that_are_installed_are_read_with_what_leads_to_them() -> None:
    chains, jumps = iptables.installed(SAVED)
    assert chains == {("nat", "PODGATE-NODE"): None, ("filter", "PODGATE-CHECK"): None}
    assert jumps == {
        "nat": ["PREROUTING -j PODGATE-OUTSIDE", "OTHER -m comment -j PODGATE-NODE"],
        "filter": ["INPUT -j PODGATE-CHECK"],
    }
    assert iptables.installed("") == ({}, {})


def test_script_replaces_chains_and_what_leads_to_them_table_by_table() -> None:
    change: Change[tuple[str, str], tuple[str, ...] | None] = Change(
        added={("nat", "PODGATE-NODE"): ("-j a", "-j b")},
        changed={("filter", "PODGATE-CHECK"): ("-j c",)},
        removed={("nat", "PODGATE-1"): None, ("mangle", "PODGATE-2"): ("-j d",)},
    )
    before, after = {"nat": ["PREROUTING -j old"]}, {"nat": ("PREROUTING -j new", "OUTPUT -j new")}
    assert iptables.script(change, before, after).splitlines() == [
        "*mangle",
        ":PODGATE-2 - [0:0]",
        "-X PODGATE-2",
        "COMMIT",
        "*nat",
        ":PODGATE-NODE - [0:0]",
        ":PODGATE-1 - [0:0]",
        "-D PREROUTING -j old",
        "-I PREROUTING -j new",
        "-I OUTPUT -j new",
        "-A PODGATE-NODE -j a",
        "-A PODGATE-NODE -j b",
        "-X PODGATE-1",
        "COMMIT",
        "*filter",
        ":PODGATE-CHECK - [0:0]",
        "-A PODGATE-CHECK -j c",
        "COMMIT",
    ]


def test_missing_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError) as raised:
        asyncio.run(iptables.IptablesBackend.open())
    assert str(raised.value) == (
        "there is no iptables-save command: install iptables, or use another --backend, such as nft"
    )
    asyncio.run(iptables.remove())


def test_chains_that_cannot_be_removed_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(version: int, variant: IptablesVariant) -> str:
        raise IptablesError("another program has locked them")

    monkeypatch.setattr(linux_iptables, "save", save)
    with pytest.raises(BackendError) as raised:
        asyncio.run(iptables.remove())
    assert str(raised.value).startswith(
        "the proxy's iptables chains cannot be removed: another program has locked them; remove "
    )


def test_change_of_one_service_writes_only_its_chains() -> None:
    table = FrontendTable()
    services = [service(f"s{number}", [], number=number, is_anywhere=False) for number in range(50)]
    for number, one in enumerate(services):
        one.ports[0].endpoints.add(address=f"198.18.4.{number}", port=80, is_internal=True)
    before = iptables.chains_of(table.update(services, ()).changed, (), 4)
    services[7].ports[0].endpoints.add(address="198.18.5.7", port=80, is_internal=True)
    frontends = FrontendTable().update(services, ()).changed
    after = iptables.chains_of(frontends, (), 4)
    text = iptables.script(Differ(before).compare(after), {}, {})
    declared = [line.split()[0] for line in text.splitlines() if line.startswith(":")]
    removed = [line for line in text.splitlines() if line.startswith("-X")]
    assert len(declared) == 3  # the service's chain before and now, and the list of services
    assert len(removed) == 1
