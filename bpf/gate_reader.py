"""The gates' configurations, read from the maps."""

import struct

from bpf import abi, loader, map_specs
from bpf.gate_config import GateConfig
from bpf.rules import Rule
from bpf.verdicts import Mode

_NUMBER = struct.Struct("=I")

Addresses = dict[abi.IPAddress, bool]
"""Addresses in the order of a gate's list, and whether each is only claimed."""


class GateReader:
    """Configurations by ifindex. Changes nothing and takes no lock, so it also works beside an
    agent that hangs.

    Each configuration is read in one step. Methods raise `ValueError` for a mode or a kind of
    source that this version does not have.
    """

    def __init__(self, loaded: loader.Loaded) -> None:
        self._slots = loaded.map(map_specs.GATE_SLOTS)
        self._gates = loaded.map(map_specs.GATES)
        self._more_rules = loaded.map(map_specs.MORE_RULES)
        self._more_addresses = loaded.map(map_specs.GATE_ADDRESSES_MAP)

    def interfaces(self) -> list[int]:
        """All interfaces with a configuration."""
        return [_NUMBER.unpack(key)[0] for key, _ in self._slots.items()]

    def get(self, ifindex: int) -> GateConfig | None:
        found = self._current(ifindex)
        return self._unpack(found) if found else None

    def grace_until_ns(self, ifindex: int) -> int | None:
        """The end of a gate's grace period (CLOCK_MONOTONIC); None without a configuration."""
        found = self._current(ifindex)
        return int(found.grace_until_ns) if found else None

    def _slot(self, ifindex: int) -> int | None:
        value = self._slots.get(_NUMBER.pack(ifindex))
        return int(_NUMBER.unpack(value)[0]) if value else None

    def _read_slot(self, slot: int) -> abi.CGateSlot:
        value = self._gates.get(_NUMBER.pack(slot))
        assert value is not None  # an array has all of its keys
        return abi.CGateSlot.from_buffer_copy(value)

    def _current(self, ifindex: int) -> abi.CGate | None:
        slot = self._slot(ifindex)
        if slot is None or slot >= abi.SLOT_COUNT:
            return None
        value = self._read_slot(slot)
        gate: abi.CGate = value.versions[value.current & 1]
        return gate if gate.ifindex == ifindex else None

    def _load_more(self, ifindex: int) -> Addresses:
        """The addresses of a gate that have no place in `CGate`."""
        gate = self._current(ifindex)
        if not gate or not gate.flags & abi.GATE_HAS_MORE_ADDRESSES:
            return {}
        found = {}
        for key, value in list(self._more_addresses.items()):
            packed = abi.CGateAddress.from_buffer_copy(key)
            if packed.ifindex == ifindex:
                found[abi.unpack_address(bytes(packed.address))] = any(value)
        return found

    def _unpack(self, gate: abi.CGate) -> GateConfig:
        own = gate.address_count - gate.claimed_count
        addresses = {
            abi.unpack_address(bytes(address)): index >= own
            for index, address in enumerate(gate.addresses[: gate.address_count])
        }
        addresses |= self._load_more(gate.ifindex)
        rules = gate.rules[: min(gate.rule_count, abi.GATE_FIRST_RULES)]
        if gate.rule_count > abi.GATE_FIRST_RULES and (
            value := self._more_rules.get(rules_key(gate))
        ):
            more = abi.CMoreRules.from_buffer_copy(value)
            rules += more.rules[: gate.rule_count - abi.GATE_FIRST_RULES]
        return GateConfig(
            Mode(gate.mode),
            tuple(address for address, is_claimed in addresses.items() if not is_claimed),
            tuple(map(Rule.unpack, rules)),
            any_address=bool(gate.flags & abi.GATE_ANY_ADDRESS),
            identified_kubelet=bool(gate.flags & abi.GATE_IDENTIFIED_KUBELET),
            claimed=tuple(address for address, is_claimed in addresses.items() if is_claimed),
            without_fallback=bool(gate.flags & abi.GATE_NO_FALLBACK),
        )


def rules_key(gate: abi.CGate) -> bytes:
    """The key in `more_rules` of this version's further rules."""
    return bytes(abi.CMoreRulesKey(gate.ifindex, gate.version))
