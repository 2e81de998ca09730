"""Gates' configurations in the maps: none is lost, and programs see no mix of two."""

import errno
import fcntl
import ipaddress
import os
import pathlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpf import abi, errors, map_specs, rcu
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

    def __init__(self, spec: map_specs.MapSpec) -> None:
        self.spec = spec
        self.value_size = spec.value_size
        self.room = spec.max_entries
        self.values: dict[bytes, bytes] = {}
        if spec in (map_specs.GATES, map_specs.COUNTERS, map_specs.FREQUENT_COUNTS):
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
        self.maps = {spec.name: _Map(spec) for spec in map_specs.MAPS}

    def map(self, spec: map_specs.MapSpec) -> _Map:
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
    identified_kubelet=st.booleans(),
    ifindex=st.integers(1, 3 * abi.MAX_GATES),
)
def test_configuration_comes_back_also_in_another_process(
    mode: Mode,
    own: list[abi.IPAddress],
    claimed: list[abi.IPAddress],
    admitted: list[Rule],
    any_address: bool,
    without_fallback: bool,
    identified_kubelet: bool,
    ifindex: int,
) -> None:
    claimed = [address for address in claimed if address not in own]
    config = GateConfig(
        *(mode, tuple(own), tuple(admitted), any_address, tuple(claimed)),
        without_fallback=without_fallback,
        identified_kubelet=identified_kubelet,
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
        assert found.identified_kubelet == identified_kubelet
        assert seen_by.interfaces() == [ifindex]
        assert seen_by.grace_until_ns(ifindex) == 17
    table.delete(ifindex)
    for seen_by in (table, _shared.table()):
        assert seen_by.get(ifindex) is None
        assert seen_by.grace_until_ns(ifindex) is None
    assert all(
        not _shared.map(spec).values
        for spec in (map_specs.GATE_SLOTS, map_specs.MORE_RULES, map_specs.GATE_ADDRESSES_MAP)
    )


def test_every_interface_has_a_slot_of_its_own_until_all_are_taken(
    loaded: _Loaded, waits: list[None]
) -> None:
    table = loaded.table()
    config = GateConfig(Mode.ENFORCE, ())
    same_first_slot = [7 + number * abi.MAX_GATES for number in range(3)]
    for ifindex in same_first_slot:
        table.set(ifindex, config, 0)
    slots = loaded.map(map_specs.GATE_SLOTS)
    assert slots.values[(7).to_bytes(4, "little")] == (abi.FIRST_SLOT + 7).to_bytes(4, "little")
    assert list(slots.values.values()) == [
        number.to_bytes(4, "little")
        for number in (abi.FIRST_SLOT + 7, abi.SLOT_COUNT - 1, abi.SLOT_COUNT - 2)
    ]
    for ifindex in range(1_000_000, 1_000_000 + abi.MAX_GATES - 3):
        slots.values[ifindex.to_bytes(4, "little")] = next(
            key
            for number in range(ifindex - 1_000_000 + abi.FIRST_SLOT, abi.SLOT_COUNT)
            if (key := number.to_bytes(4, "little")) not in slots.values.values()
        )
    with pytest.raises(
        errors.BpfError, match="the map gates is full; it holds 4096 entries"
    ) as caught:
        table.set(8, config, 0)
    assert caught.value.errno == errno.E2BIG
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
    for _ in range(2):
        table.delete(7)
        waits.clear()
        table.set(7, config, 10)
        assert len(waits) == 1


def test_programs_see_no_mix_of_two_configurations(loaded: _Loaded, waits: list[None]) -> None:
    """The version in force is not written, and becomes another one by a store of one word."""
    table = loaded.table()
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    gates = loaded.map(map_specs.GATES)
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
    few = GateConfig(Mode.ENFORCE, numbered(1), ports(3))
    table.set(4, few, 0)
    before = [table.writes for table in loaded.maps.values()]
    table.set(3, config, 0)
    table.set(4, few, 0)
    assert [table.writes for table in loaded.maps.values()] == before


def test_change_of_a_later_rule_alone_is_written(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    for last in (Rule(SourceKind.ANY, 6, 5, 5), Rule(SourceKind.KUBELET, 6, 5, 5)):
        config = GateConfig(Mode.ENFORCE, numbered(1), (*ports(4), last))
        table.set(3, config, 0)
        assert loaded.table().get(3) == config


def test_first_slot_is_given_when_no_other_is_left(loaded: _Loaded, waits: list[None]) -> None:
    slots = loaded.map(map_specs.GATE_SLOTS).values
    for slot in range(abi.FIRST_SLOT + 1, abi.SLOT_COUNT):
        slots[(1_000_000 + slot).to_bytes(4, "little")] = slot.to_bytes(4, "little")
    loaded.table().set(7, GateConfig(Mode.ENFORCE, ()), 0)
    assert slots[(7).to_bytes(4, "little")] == abi.FIRST_SLOT.to_bytes(4, "little")


@pytest.mark.parametrize("is_map_full", [True, False], ids=["full map", "too many of one pod"])
def test_addresses_without_room_make_all_addresses_the_pods(
    loaded: _Loaded, waits: list[None], is_map_full: bool
) -> None:
    table = loaded.table()
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    count = 20
    if is_map_full:
        loaded.map(map_specs.GATE_ADDRESSES_MAP).room = 10
    else:
        count = abi.GATE_ADDRESSES + abi.MAX_GATE_ADDRESSES + 1
    for _ in range(2):
        problem = table.set(3, GateConfig(Mode.ENFORCE, (), claimed=numbered(count)), 0)
        assert problem == (
            f"The pod has {count} addresses, more than a gate lists: all addresses behind its "
            "interface count as the pod's; use fewer."
        )
        found = table.get(3)
        assert found is not None
        assert (found.mode, found.any_address) == (Mode.ENFORCE, True)
    assert table.set(3, GateConfig(Mode.ENFORCE, numbered(1)), 0) == ""
    assert table.get(3) == GateConfig(Mode.ENFORCE, numbered(1))
    assert not loaded.map(map_specs.GATE_ADDRESSES_MAP).values


@pytest.mark.parametrize("is_map_full", [True, False], ids=["full map", "too many of one pod"])
def test_rules_without_room_admit_nothing(
    loaded: _Loaded, waits: list[None], is_map_full: bool
) -> None:
    table = loaded.table()
    wanted, kept = (ports(20), 4) if is_map_full else (ports(33), 32)
    if is_map_full:
        loaded.map(map_specs.MORE_RULES).room = 0
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    problem = table.set(3, GateConfig(Mode.ENFORCE, numbered(1), wanted), 0)
    assert problem == (
        "The gate has the first 4 of the pod's 20 rules, and the others admit nothing: the map "
        "more_rules is full."
        if is_map_full
        else "33 rules match the pod and a gate holds 32: the others admit nothing; use fewer."
    )
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
    # An interface without a gate has none to end.
    before = [each.writes for each in loaded.maps.values()]
    table.end_grace(4, 0)
    assert [each.writes for each in loaded.maps.values()] == before
    assert table.grace_until_ns(4) is None


def test_as_much_as_a_gate_holds_is_no_problem(loaded: _Loaded, waits: list[None]) -> None:
    addresses = numbered(abi.GATE_ADDRESSES + abi.MAX_GATE_ADDRESSES)
    config = GateConfig(Mode.ENFORCE, addresses[:1000], ports(32), claimed=addresses[1000:])
    table = loaded.table()
    assert table.set(3, config, 0) == ""
    assert table.get(3) == config


def test_address_that_a_pod_also_claims_is_its_own(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    table.set(3, GateConfig(Mode.ENFORCE, numbered(3), claimed=numbered(4)), 0)
    found = table.get(3)
    assert found is not None
    assert (found.addresses, found.claimed) == (numbered(3), numbered(4)[3:])


def test_each_address_without_a_place_in_the_gate_is_in_the_map_once(
    loaded: _Loaded, waits: list[None]
) -> None:
    """Written when it is new or is confirmed, and deleted when it is gone."""
    table = loaded.table()
    more = loaded.map(map_specs.GATE_ADDRESSES_MAP)
    other = GateConfig(Mode.ENFORCE, numbered(9))
    table.set(4, other, 0)
    steps = [
        (GateConfig(Mode.ENFORCE, numbered(2)), 0, 0),
        (GateConfig(Mode.ENFORCE, numbered(2), claimed=numbered(6)[2:]), 4, 4),
        (GateConfig(Mode.ENFORCE, numbered(3), claimed=numbered(6)[3:]), 4, 1),
        (GateConfig(Mode.ENFORCE, numbered(3), claimed=numbered(6)[3:]), 4, 0),
        (GateConfig(Mode.ENFORCE, numbered(3)), 1, 0),
        (GateConfig(Mode.ENFORCE, numbered(2)), 0, 0),
    ]
    for config, count, writes in steps:
        before = more.writes
        assert table.set(3, config, 0) == ""
        assert (len(more.values) - 7, more.writes - before) == (count, writes)
        assert [seen_by.get(3) for seen_by in (table, loaded.table())] == [config, config]
    table.delete(3)
    assert len(more.values) == 7
    assert table.get(4) == other


def test_errors_of_the_maps_other_than_that_they_are_full_are_raised(
    loaded: _Loaded, waits: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: bytes, value: bytes) -> None:
        raise errors.BpfError(errno.ENOMEM, "there is no memory")

    monkeypatch.setattr(loaded.map(map_specs.GATE_ADDRESSES_MAP), "set", fail)
    with pytest.raises(errors.BpfError, match="there is no memory"):
        loaded.table().set(3, GateConfig(Mode.ENFORCE, numbered(5)), 0)


def test_interface_without_a_configuration_admits_the_kubelet_to_any_address(
    loaded: _Loaded, waits: list[None]
) -> None:
    loaded.table()
    value = loaded.map(map_specs.GATES).values[abi.FALLBACK_SLOT.to_bytes(4, "little")]
    slot = abi.CGateSlot.from_buffer_copy(value)
    gate = slot.versions[slot.current]
    assert (gate.mode, gate.flags) == (Mode.ENFORCE, abi.GATE_ANY_ADDRESS)
    assert (gate.ifindex, gate.slot, gate.grace_until_ns) == (0, abi.FALLBACK_SLOT, 0)
    found = [Rule.unpack(rule) for rule in gate.rules[: gate.rule_count]]
    assert found == [Rule(SourceKind.KUBELET, protocol=6)]


def test_new_gate_counts_from_zero_and_a_changed_one_goes_on(
    loaded: _Loaded, waits: list[None]
) -> None:
    table = loaded.table()
    key = (abi.FIRST_SLOT + 3).to_bytes(4, "little")
    maps = [loaded.map(spec) for spec in (map_specs.COUNTERS, map_specs.FREQUENT_COUNTS)]
    counted = [b"\1" * each.value_size for each in maps]

    def count() -> None:
        for each, value in zip(maps, counted, strict=True):
            each.values[key] = value

    count()
    table.set(3, GateConfig(Mode.AUDIT, ()), 0)
    assert [each.values[key] for each in maps] == [bytes(len(value)) for value in counted]
    count()
    table.set(3, GateConfig(Mode.ENFORCE, ()), 0)
    assert [each.values[key] for each in maps] == counted


def test_deleted_gate_leaves_nothing_in_its_slot(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    gates = loaded.map(map_specs.GATES)
    empty = dict(gates.values)
    table.set(3, GateConfig(Mode.AUDIT, numbered(1)), 0)
    table.set(3, GateConfig(Mode.AUDIT, numbered(1), ports(9)), 0)
    table.set(3, GateConfig(Mode.ENFORCE, numbered(1), ports(8)), 0)
    assert len(loaded.map(map_specs.MORE_RULES).values) == 2
    loaded.table().delete(3)
    assert gates.values == empty
    assert loaded.map(map_specs.MORE_RULES).values == {}
    table.delete(3)


def test_rules_that_fit_again_leave_none_of_the_others(loaded: _Loaded, waits: list[None]) -> None:
    table = loaded.table()
    table.set(3, GateConfig(Mode.ENFORCE, numbered(1), ports(4)), 0)
    for count in (5, 4, 9, 3, 2):
        table.set(3, GateConfig(Mode.ENFORCE, numbered(1), ports(count)), 0)
        assert loaded.table().get(3) == GateConfig(Mode.ENFORCE, numbered(1), ports(count))
    assert loaded.map(map_specs.MORE_RULES).values == {}


@pytest.mark.parametrize("slot", [abi.SLOT_COUNT, abi.FIRST_SLOT + 9])
def test_slot_of_another_interface_is_no_configuration(
    loaded: _Loaded, waits: list[None], slot: int
) -> None:
    """As a reader sees it while another process moves a gate."""
    table = loaded.table()
    table.set(9, GateConfig(Mode.ENFORCE, numbered(1)), 0)
    loaded.map(map_specs.GATE_SLOTS).values[(3).to_bytes(4, "little")] = slot.to_bytes(4, "little")
    assert (table.get(3), table.grace_until_ns(3)) == (None, None)
    assert table.get(9) == GateConfig(Mode.ENFORCE, numbered(1))


def test_directory_is_locked_during_a_change_only(
    loaded: _Loaded, waits: list[None], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    seen = []

    def is_locked() -> bool:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(other, fcntl.LOCK_UN)
        return False

    gates = loaded.map(map_specs.GATES)
    set_value = gates.set

    def record(key: bytes, value: bytes) -> None:
        seen.append(is_locked())
        set_value(key, value)

    monkeypatch.setattr(gates, "set", record)
    table = GateTable(loaded, tmp_path)  # type: ignore[arg-type]
    seen.append(is_locked())
    for change in (
        lambda: table.set(3, GateConfig(Mode.ENFORCE, numbered(1)), 10),
        lambda: table.end_grace(3, 0),
        lambda: table.delete(3),
    ):
        change()
        seen.append(is_locked())
    assert seen == [
        *(True, True, False),
        *(True, True, False),
        *(True, True, False),
        *(True, False),
    ]
    os.close(other)
    table.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        table.close()


def test_table_is_locked_by_its_directory_and_by_no_file(
    loaded: _Loaded, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        GateTable(loaded, tmp_path / "file")  # type: ignore[arg-type]


def test_counters_take_16_bytes_of_a_gate_for_each_cpu_and_half_a_kib_once() -> None:
    assert not map_specs.COUNTERS.is_per_cpu
    assert map_specs.COUNTERS.value_size * map_specs.COUNTERS.max_entries < 3 << 20
    assert map_specs.FREQUENT_COUNTS.value_size * map_specs.FREQUENT_COUNTS.max_entries < 65 << 10
