"""The scripts of the default-deny table, as nft gets them."""

import json

import pytest

from agent.default_deny import ruleset
from agent.default_deny.ruleset import Ruleset


def numbered(*ifindexes: int) -> str:
    """Longer than the name of any interface."""
    return ", ".join(f'"{ifindex:020d}"' for ifindex in ifindexes)


def chain(text: str, family: str, name: str) -> list[str]:
    """The rules of one chain of a script."""
    table = text.split(f"\ntable {family} podgate {{\n")[1].split("\n}\n")[0]
    lines = table.split(f"  chain {name} {{\n")[1].split("  }")[0].splitlines()
    return [line.strip() for line in lines if line.strip()]


def sets(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  set ")]


def test_script_replaces_tables_whatever_was_there() -> None:
    head = "".join(
        f"add table {family} podgate\ndelete table {family} podgate\n"
        for family in ("inet", "bridge")
    )
    text = Ruleset().text()
    assert text.startswith(f"{head}table inet podgate {{\n")
    assert "\ntable bridge podgate {\n" in text
    without = Ruleset(has_bridge=False).text()
    assert without.startswith(head)
    assert "table bridge podgate {" not in without


def test_interfaces_are_in_the_sets_of_both_families() -> None:
    of_inet = [
        f"set gated {{ type iface_index; elements = {{ {numbered(7, 8)} }}; }}",
        "set not_pods { type iface_index;  }",
    ]
    alive = (
        "set alive { type nf_proto; flags timeout; "
        "elements = { ipv4 timeout 60s, ipv6 timeout 60s }; }"
    )
    assert sets(Ruleset({8, 7}).text()) == [*of_inet, alive, *of_inet]
    found = sets(Ruleset(not_pods={2}, has_bridge=False).text())
    assert found == [
        "set gated { type iface_index;  }",
        f"set not_pods {{ type iface_index; elements = {{ {numbered(2)} }}; }}",
        alive,
    ]


@pytest.mark.parametrize("has_bridge", [True, False])
def test_tagged_packets_to_unclassified_veths_are_dropped(has_bridge: bool) -> None:
    text = Ruleset(has_bridge=has_bridge).text()
    drop = 'meta oifkind "veth" oif != @gated oif != @not_pods counter drop'
    untagged = "meta mark & 0xffff0000 != 0x00e70000 accept"
    clear = "meta mark set meta mark & 0x0000ffff"
    assert chain(text, "inet", "postrouting") == [
        "type filter hook postrouting priority -10000; policy accept;",
        'iif "lo" meta mark set meta mark & 0x0000ffff | 0x00e70000',
        untagged,
        'iif != { 0, "lo" } accept',
        drop,
        *(['meta oifkind "bridge" accept'] if has_bridge else []),
        clear,
    ]
    if has_bridge:
        assert chain(text, "bridge", "output") == [
            "type filter hook output priority -10000; policy accept;",
            untagged,
            drop,
            clear,
        ]


def test_new_flows_of_processes_other_than_the_kubelet_are_tagged() -> None:
    text = Ruleset(kubelet="MATCH", pods=("POD", "OTHER")).text()
    assert chain(text, "inet", "output") == [
        "type filter hook output priority 10000; policy accept;",
        "tcp flags & (syn | ack) != syn accept",
        "meta skuid >= 0 jump opening",
    ]
    assert chain(text, "inet", "kubelet") == ["MATCH accept"]
    assert chain(text, "inet", "orphaned") == [
        *("POD return", "OTHER return", "meta l4proto tcp counter accept")
    ]
    assert chain(text, "inet", "tag") == [
        "jump kubelet",
        "meta nfproto != @alive jump orphaned",
        "meta mark set meta mark & 0x0000ffff | 0x00e70000",
    ]


def test_protocols_without_handshakes_count_where_connections_are_tracked() -> None:
    tracked, untracked = (
        chain(Ruleset(tracks=tracks).text(), "inet", "opening") for tracks in (True, False)
    )
    assert tracked[: len(untracked)] == untracked
    assert untracked[-1] == "meta l4proto tcp accept"
    assert tracked[-1] == "ct state new goto tag"
    assert "ct" not in " ".join(untracked).split()


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Ruleset(), []),
        (Ruleset(is_kubelet_unknown=True), ["jump orphaned"]),
        (Ruleset(kubelet="MATCH"), ["MATCH accept"]),
        (
            Ruleset(kubelet="MATCH", priority=0x1234_0ABC),
            [
                "MATCH accept",
                "meta l4proto tcp meta priority 1234:abc meta priority set none counter accept",
            ],
        ),
        (
            Ruleset(priority=0xFFFF),
            ["meta l4proto tcp meta priority 0:ffff meta priority set none counter accept"],
        ),
    ],
)
def test_admission_replaces_the_rules_of_the_kubelet(rules: Ruleset, expected: list[str]) -> None:
    assert rules.admission() == "flush chain inet podgate kubelet\n" + "".join(
        f"add rule inet podgate kubelet {rule}\n" for rule in expected
    )
    assert chain(rules.text(), "inet", "kubelet") == expected


@pytest.mark.parametrize(
    ("rules", "timeout"),
    [
        (Ruleset(), " timeout 60s"),
        (Ruleset(stale_seconds=5), " timeout 5s"),
        (Ruleset(priority=0), " timeout 86400s"),
        (Ruleset(priority=7, abandoned_seconds=9), " timeout 9s"),
        (Ruleset(priority=7, abandoned_seconds=0), ""),
    ],
)
def test_heartbeat_restarts_the_time(rules: Ruleset, timeout: str) -> None:
    alive = f"{{ ipv4{timeout}, ipv6{timeout} }}"
    assert rules.heartbeat() == (
        f"add element inet podgate alive {alive}\n"
        "delete element inet podgate alive { ipv4, ipv6 }\n"
        f"add element inet podgate alive {alive}\n"
    )
    assert f"flags timeout; elements = {alive};" in rules.text()


def test_changes_delete_before_they_add() -> None:
    changes = {"add": {9: "gated", 7: "not_pods"}, "delete": {9: "not_pods"}}

    def line(verb: str, family: str, name: str, ifindex: int) -> str:
        return f"{verb} element {family} podgate {name} {{ {numbered(ifindex)} }}\n"

    assert Ruleset().changes(**changes) == (
        line("delete", "inet", "not_pods", 9)
        + line("delete", "bridge", "not_pods", 9)
        + line("add", "inet", "not_pods", 7)
        + line("add", "inet", "gated", 9)
        + line("add", "bridge", "not_pods", 7)
        + line("add", "bridge", "gated", 9)
    )
    assert Ruleset(has_bridge=False).changes(**changes) == (
        line("delete", "inet", "not_pods", 9)
        + line("add", "inet", "not_pods", 7)
        + line("add", "inet", "gated", 9)
    )


def test_chains_that_are_compared_are_in_the_script() -> None:
    for rules in (Ruleset(), Ruleset(has_bridge=False)):
        assert all(chain(rules.text(), family, name) for family, _, name in rules.chains())
    assert Ruleset().chains() == [
        *(("inet", "podgate", name) for name in ("tag", "opening", "output", "postrouting")),
        ("bridge", "podgate", "output"),
    ]
    assert Ruleset(has_bridge=False).chains() == Ruleset().chains()[:-1]


def test_removal_is_that_of_the_families_that_have_a_table() -> None:
    assert ruleset.removal(("bridge",)) == (
        "add table bridge podgate\ndelete table bridge podgate\n"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [({}, set()), ({"elem": ["veth7", 12, "gone", "lo"]}, {1, 7})],
)
def test_elements_are_those_of_existing_interfaces(
    content: dict[str, object], expected: set[int]
) -> None:
    text = json.dumps({"nftables": [{"metainfo": {"version": "1.0.6"}}, {"set": content}]})
    assert ruleset.elements_of(text, [(1, "lo"), (7, "veth7"), (12, "12")]) == expected
