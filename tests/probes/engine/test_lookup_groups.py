"""Groups of probes count their lookups together, and bring a slot up to date when it is needed."""

import pytest

from probes.engine import prober
from probes.engine.lookup_groups import LookupGroup, SlotLookup, grid_of
from probes.engine.slots import Slot
from probes.engine.targets import ProbeKey
from probes.engine.workers import ContainerInstance, ProbeType, Worker
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import Probe, TcpSocket
from tests.probes.engine.schedules import NETNS

PERIOD = 10.0


def passed(name: str, *, left: int = 100, answered: bool = False) -> SlotLookup:
    """Of a probe that has passed at 0."""
    probe = Probe(TcpSocket(80), period_seconds=PERIOD, answered=answered)
    worker = Worker(ProbeType.READINESS, probe, first_at=0.0)
    worker.observe(ContainerInstance("c1", 0.0), started=True, deleting=False, now=0.0)
    worker.start(0.0)
    outcome = ProbeOutcome(ProbeResult.SUCCESS)
    worker.finish(outcome, 0.0)
    slot = Slot(
        ProbeKey(name, "app", ProbeType.READINESS),
        worker,
        prober.plan(probe, ["198.18.0.1"]),
        NETNS,
    )
    slot.outcome = outcome
    lookup = slot.lookup = SlotLookup(slot, (name.encode(),))
    lookup.left = left
    return lookup


@pytest.fixture
def group() -> LookupGroup:
    grid = grid_of(PERIOD)
    return LookupGroup(PERIOD, grid, round(PERIOD / grid))


def test_a_slot_is_brought_up_to_date_by_what_has_passed_since_it_joined(
    group: LookupGroup,
) -> None:
    first, second = passed("a"), passed("b")
    group.add(first)
    group.pass_all(0.001, 10.0)
    group.add(second)
    group.pass_all(0.002, 20.0)
    for lookup, count in ((first, 2), (second, 1)):
        assert lookup.slot.passed == 0
        lookup.catch_up()
        lookup.catch_up()
        assert (lookup.slot.passed, lookup.left) == (count, 100 - count)
        assert lookup.slot.worker.streak == 1 + count
        assert lookup.slot.due == lookup.slot.worker.due == PERIOD * (1 + count)
        outcome = lookup.slot.outcome
        assert outcome is not None
        assert outcome.is_looked_up
    assert (first.seconds, second.seconds) == ([0.001, 0.002], [0.002])


def test_missed_ticks_are_dropped_and_the_rhythm_stays(group: LookupGroup) -> None:
    lookup = passed("a")
    group.add(lookup)
    group.pass_all(0.001, 43.0)
    assert group.at == 50.0
    lookup.catch_up()
    assert (lookup.slot.passed, lookup.slot.worker.due) == (1, 50.0)


@pytest.mark.parametrize(("now", "next_at"), [(20.1, 20.0), (20.25, 30.0)])
def test_a_tick_that_is_not_over_is_not_missed(
    group: LookupGroup, now: float, next_at: float
) -> None:
    lookup = passed("a")
    group.add(lookup)
    group.pass_all(0.001, now)
    assert group.at == next_at


def test_slots_leave_when_they_connect_and_when_durations_are_passed_on(
    group: LookupGroup,
) -> None:
    soon, later = passed("a", left=1), passed("b")
    group.add(soon)
    group.add(later)
    assert group.pop_expired() == []
    group.pass_all(0.001, 10.0)
    assert group.pop_expired() == [soon]
    assert (soon.left, soon.group, group.slots) == (0, None, [later.slot])
    for _ in range(29):
        group.pass_all(0.001, 10.0)
    assert group.pop_expired() == [later]
    assert (later.left, len(later.seconds)) == (70, 30)


def test_a_slot_that_is_to_connect_expires_once(group: LookupGroup) -> None:
    lookup = passed("a", left=3)
    group.add(lookup)
    lookup.connect_next()
    lookup.connect_next()
    assert group.pop_expired() == [lookup]
    group.add(passed("b", left=3))
    for _ in range(2):
        group.pass_all(0.001, 10.0)
        assert group.pop_expired() == []


def test_queries_and_answers_are_in_the_order_of_the_slots(group: LookupGroup) -> None:
    lookups = [passed(name) for name in "abc"]
    lookups[1].queries = (b"b", b"B")
    for lookup in lookups:
        group.add(lookup)
    assert group.queries == [b"a", b"b", b"B", b"c"]
    assert group.without_room(b"\1\1\0\1") == [lookups[1].slot]
    assert group.without_room(b"\0\1\1\0") == [lookups[0].slot, lookups[2].slot]
    lookups[0].cancel()
    assert group.queries == [b"b", b"B", b"c"]


def test_groups_that_meet_in_one_tick_become_one(group: LookupGroup) -> None:
    early, late = passed("a"), passed("b", answered=True)
    other = LookupGroup(PERIOD, grid_of(PERIOD), 0)
    other.add(early)
    other.pass_all(0.001, 0.0)
    assert other.key == group.key
    group.add(late)
    group.absorb(other)
    assert (len(other), group.slots) == (0, [late.slot, early.slot])
    assert early.slot.passed == 1
    group.pass_all(0.001, 10.0)
    early.catch_up()
    assert early.slot.passed == 2
    assert [*group.answered] == [late.slot]
    late.cancel()
    assert (group.slots, group.answered) == ([early.slot], {})


def test_slots_that_connect_soon_leave_together_now_and_then(group: LookupGroup) -> None:
    """Of four periods the group's first is in the second one."""
    lookups = [passed(str(left), left=left) for left in (1, 2, 3, 4, 5, 6, 7, 40)]
    for lookup in lookups:
        group.add(lookup)
    lookups[4].cancel()
    taken = []
    for _ in range(4):
        taken.append([lookup.slot.key.uid for lookup in group.pop_soon(4, 2)])
        group.pass_all(0.001, 0.0)
    assert taken == [[], [], [], ["4", "6"]]
    for _ in range(23):
        group.pass_all(0.001, 0.0)
    # Its durations are passed on after 30 lookups, and it does not connect then.
    assert group.number // 40 % 4 == 0
    assert [lookup.slot.key.uid for lookup in group.pop_soon(4, 9)] == []


@pytest.mark.parametrize("period", [0.05, 0.125, 0.3, 1.0, 1.5, 2.5, 10.0, 3600.0])
def test_a_period_has_a_whole_number_of_ticks_and_each_is_a_tenth_at_most(period: float) -> None:
    grid = grid_of(period)
    assert round(period / grid) * grid == pytest.approx(period)
    assert grid <= max(period / 10, 0.01)
