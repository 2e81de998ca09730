"""The relay's ranges: what is taken for one, how it is cut, and what is in its way."""

import ipaddress

import pytest

from agent.relay import interfaces as relay_interfaces
from agent.strict.ranges import (
    DEFAULT,
    SLOTS,
    RelayRanges,
    Route,
    find_overlap,
    free_slot,
    parse_range4,
    parse_range6,
)

RANGES = RelayRanges(parse_range4("198.18.64.0/18"), parse_range6("fd00:18:64::/64"))


def route(network: str) -> Route:
    return Route(ipaddress.ip_network(network), f"{network} dev eth0")


@pytest.mark.parametrize(
    "text", ["198.18.0.0/22", "198.18.0.1/18", "0.0.0.0/0", "fd00::/64", "224.0.0.0/8", "x"]
)
def test_what_does_not_do_for_ipv4_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="give an IPv4 network of /8 to /21, such as 169"):
        parse_range4(text)


@pytest.mark.parametrize("text", ["fd00::/65", "198.18.0.0/18", "ff00::/16", "fd00::1/64"])
def test_what_does_not_do_for_ipv6_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="give an IPv6 network of /16 to /64, such as fd70:"):
        parse_range6(text)


def test_shares_of_all_slots_are_the_range_and_none_overlaps() -> None:
    for family, network in enumerate(RANGES.networks):
        shares = [RANGES.shares(slot)[family] for slot in range(SLOTS)]
        cut = list(network.subnets(prefixlen_diff=3))
        assert [share.subnet for share in shares] == cut
        assert shares[0].node == network[1]
        assert shares[0].inside == network[2]


def test_default_ranges_leave_out_what_rfc_3927_reserves() -> None:
    assert not DEFAULT.ipv4.overlaps(ipaddress.ip_network("169.254.0.0/24"))
    assert not DEFAULT.ipv4.overlaps(ipaddress.ip_network("169.254.255.0/24"))
    assert ipaddress.ip_address("169.254.169.254") not in DEFAULT.ipv4  # clouds' metadata


@pytest.mark.parametrize(
    ("network", "option"),
    [
        ("198.18.0.0/16", "--relay-range4"),
        ("198.18.65.7/32", "--relay-range4"),
        ("fd00:18:64::9/128", "--relay-range6"),
        ("fd00::/8", "--relay-range6"),
    ],
)
def test_route_in_the_way_is_named_with_what_to_do(network: str, option: str) -> None:
    said = find_overlap(RANGES, [route("10.0.0.0/8"), route(network)])
    assert said is not None
    assert f"the node's route {network} dev eth0" in said
    assert option in said


def test_default_routes_are_in_nobodys_way() -> None:
    whole = ("0.0.0.0/0", "::/0", "128.0.0.0/1", "8000::/1", "198.19.0.0/16")
    assert find_overlap(RANGES, map(route, whole)) is None


def test_lowest_free_slot_is_taken() -> None:
    assert free_slot([]) == 0
    assert free_slot([0, 2]) == 1
    assert free_slot(range(SLOTS)) is None


@pytest.mark.parametrize(
    ("name", "slot"),
    [("podgate-relay0", 0), ("podgate-relay7", 7), ("podgate-relay", None), ("eth0", None)],
)
def test_relays_interfaces_are_known_by_name(name: str, slot: int | None) -> None:
    assert relay_interfaces.slot_of(name) == slot
    assert relay_interfaces.is_relays(name) == (slot is not None)
