"""The nftables entries of a frontend; tests/proxy has what packets get."""

import ipaddress
import socket

import pytest

from agent.services.proxy import nft_entries
from agent.services.proxy.nft_entries import READY_COUNTS, AffinitySet, NftChain, NftElement
from bpf.services.tables import ServiceAddress
from tests.agent.services.proxy.making import address, frontend

A, B = address("198.18.1.1", 8080), address("198.18.1.2", 8080)
VIP = address("198.18.0.1")
KEY = "198.18.0.1 . tcp . 80"


def test_cluster_ip_has_an_element_for_each_endpoint() -> None:
    assert list(nft_entries.entries_of(VIP, frontend(A, B))) == [
        NftElement("cluster_ips4", "198.18.0.1"),
        NftElement("endpoints4", f"{KEY} . 0", "198.18.1.1 . 8080"),
        NftElement("endpoints4", f"{KEY} . 1", "198.18.1.2 . 8080"),
        NftElement("services4", KEY, "goto endpoints4-2"),
    ]


def test_entries_of_the_second_family_are_in_its_own_containers() -> None:
    at, endpoint = address("fd00:18::1", 53, socket.IPPROTO_UDP), address("fd00:18:1::1", 5353)
    key = "fd00:18::1 . udp . 53"
    found = nft_entries.entries_of(at, frontend(endpoint, local=frozenset({endpoint})))
    assert list(found) == [
        NftElement("cluster_ips6", "fd00:18::1"),
        NftElement("hairpin6", "fd00:18:1::1 . fd00:18:1::1"),
        NftElement("endpoints6", f"{key} . 0", "fd00:18:1::1 . 5353"),
        NftElement("services6", key, "goto endpoints6-1"),
    ]


@pytest.mark.parametrize(("drops", "verdict"), [(False, "goto reject_traffic"), (True, "drop")])
@pytest.mark.parametrize("is_external", [False, True])
def test_address_without_an_endpoint_has_a_verdict(
    drops: bool, verdict: str, *, is_external: bool
) -> None:
    found = list(nft_entries.entries_of(VIP, frontend(drops=drops, is_external=is_external)))
    no_endpoints = NftElement("no_endpoints4", KEY, verdict)
    if is_external:
        assert found == [
            no_endpoints,
            NftElement("outside4", KEY, "accept"),
            NftElement("no_endpoints_outside4", KEY, verdict),
        ]
    else:
        assert found == [NftElement("cluster_ips4", "198.18.0.1"), no_endpoints]


def test_clients_outside_have_endpoints_of_their_own_if_their_addresses_are_kept() -> None:
    made = frontend(A, outside=(B,), is_external=True, preserves_client_ip=True)
    assert list(nft_entries.entries_of(VIP, made)) == [
        NftElement("endpoints4", f"{KEY} . 0", "198.18.1.1 . 8080"),
        NftElement("services4", KEY, "goto endpoints4-1"),
        NftElement("outside_endpoints4", f"{KEY} . 0", "198.18.1.2 . 8080"),
        NftElement("outside4", KEY, "goto outside_endpoints4-1"),
    ]


def test_clients_outside_are_masqueraded_otherwise() -> None:
    assert list(nft_entries.entries_of(VIP, frontend(A, is_external=True))) == [
        NftElement("endpoints4", f"{KEY} . 0", "198.18.1.1 . 8080"),
        NftElement("services4", KEY, "goto endpoints4-1"),
        NftElement("endpoints4", f"{KEY} . 0", "198.18.1.1 . 8080"),
        NftChain(
            "masked-endpoints4-1", ("meta mark set meta mark | 0x4000", "goto endpoints4-1"), 2
        ),
        NftElement("outside4", KEY, "goto masked-endpoints4-1"),
    ]


@pytest.mark.parametrize(
    ("at", "ip", "networks"),
    [
        ("198.18.0.1", "ip", ["198.18.7.0/24", "198.18.8.1/32"]),
        ("fd00:18::1", "ip6", ["fd00:18:7::/64"]),
    ],
)
def test_sources_of_a_load_balancer_are_the_only_ones(
    at: str, ip: str, networks: list[str]
) -> None:
    sources = tuple(map(ipaddress.ip_network, networks))
    made = frontend(is_external=True, sources=sources)
    chain, element, *_ = nft_entries.entries_of(address(at), made)
    assert isinstance(chain, NftChain)
    assert chain.name.startswith("sources-")
    assert chain == NftChain(
        chain.name, (*(f"{ip} saddr {network} return" for network in networks), "drop")
    )
    family = 6 if ip == "ip6" else 4
    assert element == NftElement(f"sources{family}", f"{at} . tcp . 80", f"goto {chain.name}")


@pytest.mark.parametrize(
    ("at", "ip", "endpoints", "shown"),
    [
        ("198.18.0.1", "ip", (A, B), ["198.18.1.1:8080", "198.18.1.2:8080"]),
        ("fd00:18::1", "ip6", (address("fd00:18:1::1"),), ["[fd00:18:1::1]:80"]),
    ],
)
def test_client_with_affinity_is_in_the_set_of_its_endpoint(
    at: str, ip: str, endpoints: tuple[ServiceAddress, ...], shown: list[str]
) -> None:
    made = frontend(*endpoints, affinity_seconds=60)
    _, *found, last = nft_entries.entries_of(address(at), made)
    version = 6 if ip == "ip6" else 4
    sets = [one for one in found if isinstance(one, AffinitySet)]
    names = [one.name for one in sets]
    assert len(set(names)) == len(endpoints)
    assert all(name.startswith("to-") for name in names)
    assert sets == [AffinitySet(name, f"ipv{version}_addr", 60) for name in names]
    *chains, choice = (one for one in found if isinstance(one, NftChain))
    assert chains == [
        NftChain(
            name, (f"update @{name} {{ {ip} saddr }}", f"meta l4proto tcp dnat {ip} to {target}")
        )
        for name, target in zip(names, shown, strict=True)
    ]
    assert choice.name.startswith("affinity-")
    choices = ", ".join(f"{number} : goto {name}" for number, name in enumerate(names))
    assert choice == NftChain(
        choice.name,
        (
            *(f"{ip} saddr @{name} goto {name}" for name in names),
            f"numgen random mod {len(names)} vmap {{ {choices} }}",
        ),
        1,
    )
    assert last == NftElement(f"services{version}", f"{at} . tcp . 80", f"goto {choice.name}")


def test_sets_of_clients_differ_by_port_endpoint_and_time() -> None:
    names = [
        one.name
        for made in (
            frontend(A, B, affinity_seconds=60),
            frontend(A, affinity_seconds=61),
            frontend(A, affinity_seconds=60, port_id=8),
        )
        for one in nft_entries.entries_of(VIP, made)
        if isinstance(one, AffinitySet)
    ]
    assert len(set(names)) == 4
    # An address of the same port shares them.
    (other,) = (
        one.name
        for one in nft_entries.entries_of(address("198.18.0.2"), frontend(A, affinity_seconds=60))
        if isinstance(one, AffinitySet)
    )
    assert other == names[0]


def test_table_is_ready_for_each_likely_number_of_endpoints() -> None:
    found = list(nft_entries.ready_chains())
    assert [one.name for one in found] == [
        f"{container}-{count}"
        for container in (
            "endpoints4",
            "endpoints6",
            "outside_endpoints4",
            "outside_endpoints6",
        )
        for count in range(1, READY_COUNTS + 1)
    ]
    assert not any(one.is_late for one in found)
    assert found[1].rules == (
        "meta l4proto { tcp, udp, sctp } dnat ip to ip daddr . meta l4proto . th dport . numgen "
        "random mod 2 map @endpoints4",
    )
    assert found[READY_COUNTS].rules == (
        "meta l4proto { tcp, udp, sctp } dnat ip6 to ip6 daddr . meta l4proto . th dport . numgen "
        "random mod 1 map @endpoints6",
    )


@pytest.mark.parametrize(("count", "is_late"), [(READY_COUNTS, False), (READY_COUNTS + 1, True)])
def test_service_with_more_endpoints_has_a_chain_of_its_own(count: int, *, is_late: bool) -> None:
    endpoints = [address("198.18.1.1", port) for port in range(1, count + 1)]
    found = nft_entries.entries_of(VIP, frontend(*endpoints))
    late = [(one.name, one.is_late) for one in found if isinstance(one, NftChain)]
    assert late == ([(f"endpoints4-{count}", True)] if is_late else [])
