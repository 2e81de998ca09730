"""The relay's addresses: each for one sandbox, and not for another one soon after."""

import ipaddress

import pytest

from agent.relay.messages import WantedTarget
from agent.relay.targets import FIRST_HOST, AddressPool, NoAddressLeft, Targets

_SUBNET4 = ipaddress.ip_network("198.18.64.0/27")
_SUBNET6 = ipaddress.ip_network("fd00:18:ff::/67")


class _Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def _wanted(key: str, address: str = "198.18.1.2") -> WantedTarget:
    return WantedTarget(key, "/run/netns/a", 4, 5, address, ((80, 80), (9000, 9010)), (80,))


def test_an_address_that_was_given_back_rests_before_it_means_somebody_else() -> None:
    clock = _Clock()
    pool = AddressPool(_SUBNET4, clock)
    count = _SUBNET4.num_addresses - 1 - FIRST_HOST
    taken = [pool.take() for _ in range(count)]
    assert len(set(taken)) == count
    with pytest.raises(NoAddressLeft, match=r"15 addresses in 198\.18\.64\.0/27 are all in use"):
        pool.take()
    pool.give_back(taken[3])
    clock.seconds += 299
    with pytest.raises(NoAddressLeft):
        pool.take()
    clock.seconds += 2
    assert pool.take() == taken[3]


def test_addresses_come_in_turn_so_that_one_is_used_again_as_late_as_can_be() -> None:
    pool = AddressPool(_SUBNET4, _Clock())
    first = pool.take()
    pool.give_back(first)
    assert pool.take() == first + 1


def test_the_ends_of_the_pair_and_the_broadcast_address_stand_for_no_pod() -> None:
    pool = AddressPool(_SUBNET4, _Clock())
    taken = {pool.take() for _ in range(_SUBNET4.num_addresses - 1 - FIRST_HOST)}
    assert taken.isdisjoint({_SUBNET4[0], _SUBNET4[1], _SUBNET4[2], _SUBNET4[-1]})


def test_targets_are_found_by_the_relays_address_until_they_are_removed() -> None:
    targets = Targets([_SUBNET4, _SUBNET6], _Clock())
    ipv4, ipv6 = targets.add(_wanted("a")), targets.add(_wanted("b", "fd00:18:0:1::2"))
    assert targets.find(ipv4.relay.packed) is ipv4
    assert targets.find(ipv6.relay.packed) is ipv6
    assert ipv6.relay in _SUBNET6
    targets.remove(ipv4)
    assert targets.find(ipv4.relay.packed) is None
    assert targets.get("a") is None
    assert list(targets) == [ipv6]


def test_ports_are_admitted_by_range() -> None:
    target = Targets([_SUBNET4], _Clock()).add(_wanted("a"))
    assert [port for port in (79, 80, 81, 8999, 9000, 9010, 9011) if target.admits(port)] == [
        80,
        9000,
        9010,
    ]


def test_a_sandbox_made_anew_is_another_place() -> None:
    target = Targets([_SUBNET4], _Clock()).add(_wanted("a"))
    assert target.is_same_place(_wanted("a"))
    assert not target.is_same_place(_wanted("a", "198.18.1.3"))
