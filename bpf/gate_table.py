"""The gates' configurations in the maps, by interface. Agent and podgate-cni both write them.

A configuration has two versions, of which programs read the current one. A change is written to
the other version, which then becomes current, so programs see no mix of two. Before a version is
written that programs may still read, one wait for them covers all gates changed until then: a
change of many gates waits once.

A limit of the maps never opens a gate: see `GateTable.set`.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import struct
from collections.abc import Iterator

from bpf import abi, errors, loader, locks, map_specs, rcu
from bpf.gate_config import GateConfig
from bpf.gate_reader import Addresses, GateReader, rules_key
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

# A change takes less than a millisecond; podgate-cni and an agent that starts take turns.
_LOCK_SECONDS = 5.0

_NUMBER = struct.Struct("=I")
_TCP = 6

# Of interfaces whose configuration has no place: as podgate-cni's, and for any address.
_FALLBACK = GateConfig(
    Mode.ENFORCE, (), (Rule(SourceKind.KUBELET, protocol=_TCP),), any_address=True
)


class GateTable(GateReader):
    """Writes configurations by ifindex. One writer in this process; others wait meanwhile.

    Each change raises `BpfError` (EBUSY) if another process keeps the maps locked.
    """

    def __init__(self, loaded: loader.Loaded, directory: pathlib.Path) -> None:
        """directory: that of the pinned maps, which podgate-cni locks as well."""
        super().__init__(loaded)
        self._counters = loaded.map(map_specs.COUNTERS), loaded.map(map_specs.FREQUENT_COUNTS)
        self._more_of: dict[int, Addresses] = {}
        # Slots with a version that programs may still read; None: any, from a previous process.
        self._replaced: set[int] | None = None
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with self._locked():
            self._write(abi.FALLBACK_SLOT, 0, _FALLBACK, 0)

    def close(self) -> None:
        os.close(self._lock)

    def set(self, ifindex: int, config: GateConfig, grace_until_ns: int) -> str:
        """Insert or replace a configuration. Returns a sentence on what has no place, or "".

        What has no place makes the gate drop more: all addresses behind the interface count as the
        pod's, or rules are left out. Raises `BpfError` (E2BIG: all slots are taken).
        """
        with self._locked():
            slot = self._slot(ifindex)
            if slot is None:
                slot = self._free_slot(ifindex)
                for counters in self._counters:
                    counters.set(_NUMBER.pack(slot), bytes(counters.value_size))
                problem = self._write(slot, ifindex, config, grace_until_ns)
                self._slots.set(_NUMBER.pack(ifindex), _NUMBER.pack(slot))
                if self._replaced is not None:
                    # No program reads what was there before: the gate is attached after this.
                    self._replaced.discard(slot)
                return problem
            return self._write(slot, ifindex, config, grace_until_ns)

    def end_grace(self, ifindex: int, at_ns: int) -> None:
        """End a gate's grace period at `at_ns` (CLOCK_MONOTONIC), unless it ends sooner."""
        with self._locked():
            slot, gate = self._slot(ifindex), self._current(ifindex)
            if slot is not None and gate is not None and gate.grace_until_ns > at_ns:
                self._write(slot, ifindex, self._unpack(gate), at_ns)

    def delete(self, ifindex: int) -> None:
        """Delete the configuration of an interface whose gate is detached."""
        with self._locked():
            for address in self._load_more(ifindex):
                self._more_addresses.delete(_address_key(ifindex, address))
            self._more_of.pop(ifindex, None)
            for version in range(2):
                self._more_rules.delete(bytes(abi.CMoreRulesKey(ifindex, version)))
            slot = self._slot(ifindex)
            if slot is not None:
                self._gates.set(_NUMBER.pack(slot), bytes(self._gates.value_size))
                self._slots.delete(_NUMBER.pack(ifindex))
                if self._replaced is not None:
                    self._replaced.add(slot)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        locks.take(self._lock, _LOCK_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _free_slot(self, ifindex: int) -> int:
        """The slot in which programs look first, or else the last free one."""
        taken: set[int] = {_NUMBER.unpack(value)[0] for _, value in self._slots.items()}
        first = abi.FIRST_SLOT + ifindex % abi.MAX_GATES
        slot: int
        for slot in (first, *range(abi.SLOT_COUNT - 1, abi.FIRST_SLOT - 1, -1)):
            if slot not in taken:
                return slot
        raise errors.BpfError(
            errno.E2BIG, f"the map gates is full; it holds {abi.MAX_GATES} entries"
        )

    def _write(self, slot: int, ifindex: int, config: GateConfig, grace_until_ns: int) -> str:
        problem = ""
        addresses: Addresses = dict.fromkeys(config.addresses, False)
        addresses |= {address: True for address in config.claimed if address not in addresses}
        has_any = config.any_address
        before = self._load_more(ifindex)
        more = dict(list(addresses.items())[abi.GATE_ADDRESSES :][: abi.MAX_GATE_ADDRESSES])
        if not self._add_more(ifindex, before, more) or len(addresses) > abi.GATE_ADDRESSES + len(
            more
        ):
            has_any = True
            problem = (
                f"The pod has {len(addresses)} addresses, more than a gate lists: all addresses "
                "behind its interface count as the pod's; use fewer."
            )
        value = self._read_slot(slot)
        gate = _pack(config, dict(list(addresses.items())[: abi.GATE_ADDRESSES]))
        gate.ifindex, gate.slot, gate.grace_until_ns = ifindex, slot, grace_until_ns
        gate.flags = (
            has_any * abi.GATE_ANY_ADDRESS
            | bool(more) * abi.GATE_HAS_MORE_ADDRESSES
            | config.without_fallback * abi.GATE_NO_FALLBACK
            | config.identified_kubelet * abi.GATE_IDENTIFIED_KUBELET
        )
        rules = config.rules[: abi.GATE_RULES]
        if len(config.rules) > len(rules):
            problem = (
                f"{len(config.rules)} rules match the pod and a gate holds {len(rules)}: "
                "the others admit nothing; use fewer."
            )
        problem = self._replace(slot, value, gate, rules) or problem
        for address in before.keys() - more.keys():
            self._more_addresses.delete(_address_key(ifindex, address))
        return problem

    def _replace(
        self, slot: int, value: abi.CGateSlot, gate: abi.CGate, rules: tuple[Rule, ...]
    ) -> str:
        """Make this the current version, unless it is so."""
        problem = ""
        more = rules[abi.GATE_FIRST_RULES :]
        packed = abi.CMoreRules()
        for index, rule in enumerate(more):
            packed.rules[index] = rule.pack()
        gate.rule_count, gate.version = len(rules), value.current
        if bytes(gate) == bytes(value.versions[value.current]) and (
            not more or self._more_rules.get(rules_key(gate)) == bytes(packed)
        ):
            return ""
        if self._replaced is None or slot in self._replaced:
            rcu.wait_for_programs()
            self._replaced = set()
        gate.version = 1 - value.current
        if more:
            try:
                self._more_rules.set(rules_key(gate), bytes(packed))
            except errors.BpfError as error:
                gate.rule_count = abi.GATE_FIRST_RULES
                problem = (
                    f"The gate has the first {gate.rule_count} of the pod's {len(rules)} rules, "
                    f"and the others admit nothing: {error.strerror}."
                )
        else:
            self._more_rules.delete(rules_key(gate))
        value.versions[gate.version] = gate
        self._gates.set(_NUMBER.pack(slot), bytes(value))
        value.current = gate.version
        self._gates.set(_NUMBER.pack(slot), bytes(value))
        self._replaced.add(slot)
        return problem

    def _add_more(self, ifindex: int, before: Addresses, more: Addresses) -> bool:
        """Write the addresses that have no place in `CGate`. Whether there is room for all."""
        self._more_of[ifindex] = more
        if not more:
            del self._more_of[ifindex]
        try:
            for address, is_claimed in more.items():
                if before.get(address) is not is_claimed:
                    self._more_addresses.set(
                        _address_key(ifindex, address), _NUMBER.pack(is_claimed)
                    )
        except errors.BpfError as error:
            if error.errno != errno.E2BIG:
                raise
            # Read again from the map at the next change.
            self._more_of.pop(ifindex)
            return False
        return True

    def _load_more(self, ifindex: int) -> Addresses:
        found = self._more_of.get(ifindex)
        return super()._load_more(ifindex) if found is None else found


def _pack(config: GateConfig, addresses: Addresses) -> abi.CGate:
    gate = abi.CGate(
        mode=config.mode,
        address_count=len(addresses),
        claimed_count=sum(addresses.values()),
    )
    for slot, address in zip(gate.addresses, addresses, strict=False):
        ctypes.memmove(ctypes.addressof(slot), abi.pack_address(address), 16)
    for index, rule in enumerate(config.rules[: abi.GATE_FIRST_RULES]):
        gate.rules[index] = rule.pack()
    return gate


def _address_key(ifindex: int, address: abi.IPAddress) -> bytes:
    return abi.pack_address(address) + _NUMBER.pack(ifindex)
