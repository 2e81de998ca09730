"""Packets that have no record yet, and those that the table has lost."""

import dataclasses
from typing import Any

from agent.flows.tally import Tally
from bpf.counters import Counts
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode, Reason, Verdict

GATE = 7
ONE = DropSource(
    5, GATE, 6, 80, first_ns=10, last_ns=20, count=3, process_name="x", mode=Mode.AUDIT
)


def having(count: int, **changes: Any) -> DropSource:
    return dataclasses.replace(ONE, count=count, **changes)


def counted(packets: int) -> dict[int, Counts]:
    """Of both, only those of processes are in the table."""
    return {GATE: {(Verdict.WOULD_DROP, Reason.NODE): packets, (Verdict.PASS, Reason.RULE): 99}}


def begun(*sources: DropSource, packets: int = 0) -> Tally:
    tally = Tally()
    tally.observe(sources)
    tally.begin(counted(packets))
    return tally


def read(tally: Tally, packets: int, *sources: DropSource) -> tuple[list[tuple[int, int]], int]:
    """A reading: packets and first time of each source, and what is lost."""
    tally.observe(sources)
    tally.account(counted(packets))
    fresh, lost = tally.take()
    return [(one.packets, one.first_ns) for one in fresh], lost


def test_only_what_came_since_the_last_reading_is_fresh() -> None:
    tally = begun(having(3), packets=3)
    assert read(tally, 3, having(3)) == ([], 0)
    # The packet before it was at 20.
    assert read(tally, 5, having(5, last_ns=40)) == ([(2, 20)], 0)
    other = having(4, port=81)
    assert read(tally, 10, having(6, last_ns=50), other) == ([(4, 10), (1, 40)], 0)


def test_readings_between_records_add_up() -> None:
    tally = begun()
    tally.observe([having(2)])
    tally.observe([having(9, last_ns=30)])
    assert read(tally, 9, having(9, last_ns=30)) == ([(9, 10)], 0)


def test_entry_that_the_table_made_again_counts_from_its_start() -> None:
    tally = begun(having(8), packets=8)
    assert read(tally, 10, having(2, first_ns=30)) == ([(2, 30)], 0)


def test_reading_that_misses_packets_of_a_cpu_counts_them_once() -> None:
    tally = begun()
    assert read(tally, 9, having(9)) == ([(9, 10)], 0)
    assert read(tally, 9, having(4)) == ([], 0)
    assert read(tally, 10, having(10)) == ([(1, 20)], 0)


def test_loss_is_what_three_readings_agree_on() -> None:
    tally = begun()
    assert read(tally, 10, having(3)) == ([(3, 10)], 0)
    assert read(tally, 10, having(3)) == ([], 0)
    assert read(tally, 10, having(3)) == ([], 7)
    assert read(tally, 10, having(3)) == ([], 0)
    # A packet that only the counter has yet.
    assert read(tally, 11, having(3)) == ([], 0)
    assert read(tally, 11, having(4)) == ([(1, 20)], 0)
    assert read(tally, 11, having(4)) == ([], 0)


def test_loss_never_decreases() -> None:
    tally = begun()
    for _ in range(3):
        tally.observe([having(1)])
        tally.account(counted(5))
    assert tally.take()[1] == 4
    # A reading of the table after further packets.
    assert [read(tally, 5, having(3))[1] for _ in range(3)] == [0, 0, 0]
    assert [read(tally, 9, having(3))[1] for _ in range(3)] == [0, 0, 2]


def test_what_was_lost_before_the_beginning_is_not_counted() -> None:
    tally = begun(having(3), packets=100)
    assert [read(tally, 100, having(3))[1] for _ in range(4)] == [0, 0, 0, 0]


def test_gate_whose_counters_are_zero_still_is_the_same_gate() -> None:
    tally = Tally()
    tally.begin({})
    # The table has packets that came after the reading of the counters.
    assert read(tally, 0, having(3)) == ([(3, 10)], 0)
    assert [read(tally, 3, having(3)) for _ in range(4)] == [([], 0)] * 4


def test_another_gate_of_the_interface_starts_at_zero() -> None:
    tally = begun(packets=100)
    tally.account({})
    assert [read(tally, 150, having(149))[1] for _ in range(3)] == [0, 0, 1]
    # And the next, which has counted four before the reading that notices it.
    assert [read(tally, 4, having(2, first_ns=90))[1] for _ in range(3)] == [0, 0, 0]
    assert [read(tally, 6, having(2, first_ns=90))[1] for _ in range(3)] == [0, 0, 2]


def test_readings_of_the_gate_before_do_not_count_for_the_next() -> None:
    tally = begun()
    assert [read(tally, 5)[1] for _ in range(2)] == [0, 0]
    tally.account({})
    assert [read(tally, 2)[1] for _ in range(4)] == [0, 0, 2, 0]
    # As many packets of the next, of which all are lost, too.
    tally.account({})
    assert [read(tally, 2)[1] for _ in range(4)] == [0, 0, 2, 0]


def test_gates_are_counted_apart() -> None:
    tally = Tally()
    tally.begin({})
    other = {7: {(Verdict.DROP, Reason.KERNEL): 4}, 8: {(Verdict.DROP, Reason.STRICT): 3}}
    for _ in range(3):
        tally.observe([having(3), having(3, ifindex=8)])
        tally.account(other)
    assert tally.take()[1] == 1
    assert tally.take() == ([], 0)


def test_packets_before_the_beginning_have_no_record() -> None:
    tally = Tally()
    tally.observe([having(3)])
    tally.begin(counted(3))
    assert tally.take() == ([], 0)


def test_same_source_in_another_mode_or_to_another_gate_is_another_entry() -> None:
    tally = begun()
    entries = [
        ONE,
        having(4, mode=Mode.ENFORCE),
        having(5, ifindex=8),
        having(6, cgroup=6),
        having(7, protocol=17),
    ]
    tally.observe(entries)
    fresh, _ = tally.take()
    assert [(one.source, one.packets) for one in fresh] == [
        (one, one.count) for one in reversed(entries)
    ]
