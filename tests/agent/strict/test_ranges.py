"""The relay's ranges: how they are cut, and what is in their way."""

import ipaddress

import pytest

from agent.relay import interfaces as relay_interfaces
from agent.settings import RelayRanges, parse_range4, parse_range6
from agent.strict.ranges import SLOTS, Route, find_overlap, free_slot, shares

RANGES = RelayRanges(parse_range4("198.18.64.0/18"), parse_range6("fd00:18:64::/64"))


def route(network: str) -> Route:
    return Route(ipaddress.ip_network(network), f"{network} dev eth0")


def test_shares_of_all_slots_are_the_range_and_none_overlaps() -> None:
    for family, network in enumerate(RANGES.networks):
        found = [shares(RANGES, slot)[family] for slot in range(SLOTS)]
        cut = list(network.subnets(prefixlen_diff=3))
        assert [share.subnet for share in found] == cut
        assert found[0].node == network[1]
        assert found[0].inside == network[2]


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
    said = find_overlap(RANGES, [route("0.0.0.0/0"), route("10.0.0.0/8"), route(network)])
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
def test_relay_interfaces_are_identified_by_name(name: str, slot: int | None) -> None:
    assert relay_interfaces.slot_of(name) == slot
    assert relay_interfaces.is_relay_interface(name) == (slot is not None)
