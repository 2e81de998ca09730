"""Scripts for nft; tests/proxy has what the kernel makes of them."""

import collections
import ipaddress
import json
import re
from typing import Any

import pytest

from agent.services.proxy import nft_scripts
from agent.services.proxy.nft_entries import (
    READY_COUNTS,
    AffinitySet,
    Entry,
    NftChain,
    NftElement,
    ready_chains,
)
from agent.services.proxy.nft_scripts import InstalledTable

FOUR, SIX = ipaddress.ip_network("198.18.0.0/16"), ipaddress.ip_network("fd00:18::/48")
OTHER = ipaddress.ip_network("198.19.0.0/16")
TABLE = "inet podgate-proxy"
ENTRIES: list[Entry] = [
    NftElement("services4", "a", "goto masked"),
    NftChain("masked", ("mark", "goto to-1"), 2),
    NftElement("cluster_ips4", "198.18.0.1"),
    NftChain("to-1", ("dnat",)),
    NftElement("services4", "b", "goto masked"),
    AffinitySet("to-1", "ipv4_addr", 60),
    NftElement("cluster_ips4", "198.18.0.2"),
]


def installed(**parts: Any) -> InstalledTable:
    fields: dict[str, Any] = {
        "base_chains": set(),
        "chains": set(),
        "maps": set(),
        "affinity_sets": set(),
        "other_sets": set(),
        "rules": collections.Counter(),
    }
    return InstalledTable(**fields | parts)


def frame(*networks: Any) -> str:
    """The table without services."""
    text = nft_scripts.full_ruleset([], networks)
    ready = nft_scripts.addition_of(ready_chains())
    assert text.endswith(ready)
    return text.removesuffix(ready)


def chains(*networks: Any) -> dict[str, list[str]]:
    """The frame's, with their rules."""
    found = re.findall(
        r"^  chain (\w+) \{\n(.*?)^  \}$", frame(*networks), re.DOTALL | re.MULTILINE
    )
    return {name: [line.strip() for line in rules.splitlines()] for name, rules in found}


def test_entries_are_added_after_what_they_refer_to() -> None:
    assert nft_scripts.addition_of(ENTRIES).splitlines() == [
        f"add set {TABLE} to-1 {{ type ipv4_addr; flags dynamic, timeout; timeout 60s; "
        "size 65536; }",
        f"add chain {TABLE} to-1",
        f"add rule {TABLE} to-1 dnat",
        f"add chain {TABLE} masked",
        f"add rule {TABLE} masked mark",
        f"add rule {TABLE} masked goto to-1",
        f"add element {TABLE} services4 {{ a : goto masked, b : goto masked }}",
        f"add element {TABLE} cluster_ips4 {{ 198.18.0.1, 198.18.0.2 }}",
    ]
    assert nft_scripts.addition_of([]) == ""


def test_entries_are_removed_before_what_they_refer_to_and_chains_stay_empty() -> None:
    assert nft_scripts.removal_of(ENTRIES).splitlines() == [
        f"delete element {TABLE} services4 {{ a : goto masked, b : goto masked }}",
        f"delete element {TABLE} cluster_ips4 {{ 198.18.0.1, 198.18.0.2 }}",
        f"flush chain {TABLE} masked",
        f"flush chain {TABLE} to-1",
        f"delete set {TABLE} to-1",
    ]
    assert nft_scripts.removal_of([]) == ""
    assert nft_scripts.deletion_of({"to-1", "masked"}).splitlines() == [
        f"delete chain {TABLE} masked",
        f"delete chain {TABLE} to-1",
    ]


def test_parts_of_an_installed_table_are_read() -> None:
    listing = [
        {"metainfo": {"version": "1.0.6"}},
        {"table": {"name": "podgate-proxy"}},
        {"chain": {"name": "output", "hook": "output", "type": "nat"}},
        {"chain": {"name": "masked"}},
        {"map": {"name": "services4"}},
        {"set": {"name": "to-1"}},
        {"set": {"name": "pods4"}},
        {"rule": {"chain": "output", "expr": []}},
        {"rule": {"chain": "masked", "expr": []}},
        {"rule": {"chain": "masked", "expr": []}},
    ]
    assert nft_scripts.table_of(json.dumps({"nftables": listing})) == InstalledTable(
        base_chains={"output"},
        chains={"masked"},
        maps={"services4"},
        affinity_sets={"to-1"},
        other_sets={"pods4"},
        rules=collections.Counter({"output": 1, "masked": 2}),
    )


def test_whole_table_replaces_one_of_unclear_content() -> None:
    text = nft_scripts.full_ruleset(iter(ENTRIES), ())
    assert text == frame() + nft_scripts.addition_of([*ready_chains()]) + nft_scripts.addition_of(
        ENTRIES
    )
    assert text.startswith(f"add table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n")


def test_clients_of_an_installed_table_keep_their_endpoints() -> None:
    before = installed(
        base_chains={"output"},
        chains={"masked"},
        maps={"services4"},
        affinity_sets={"to-1", "to-2"},
        other_sets={"pods4"},
    )
    text = nft_scripts.full_ruleset(ENTRIES, (), before)
    clearance, separator, rest = text.partition(f"table {TABLE} {{\n")
    lines = clearance.splitlines()
    assert sorted(lines) == sorted(
        [
            f"flush chain {TABLE} masked",
            f"flush chain {TABLE} output",
            f"flush map {TABLE} services4",
            f"delete chain {TABLE} output",
            f"delete map {TABLE} services4",
            f"delete set {TABLE} pods4",
            f"delete set {TABLE} to-2",
        ]
    )
    # All are empty before one is deleted.
    assert [line.split()[0] for line in lines] == ["flush"] * 3 + ["delete"] * 4
    assert lines[2].startswith("flush map")
    assert (
        separator + rest
        == nft_scripts.full_ruleset(ENTRIES, ()).partition(f"delete table {TABLE}\n")[2]
    )


def test_chains_without_a_use_are_those_that_no_entry_has() -> None:
    before = installed(
        base_chains={"output"},
        chains={"masked", "old", "from_node", "endpoints4-1", f"endpoints4-{READY_COUNTS + 1}"},
    )
    assert nft_scripts.unused_chains(before, ENTRIES) == {
        "old",
        f"endpoints4-{READY_COUNTS + 1}",
    }


def test_base_chains_are_those_that_the_kernel_calls() -> None:
    base = {name for name, rules in chains().items() if " hook " in rules[0]}
    assert base == nft_scripts.BASE_CHAINS
    assert set(chains()) - base == nft_scripts.FRAME_CHAINS


@pytest.mark.parametrize(
    ("networks", "elements"),
    [
        ((), {}),
        ((FOUR,), {4: "198.18.0.0/16"}),
        ((FOUR, SIX, OTHER), {4: "198.18.0.0/16, 198.19.0.0/16", 6: "fd00:18::/48"}),
    ],
)
def test_table_has_the_same_containers_for_both_families(
    networks: tuple[Any, ...], elements: dict[int, str]
) -> None:
    lines = [line.strip() for line in frame(*networks).splitlines()]
    found = [line for line in lines if line.startswith(("map ", "set "))]
    expected = []
    for version, ip in ((4, "ip"), (6, "ip6")):
        address = f"ipv{version}_addr"
        expected += [
            f"map {name}{version} {{ type {address} . inet_proto . inet_service : verdict; }}"
            for name in ("services", "outside", "no_endpoints", "no_endpoints_outside", "sources")
        ]
        expected += [
            f"map {name}{version} {{ typeof {ip} daddr . meta l4proto . th dport . numgen random "
            f"mod 65536 : {ip} daddr . th dport; }}"
            for name in ("endpoints", "outside_endpoints")
        ]
        own = f"elements = {{ {elements[version]} }}; " if version in elements else ""
        expected += [
            f"set cluster_ips{version} {{ type {address}; }}",
            f"set hairpin{version} {{ type {address} . {address}; }}",
            f"set pods{version} {{ type {address}; flags interval; {own}}}",
        ]
    assert found == expected


MASKED = "ip daddr @cluster_ips4 ip saddr != @pods4 meta mark set meta mark | 0x4000"
MASKED_6 = "ip6 daddr @cluster_ips6 ip6 saddr != @pods6 meta mark set meta mark | 0x4000"


@pytest.mark.parametrize(
    ("networks", "masking"),
    [((), []), ((FOUR, OTHER), [MASKED]), ((SIX,), [MASKED_6]), ((SIX, FOUR), [MASKED, MASKED_6])],
)
def test_traffic_of_others_than_pods_to_cluster_ips_is_masqueraded(
    networks: tuple[Any, ...], masking: list[str]
) -> None:
    *found, four, six = chains(*networks)["from_node"]
    assert found == masking
    assert four == "ip daddr . meta l4proto . th dport vmap @services4"
    assert six == "ip6 daddr . meta l4proto . th dport vmap @services6"


def test_rules_are_the_same_for_both_families() -> None:
    for name, rules in chains(FOUR, SIX).items():
        own = {
            version: [rule for rule in rules if re.search(rf"@\w+{version}\b", rule)]
            for version in (4, 6)
        }
        renamed = [
            re.sub(r"(@\w+)4\b", r"\g<1>6", re.sub(r"\bip (?=[sd]addr)", "ip6 ", rule))
            for rule in own[4]
        ]
        assert own[6] == renamed, name
