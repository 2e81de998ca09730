"""The gated interface of each pod address, and the host's addresses, in the bytes of their maps."""

import errno
import ipaddress
import struct

import pytest

from bpf import errors, map_specs
from bpf.abi import IPAddress
from bpf.addresses import Addresses
from bpf.node_addresses import NodeAddressMap
from tests.bpf.pinned import Map, loaded

V4, OTHER_V4 = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("198.18.0.2")
V6 = ipaddress.ip_address("fd00:18::1")
SEVERAL = 0
"""In place of an interface."""


def packed(address: IPAddress) -> bytes:
    mapped = bytes(10) + b"\xff\xff" + address.packed
    return address.packed if address.version == 6 else mapped


class Pods:
    def __init__(self, room: int = 1000) -> None:
        self.map = Map({}, room=room)
        self.addresses = Addresses(loaded({map_specs.ADDRESSES: self.map}))

    def found(self) -> dict[bytes, int]:
        return {key: struct.unpack("=I", value)[0] for key, value in self.map.items()}


def test_addresses_lead_to_their_interface_until_it_has_others() -> None:
    pods = Pods()
    pods.addresses.set(8, (V4, V6))
    assert pods.found() == {packed(V4): 8, packed(V6): 8}
    writes = pods.map.writes
    pods.addresses.set(8, (V4, V6))
    assert pods.map.writes == writes
    pods.addresses.set(8, (V4, OTHER_V4))
    assert pods.found() == {packed(V4): 8, packed(OTHER_V4): 8}
    pods.addresses.set(8, (V6,))
    pods.addresses.forget(8)
    assert pods.found() == {}


def test_address_of_two_pods_leads_to_none_of_their_interfaces() -> None:
    pods = Pods()
    pods.addresses.set(8, (V4,))
    pods.addresses.set(9, (V4,))
    assert pods.found() == {packed(V4): SEVERAL}
    pods.addresses.set(9, (V4,), "b")
    assert pods.found() == {packed(V4): SEVERAL}
    pods.addresses.forget(8)
    assert pods.found() == {packed(V4): 9}


def test_address_of_one_pod_leads_to_the_first_of_its_interfaces() -> None:
    pods = Pods()
    for ifindex in (9, 8, 10):
        pods.addresses.set(ifindex, (V4,), "a")
    assert pods.found() == {packed(V4): 8}
    pods.addresses.forget(8)
    assert pods.found() == {packed(V4): 9}


def test_entries_of_interfaces_that_are_gone_are_removed() -> None:
    pods = Pods()
    pods.map.entries[packed(V6)] = struct.pack("=I", 7)
    pods.addresses.set(8, (V4,))
    pods.addresses.retain()
    assert pods.found() == {packed(V4): 8}


def test_address_that_has_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = Pods(room=1)
    pods.addresses.set(8, (V4,))
    pods.addresses.set(9, (V6,))
    assert pods.found() == {packed(V4): 8}
    pods.addresses.forget(8)
    pods.addresses.set(9, (V6,))
    assert pods.found() == {packed(V6): 9}

    def fail(key: bytes, value: bytes) -> None:
        raise errors.BpfError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(pods.map, "set", fail)
    with pytest.raises(errors.BpfError, match="no memory"):
        pods.addresses.set(8, (V4,))


def test_host_has_these_addresses_and_ranges_and_no_others() -> None:
    """struct bpf_lpm_trie_key: the prefix in bits, of 128."""
    kept = Map({})
    node = NodeAddressMap(loaded({map_specs.NODE_ADDRESSES: kept}))
    for networks, expected in (
        (("198.18.0.1/32", "fd00:18::/64"), {(128, packed(V4)), (64, packed(V6)[:8] + bytes(8))}),
        (
            ("198.18.0.1/32", "0.0.0.0/0"),
            {(128, packed(V4)), (96, bytes(10) + b"\xff\xff" + bytes(4))},
        ),
        (("198.18.0.1/32",), {(128, packed(V4))}),
    ):
        node.set(ipaddress.ip_network(network) for network in networks)
        keys = {(struct.unpack("=I", key[:4])[0], key[4:]) for key, _ in kept.items()}
        assert keys == expected
    assert kept.writes == 3
    assert set(kept.entries.values()) == {struct.pack("=I", 1)}
    assert (node.has(V4), node.has(OTHER_V4)) == (True, False)
