"""Relay addresses: each belongs to one sandbox, and is reused only after a quarantine."""

import ipaddress
import socket

import msgspec
import pytest

from agent.relay.messages import RelayTargetSpec, Sharing
from agent.relay.targets import FIRST_HOST, AddressPool, AddressPoolExhaustedError, Targets

_SUBNET4 = ipaddress.ip_network("198.18.64.0/27")
_SUBNET6 = ipaddress.ip_network("fd00:18:ff::/67")


class _Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def _spec(key: str, address: str = "198.18.1.2") -> RelayTargetSpec:
    return RelayTargetSpec(key, "/run/netns/a", 4, 5, address, ((80, 80), (9000, 9010)), (80,))


def test_released_address_is_quarantined_before_reuse() -> None:
    clock = _Clock()
    pool = AddressPool(_SUBNET4, clock)
    count = _SUBNET4.num_addresses - 1 - FIRST_HOST
    allocated = [pool.allocate() for _ in range(count)]
    assert len(set(allocated)) == count
    with pytest.raises(
        AddressPoolExhaustedError, match=r"all 15 relay addresses in 198\.18\.64\.0/27 are in use"
    ):
        pool.allocate()
    pool.release(allocated[3])
    clock.seconds += 200
    pool.release(allocated[1])
    clock.seconds += 99
    with pytest.raises(AddressPoolExhaustedError):
        pool.allocate()
    clock.seconds += 2
    assert pool.allocate() == allocated[3]
    with pytest.raises(AddressPoolExhaustedError):
        pool.allocate()


def test_addresses_are_allocated_in_turn() -> None:
    clock = _Clock()
    pool = AddressPool(_SUBNET4, clock)
    first = pool.allocate()
    pool.release(first)
    clock.seconds += 1000
    assert pool.allocate() == first + 1


def test_ends_of_the_pair_and_broadcast_address_are_never_allocated() -> None:
    pool = AddressPool(_SUBNET4, _Clock())
    allocated = {pool.allocate() for _ in range(_SUBNET4.num_addresses - 1 - FIRST_HOST)}
    assert allocated.isdisjoint({_SUBNET4[0], _SUBNET4[1], _SUBNET4[2], _SUBNET4[-1]})


def test_targets_are_found_by_relay_address_until_removed() -> None:
    targets = Targets([_SUBNET4, _SUBNET6], _Clock())
    ipv4, ipv6 = targets.add(_spec("a")), targets.add(_spec("b", "fd00:18:0:1::2"))
    assert targets.find(ipv4.relay.packed) is ipv4
    assert targets.find(ipv6.relay.packed) is ipv6
    assert ipv6.relay in _SUBNET6
    assert (ipv4.family, ipv4.dialled) == (socket.AF_INET, "198.18.1.2")
    assert (ipv6.family, ipv6.dialled) == (socket.AF_INET6, "fd00:18:0:1::2")
    targets.remove(ipv4)
    assert targets.find(ipv4.relay.packed) is None
    assert targets.get("a") is None
    assert list(targets) == [ipv6]


def test_address_of_a_removed_target_is_used_again_after_its_quarantine() -> None:
    clock = _Clock()
    targets = Targets([_SUBNET4], clock)
    count = _SUBNET4.num_addresses - 1 - FIRST_HOST
    added = [targets.add(_spec(str(number))) for number in range(count)]
    targets.remove(added[3])
    clock.seconds += 301
    assert targets.add(_spec("next")).relay == added[3].relay


def test_ports_are_admitted_by_range() -> None:
    target = Targets([_SUBNET4], _Clock()).add(_spec("a"))
    assert [port for port in (79, 80, 81, 8999, 9000, 9010, 9011) if target.admits(port)] == [
        80,
        9000,
        9010,
    ]


def test_new_sandbox_at_the_same_path_is_another_netns() -> None:
    target = Targets([_SUBNET4], _Clock()).add(_spec("a"))
    assert target.has_same_netns(_spec("a"))
    assert not target.has_same_netns(_spec("a", "198.18.1.3"))
    for field in ("netns_path", "netns_device", "netns_inode"):
        value = "/run/netns/b" if field == "netns_path" else 6
        assert not target.has_same_netns(msgspec.structs.replace(_spec("a"), **{field: value}))


@pytest.mark.parametrize(
    ("shared", "at"),
    [((), []), ((80,), [80]), ((0,), [79, 81]), ((0, 80), [79, 80, 81])],
    ids=["none", "claimed", "unclaimed", "all"],
)
def test_ports_that_other_pods_have_as_well_are_shared(
    shared: tuple[int, ...], at: list[int]
) -> None:
    """Port 80 is claimed; 0 stands for all ports without a claim."""
    target = Targets([_SUBNET4], _Clock()).add(_spec("a"))
    assert target.shared_at(80) is None
    target.set_sharing(Sharing(shared, ()))
    assert [port for port in (79, 80, 81) if target.shared_at(port)] == at
    target.set_sharing(None)
    assert not any(map(target.shared_at, (79, 80, 81)))


def test_same_sharing_keeps_what_was_learned_from_requests() -> None:
    target = Targets([_SUBNET4], _Clock()).add(_spec("a"))
    target.set_sharing(Sharing((80,), ()))
    before = target.shared_at(80)
    target.set_sharing(Sharing((80,), ()))
    assert target.shared_at(80) is before
    target.set_sharing(Sharing((80,), (), otherwise="a"))
    assert target.shared_at(80) not in (None, before)
