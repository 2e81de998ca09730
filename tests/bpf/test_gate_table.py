"""Gates' configurations in the maps: none is lost, and programs see no mix of two."""

import errno
import ipaddress
import pathlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpf import abi, errors, rcu
from bpf.gate_config import GateConfig
from bpf.gate_table import GateTable
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

# ::ffff:0:0/96 is how IPv4 is written down, so such an address comes back as IPv4.
addresses = st.ip_addresses().filter(lambda it: it.version == 4 or it.ipv4_mapped is None)
rules = st.builds(
    Rule,
    source=st.sampled_from(SourceKind),
    protocol=st.integers(0, 255),
    first_port=st.integers(0, 65535),
    last_port=st.integers(0, 65535),
    cgroup=st.integers(0, 2**64 - 1),
    level=st.integers(0, 64),
    id=st.integers(0, 2**32 - 1),
)


class _Map:
    """What `GateTable` uses of a map; an array has all of its keys from the start."""

    def __init__(self, spec: abi.MapSpec) -> None:
        self.spec = spec
        self.value_size = spec.value_size
        self.room = spec.max_entries
        self.values: dict[bytes, bytes] = {}
        if spec in (abi.GATES, abi.COUNTERS, abi.FREQUENT_COUNTS):
            for number in range(spec.max_entries):
                self.values[number.to_bytes(4, "little")] = bytes(spec.value_size)
        self.writes = 0

    def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        assert (len(key), len(value)) == (self.spec.key_size, self.value_size)
        if key not in self.values and len(self.values) >= self.room:
            raise errors.BpfError(errno.E2BIG, f"the map {self.spec.name} is full")
        self.values[key] = value
        self.writes += 1

    def delete(self, key: bytes) -> bool:
        return self.values.pop(key, None) is not None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(list(self.values.items()))


class _Loaded:
    def __init__(self) -> None:
        self.maps = {spec.name: _Map(spec) for spec in abi.MAPS}

    def map(self, spec: abi.MapSpec) -> _Map:
        return self.maps[spec.name]

    def table(self) -> GateTable:
        """Another process's view of the same maps."""
        return GateTable(self, pathlib.Path("/"))  # type: ignore[arg-type]


@pytest.fixture
def loaded() -> _Loaded:
    return _Loaded()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    made: list[None] = []
    monkeypatch.setattr(rcu, "wait_for_programs", lambda: made.append(None))
    return made


def numbered(count: int) -> tuple[abi.IPAddress, ...]:
    return tuple(ipaddress.IPv4Address(0xC6120000 + number) for number in range(count))


def ports(count: int) -> tuple[Rule, ...]:
    return tuple(Rule(SourceKind.ANY, 6, port, port) for port in range(1, count + 1))


_shared = _Loaded()


@settings(deadline=None)
@given(
    mode=st.sampled_from(Mode),
    own=st.lists(addresses, max_size=8, unique=True),
    claimed=st.lists(addresses, max_size=8, unique=True),
    admitted=st.lists(rules, max_size=32),
    any_address=st.booleans(),
    without_fallback=st.booleans(),
    ifindex=st.integers(1, 3 * abi.MAX_GATES),
)
def test_configuration_comes_back_also_in_another_process(
    mode: Mode,
    own: list[abi.IPAddress],
    claimed: list[abi.IPAddress],
    admitted: list[Rule],
    any_address: bool,
    without_fallback: bool,
    ifindex: int,
) -> None:
    claimed = [address for address in claimed if address not in own]
    config = GateConfig(
        mode, tuple(own), tuple(admitted), any_address, tuple(claimed), without_fallback
    )
    table = _shared.table()
    assert table.set(ifindex, config, 17) == ""
    for seen_by in (table, _shared.table()):
        found = seen_by.get(ifindex)
        assert found is not None
        assert set(found.addresses) == set(own)
        assert set(found.claimed) == set(claimed)
        assert (found.mode, found.rules, found.any_address) == (mode, config.rules, any_address)
        assert found.without_fallback == without_fallback
        assert seen_by.grace_until_ns(ifindex) == 17
    table.delete(ifindex)
    assert table.get(ifindex) is None
    assert all(
        not _shared.map(spec).values
        for spec in (abi.GATE_SLOTS, abi.MORE_RULES, abi.GATE_ADDRESSES_MAP)
    )


def test_every_interface_has_a_slot_of_its_own_until_all_are_taken(
    loaded: _Loaded, waits: list[None]
) -> None:
    table = loaded.table()
    config = GateConfig(Mode.ENFORCE, ())
    same_first_slot = [7 + number * abi.MAX_GATES for number in range(3)]
    for ifindex in same_first_slot:
        table.set(ifindex, config, 0)
    slots = loaded.map(abi.GATE_SLOTS)
    assert slots.values[(7).to_bytes(4, "little")] == (abi.FIRST_SLOT + 7).to_bytes(4, "little")
    assert len(set(slots.values.values())) == 3
    for ifindex in range(1_000_000, 1_000_000 + abi.MAX_GATES - 3):
        slots.values[ifindex.to_bytes(4, "little")] = next(
            key
            for number in range(ifindex - 1_000_000 + abi.FIRST_SLOT, abi.SLOT_COUNT)
            if (key := number.to_bytes(4, "little")) not in slots.values.values()
        )
    with pytest.raises(errors.BpfError, match="the map gates is full; it holds 4096 entries"):
        table.set(8, config, 0)
    table.set(7, GateConfig(Mode.AUDIT, ()), 0)
    table.delete(7)
    assert table.set(8, config, 0) == ""


def test_changes_of_many_gates_wait_once_for_programs(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    gates = range(1, 251)
    for ifindex in gates:
        table.set(ifindex, GateConfig(Mode.ENFORCE, numbered(1)), 0)
    assert len(waits) == 1
    for change in range(1, 6):
        for ifindex in gates:
            table.set(ifindex, GateConfig(Mode.ENFORCE, numbered(1), ports(change)), 0)
        # The first change waits for none, since no program read the version before a new gate's.
        assert len(waits) == change


def test_first_change_of_a_new_gate_waits_for_no_program(
    loaded: _Loaded, waits: list[None]
) -> None:
    """Its grace period ends while a crowd's other pods wait for their gates."""
    table = loaded.table()
    config = GateConfig(Mode.ENFORCE, numbered(1))
    table.set(7, config, 10)
    waits.clear()
    table.end_grace(7, 0)
    assert waits == []
    # From now on programs may read either version.
    table.set(7, GateConfig(Mode.AUDIT, numbered(1)), 0)
    assert len(waits) == 1
    # So may those of the interface whose gate had the slot before.
    table.delete(7)
    waits.clear()
    table.set(7, config, 10)
    assert len(waits) == 1


def test_programs_see_no_mix_of_two_configurations(loaded: _Loaded, waits: list[None]) -> None:
    """The version in force is not written, and becomes another one by a store of one word."""
    table = loaded.table()
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    gates = loaded.map(abi.GATES)
    key = (abi.FIRST_SLOT + 3).to_bytes(4, "little")
    seen = [abi.CGateSlot.from_buffer_copy(gates.values[key])]
    set_value = gates.set

    def record(key: bytes, value: bytes) -> None:
        seen.append(abi.CGateSlot.from_buffer_copy(value))
        set_value(key, value)

    gates.set = record  # type: ignore[method-assign]
    table.set(3, GateConfig(Mode.ENFORCE, numbered(2), ports(9)), 0)
    before, written, after = seen
    assert before.current == written.current != after.current
    assert bytes(before.versions[before.current]) == bytes(written.versions[before.current])
    assert bytes(written.versions) == bytes(after.versions)


def test_unchanged_configuration_is_not_written(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    config = GateConfig(Mode.ENFORCE, numbered(5), ports(9))
    table.set(3, config, 0)
    before = [table.writes for table in loaded.maps.values()]
    table.set(3, config, 0)
    assert [table.writes for table in loaded.maps.values()] == before


@pytest.mark.parametrize("is_map_full", [True, False], ids=["full map", "too many of one pod"])
def test_addresses_without_room_make_all_addresses_the_pods(
    loaded: _Loaded, waits: list[None], is_map_full: bool
) -> None:
    table = loaded.table()
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    count = 20
    if is_map_full:
        loaded.map(abi.GATE_ADDRESSES_MAP).room = 10
    else:
        count = abi.GATE_ADDRESSES + abi.MAX_GATE_ADDRESSES + 1
    for _ in range(2):
        problem = table.set(3, GateConfig(Mode.ENFORCE, (), claimed=numbered(count)), 0)
        assert f"The pod has {count} addresses" in problem
        found = table.get(3)
        assert found is not None
        assert (found.mode, found.any_address) == (Mode.ENFORCE, True)
    assert table.set(3, GateConfig(Mode.ENFORCE, numbered(1)), 0) == ""
    assert table.get(3) == GateConfig(Mode.ENFORCE, numbered(1))
    assert not loaded.map(abi.GATE_ADDRESSES_MAP).values


@pytest.mark.parametrize("is_map_full", [True, False], ids=["full map", "too many of one pod"])
def test_rules_without_room_admit_nothing(
    loaded: _Loaded, waits: list[None], is_map_full: bool
) -> None:
    table = loaded.table()
    wanted, kept = (ports(20), 4) if is_map_full else (ports(33), 32)
    if is_map_full:
        loaded.map(abi.MORE_RULES).room = 0
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    problem = table.set(3, GateConfig(Mode.ENFORCE, numbered(1), wanted), 0)
    assert "admit nothing" in problem
    assert table.get(3) == GateConfig(Mode.ENFORCE, numbered(1), wanted[:kept])


def test_grace_period_only_gets_shorter(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    config = GateConfig(Mode.ENFORCE, numbered(5), ports(9))
    table.set(3, config, 1000)
    table.end_grace(3, 2000)
    assert table.grace_until_ns(3) == 1000
    table.end_grace(3, 500)
    assert table.grace_until_ns(3) == 500
    assert table.get(3) == config


def test_counters_take_16_bytes_of_a_gate_for_each_cpu_and_half_a_kib_once() -> None:
    assert not abi.COUNTERS.is_per_cpu
    assert abi.COUNTERS.value_size * abi.COUNTERS.max_entries < 3 << 20
    assert abi.FREQUENT_COUNTS.value_size * abi.FREQUENT_COUNTS.max_entries < 65 << 10
