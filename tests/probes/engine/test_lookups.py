"""Which probes lookups decide, and when probes connect all the same. Time is fake."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from probes.engine import scheduler
from probes.engine.hints import ListenerHints
from probes.engine.targets import ProbeKey
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs
from tests.probes.engine.schedules import BAD, ERROR, LIVENESS, READINESS, Bench, pod, probe

pytestmark = pytest.mark.looptime

ADDRESS, OTHER = "198.18.0.1", "fd00:18::1"
NETNS_ID = 7


class Listeners:
    """The kernel's listeners: all ports have one with room but those that a test names."""

    def __init__(self) -> None:
        self.without_room: set[int] = set()
        self.lookups: list[tuple[float, int]] = []
        """Time and number of queries of each call."""
        self.is_gone = False

    def query(self, netns: Netns, netns_id: int, address: str, port: int) -> bytes | None:
        assert netns_id == NETNS_ID
        return None if self.is_gone else f"{port} {address}".encode()

    def look_up(self, queries: Sequence[bytes]) -> bytes:
        self.lookups.append((round(asyncio.get_running_loop().time(), 6), len(queries)))
        return bytes(int(int(query.split()[0]) not in self.without_room) for query in queries)


class LookupBench(Bench):
    """A scheduler that uses lookups; pods accept at their first address."""

    def __init__(self, connect_every: int = 5) -> None:
        super().__init__()
        self.listeners = Listeners()
        self.looked_up: list[tuple[str, int]] = []
        self.seconds: list[float] = []
        self.redirected: set[int] = set()
        self.accepts(1, 2)
        self.scheduler.lookups.use(
            self.listeners,
            on_lookups=self.on_lookups,
            is_direct=lambda netns, address, port: port not in self.redirected,
            connect_every=connect_every,
        )

    def on_lookups(self, key: ProbeKey, seconds: list[float]) -> None:
        self.looked_up.append((key.uid, len(seconds)))
        self.seconds += seconds

    def accepts(self, *ports: int, at: str = ADDRESS) -> None:
        for port in ports:
            self.pods.answers[port] = ProbeOutcome(ProbeResult.SUCCESS, address=at)

    def add(
        self,
        readiness: specs.Probe | None = None,
        *,
        uid: str = "a",
        liveness: specs.Probe | None = None,
        addresses: tuple[str, ...] = (ADDRESS,),
        container_id: str = "c1",
        netns_id: int | None = NETNS_ID,
        is_loopback_down: bool = False,
    ) -> None:
        made = pod(
            uid,
            readiness=readiness,
            liveness=liveness,
            addresses=addresses,
            container_id=container_id,
        )
        self.scheduler.set_pod(
            scheduler.ProbedPod(
                made.uid,
                made.netns,
                made.addresses,
                made.containers,
                netns_id=netns_id,
                is_loopback_down=is_loopback_down,
            )
        )

    @property
    def successes(self) -> int:
        return self.status("a").passed


@pytest.fixture
async def bench() -> LookupBench:
    return LookupBench()


@pytest.mark.parametrize("connect_every", [2, 5, 32])
async def test_every_nth_period_connects_and_lookups_decide_the_others(connect_every: int) -> None:
    bench = LookupBench(connect_every)
    bench.add(probe(1))
    await asyncio.sleep(20.0 * connect_every + 0.5)
    assert bench.pods.times(1) == [10.0 * connect_every * n for n in range(3)]
    assert bench.successes == 2 * connect_every + 1
    assert bench.results == [("a", READINESS, ProbeResult.SUCCESS)]


async def test_a_shorter_period_keeps_its_rhythm_beside_a_longer_one() -> None:
    bench = LookupBench(connect_every=1000)
    bench.add(probe(1))
    await asyncio.sleep(2)
    bench.add(probe(2, period=1.0), uid="b")
    await asyncio.sleep(5.5)
    assert [round(at, 3) for at, _ in bench.listeners.lookups] == [2.9, 3.9, 4.9, 5.9, 6.9]


async def test_a_lookup_is_shown_as_one(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(1)
    outcome = bench.status("a").outcome
    assert outcome is not None
    assert not outcome.is_looked_up
    await asyncio.sleep(10)
    outcome = bench.status("a").outcome
    assert outcome is not None
    assert (outcome.is_looked_up, outcome.address) == (True, ADDRESS)
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "")


async def test_some_of_the_probes_that_begin_together_connect_together_again() -> None:
    bench = LookupBench(connect_every=30)
    for number in range(100):
        bench.add(probe(1), uid=f"pod{number}")
    await asyncio.sleep(895)
    by_period = Counter(round(at / 10) for at in bench.pods.times(1) if at)
    assert max(by_period.values()) <= 32
    in_last_round = {period: count for period, count in by_period.items() if period >= 60}
    assert sum(in_last_round.values()) == 100
    assert len(in_last_round) <= 6


@pytest.mark.parametrize("connect_every", [2, 5, 30, 31])
async def test_no_probe_connects_later_than_in_every_nth_period(connect_every: int) -> None:
    bench = LookupBench(connect_every=connect_every)
    bench.accepts(*range(1, 41))
    for port in range(1, 41):
        bench.add(probe(port), uid=f"pod{port}")
    await asyncio.sleep(10 * connect_every * 4)
    for port in range(1, 41):
        times = bench.pods.times(port)
        assert len(times) >= 4
        assert max(later - at for at, later in pairwise(times)) <= 10 * connect_every
        assert times[-1] - times[-2] >= 10 * (connect_every - 2)


async def test_lookups_are_reported_together_before_the_next_connection(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(49)
    assert len(bench.probes) == 1
    assert bench.looked_up == []
    bench.scheduler.lookups.settle("a")
    assert bench.looked_up == [("a", 4)]
    await asyncio.sleep(50)
    assert len(bench.probes) == 2
    bench.scheduler.lookups.settle()
    assert bench.looked_up == [("a", 4), ("a", 4)]


async def test_lookups_of_a_probe_that_rarely_connects_are_reported_in_time() -> None:
    bench = LookupBench(connect_every=1000)
    bench.add(probe(1))
    await asyncio.sleep(315)
    assert bench.looked_up == [("a", 30)]
    # None of them takes time by the fake clock.
    assert bench.seconds == [0.0] * 30


async def test_lookups_of_a_removed_pod_are_reported(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(21)
    bench.scheduler.remove_pod("a")
    assert bench.looked_up == [("a", 2)]


async def test_probes_that_are_due_together_share_one_call() -> None:
    bench = LookupBench(connect_every=1000)
    for number in range(40):
        bench.add(probe(1), uid=f"pod{number}")
        await asyncio.sleep(0.003)
    await asyncio.sleep(20)
    assert sum(count for _, count in bench.listeners.lookups) == 80
    assert len(bench.listeners.lookups) == 2


@pytest.mark.parametrize("period", [0.125, 1.0, 10.0])
async def test_lookups_keep_the_rhythm_and_are_a_tenth_early_at_most(
    bench: LookupBench, period: float
) -> None:
    await asyncio.sleep(0.375)
    bench.add(probe(1, period=period))
    await asyncio.sleep(period * 40.5)
    assert bench.successes == 41
    due = [round(0.375 + period * n, 6) for n in range(41) if n % 5]
    early = [at - queried for at, (queried, _) in zip(due, bench.listeners.lookups, strict=True)]
    assert min(early) > -0.001
    assert max(early) <= period / 10


async def test_a_listener_that_is_gone_is_a_failure_in_the_same_period(bench: LookupBench) -> None:
    bench.add(probe(1, failure=1))
    await asyncio.sleep(25)
    bench.listeners.without_room = {1}
    bench.pods.answers[1] = BAD
    await asyncio.sleep(5.5)
    assert bench.pods.times(1) == [0.0, 30.0]
    assert bench.results[-1] == ("a", READINESS, ProbeResult.FAILURE)


async def test_only_connections_fail(bench: LookupBench) -> None:
    """What a lookup does not find, such as a listener of another interface, is tried."""
    bench.add(probe(1, failure=1))
    await asyncio.sleep(5)
    bench.listeners.without_room = {1}
    await asyncio.sleep(100)
    assert bench.results == [("a", READINESS, ProbeResult.SUCCESS)]
    assert bench.pods.times(1) == [10.0 * n for n in range(11)]


async def test_a_probe_that_fails_connects_in_each_period(bench: LookupBench) -> None:
    bench.pods.answers[1] = BAD
    bench.add(probe(1))
    await asyncio.sleep(35)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0, 30.0]
    bench.accepts(1)
    await asyncio.sleep(30)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0, 30.0, 40.0]


async def test_a_success_below_the_threshold_is_followed_by_connections(bench: LookupBench) -> None:
    bench.add(probe(1, success=3))
    await asyncio.sleep(35)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0]
    assert bench.status("a").streak == 4


async def test_a_connection_that_fails_though_there_is_room_does_not_hide_again(
    bench: LookupBench,
) -> None:
    """A rule that drops: the next connection sees it, and no lookup is trusted any more."""
    bench.add(probe(1, failure=3))
    await asyncio.sleep(45)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(30)
    assert bench.pods.times(1) == [0.0, 50.0, 60.0, 70.0]
    assert bench.results[-1] == ("a", READINESS, ProbeResult.FAILURE)
    assert bench.status("a").lookups_differ
    bench.accepts(1)
    await asyncio.sleep(50)
    assert bench.pods.times(1)[-5:] == [80.0, 90.0, 100.0, 110.0, 120.0]
    bench.add(probe(1), container_id="c2")
    await asyncio.sleep(15)
    assert not bench.status("a").lookups_differ
    assert bench.pods.times(1)[-2:] == [120.0, 125.0]


async def test_one_failure_beside_room_is_no_difference(bench: LookupBench) -> None:
    """The listener may have opened between the two."""
    bench.add(probe(1))
    await asyncio.sleep(45)
    bench.pods.answers[1] = BAD
    await asyncio.sleep(10)
    bench.accepts(1)
    await asyncio.sleep(40)
    assert bench.pods.times(1) == [0.0, 50.0, 60.0]
    assert not bench.status("a").lookups_differ


async def test_failures_without_a_listener_are_no_difference(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(5)
    bench.pods.answers[1], bench.listeners.without_room = BAD, {1}
    await asyncio.sleep(50)
    bench.accepts(1)
    bench.listeners.without_room = set()
    await asyncio.sleep(50)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


async def test_an_error_of_the_prober_shows_no_difference(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(45)
    bench.pods.answers[1] = ERROR
    await asyncio.sleep(30)
    assert not bench.status("a").lookups_differ
    bench.accepts(1)
    await asyncio.sleep(40)
    assert bench.pods.times(1)[-1] == 80.0


async def test_a_redirected_port_is_never_looked_up(bench: LookupBench) -> None:
    bench.redirected = {1}
    await asyncio.sleep(0.3)
    bench.add(probe(1))
    await asyncio.sleep(35)
    assert bench.pods.times(1) == pytest.approx([0.3, 10.3, 20.3, 30.3])
    assert bench.listeners.lookups == []


@pytest.mark.parametrize("uid", [None, "a"])
async def test_a_doubt_makes_the_next_probe_connect(bench: LookupBench, uid: str | None) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    bench.scheduler.lookups.doubt(uid)
    await asyncio.sleep(50)
    assert [round(at) for at in bench.pods.times(1)] == [0, 20]


async def test_a_doubt_concerns_its_pod_and_port_only() -> None:
    bench = LookupBench(connect_every=1000)
    bench.add(probe(1), liveness=probe(2))
    bench.add(probe(1), uid="b")
    await asyncio.sleep(15)
    bench.scheduler.lookups.doubt("a", 2)
    await asyncio.sleep(20)
    assert [round(at) for at in bench.pods.times(1)] == [0, 0]
    assert [round(at) for at in bench.pods.times(2)] == [0, 20]


async def test_a_doubt_during_a_connection_outlives_it(bench: LookupBench) -> None:
    """It may have been accepted before the change."""
    bench.pods.takes[1] = 0.5
    bench.add(probe(1))
    await asyncio.sleep(0.2)
    bench.scheduler.lookups.doubt("a")
    await asyncio.sleep(30)
    assert bench.pods.times(1) == [0.0, 10.0]


async def test_a_listener_event_makes_the_next_probe_connect(bench: LookupBench) -> None:
    hints = ListenerHints(bench.scheduler, look=lambda netns, port: [])
    bench.add(probe(1))
    await asyncio.sleep(15)
    hints.hint("a", 1, is_open=True)
    await asyncio.sleep(20)
    assert [round(at) for at in bench.pods.times(1)] == [0, 20]
    hints.close()


async def test_another_state_of_the_pod_makes_the_next_probe_connect(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    bench.add(probe(1))
    await asyncio.sleep(10)
    assert bench.pods.times(1) == [0.0]
    bench.add(probe(1), is_loopback_down=True)
    await asyncio.sleep(10)
    assert [round(at) for at in bench.pods.times(1)] == [0, 30]


async def test_another_period_counts_from_the_newest_lookup(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(45)
    bench.add(probe(1, period=20.0))
    await asyncio.sleep(60)
    assert bench.pods.times(1) == [0.0, 60.0]
    assert [at for at, _ in bench.listeners.lookups] == [10.0, 20.0, 30.0, 40.0, 80.0, 100.0]
    assert bench.status("a").streak == 8


async def test_a_probe_that_connects_leaves_the_others_in_their_rhythm() -> None:
    bench = LookupBench(connect_every=1000)
    for uid in ("a", "b", "c"):
        bench.add(probe(1), uid=uid)
    await asyncio.sleep(15)
    bench.scheduler.trigger("b")
    await asyncio.sleep(20)
    assert bench.listeners.lookups == [(10.0, 3), (20.0, 2), (25.0, 1), (30.0, 2), (35.0, 1)]
    assert [bench.status(uid).passed for uid in ("a", "b", "c")] == [4, 5, 4]


async def test_a_sweep_has_those_probes_connect_whose_listeners_have_changed(
    bench: LookupBench,
) -> None:
    """As after listener events that were lost."""
    for port in (1, 2, 3):
        bench.accepts(port)
        bench.add(probe(port, failure=1), uid=f"pod{port}")
    await asyncio.sleep(12)
    bench.pods.answers[2], bench.listeners.without_room = BAD, {2}
    bench.scheduler.lookups.sweep()
    await asyncio.sleep(0.001)
    assert [bench.pods.times(port) for port in (1, 2, 3)] == [[0.0], [0.0, 12.0], [0.0]]
    assert bench.results[-1] == ("pod2", READINESS, ProbeResult.FAILURE)
    assert bench.listeners.lookups[-2][1] == 3
    bench.accepts(2)
    bench.listeners.without_room = set()
    bench.scheduler.lookups.sweep()
    await asyncio.sleep(0.001)
    assert bench.pods.times(2) == [0.0, 12.0, 12.001]
    assert bench.results[-1] == ("pod2", READINESS, ProbeResult.SUCCESS)
    bench.scheduler.lookups.sweep()
    await asyncio.sleep(0.001)
    assert len(bench.pods.times(2)) == 3


async def test_a_triggered_probe_connects_at_once(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    bench.scheduler.trigger("a")
    await asyncio.sleep(0.001)
    assert bench.pods.times(1) == [0.0, 15.0]
    await asyncio.sleep(12)
    assert bench.successes == 4
    assert len(bench.pods.started) == 2


async def test_another_port_connects_first(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    bench.add(probe(2))
    await asyncio.sleep(12)
    assert bench.pods.times(2) == [15.0]
    assert bench.successes == 4


@pytest.mark.parametrize(
    "handler", [specs.HttpGet(1), specs.Grpc(1), specs.HttpGet(1, scheme="HTTPS")]
)
async def test_only_tcp_probes_are_looked_up(bench: LookupBench, handler: specs.Handler) -> None:
    bench.add(specs.Probe(handler, 0.0, 1.0, 10.0, 1, 3))
    await asyncio.sleep(35)
    assert len(bench.pods.started) == 4


async def test_startup_probes_always_connect(bench: LookupBench) -> None:
    made = pod("a", startup=probe(1, success=1))
    probes = made.containers[0]
    answered = specs.Probe(specs.TcpSocket(1), 0.0, 1.0, 10.0, 1, 3, answered=True)
    container = scheduler.ProbedContainer(specs.ContainerProbes("app", answered), "c1", 0.0)
    assert probes.probes.startup is not None
    bench.scheduler.set_pod(
        scheduler.ProbedPod("a", made.netns, (ADDRESS,), (container,), netns_id=NETNS_ID)
    )
    await asyncio.sleep(35)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0, 30.0]


async def test_a_namespace_without_a_number_or_that_is_gone_is_not_looked_up(
    bench: LookupBench,
) -> None:
    bench.add(probe(1), netns_id=None)
    bench.listeners.is_gone = True
    bench.add(probe(2), uid="b")
    await asyncio.sleep(25)
    assert bench.pods.times(1) == bench.pods.times(2) == [0.0, 10.0, 20.0]


async def test_a_success_at_the_second_address_is_not_repeated(bench: LookupBench) -> None:
    bench.accepts(1, at=OTHER)
    bench.add(probe(1), addresses=(ADDRESS, OTHER))
    await asyncio.sleep(25)
    assert bench.pods.times(1) == [0.0, 10.0, 20.0]


async def test_both_families_are_looked_up_where_both_must_pass(bench: LookupBench) -> None:
    bench.pods.answers[1] = ProbeOutcome(ProbeResult.SUCCESS, address=ADDRESS, other_address=OTHER)
    both = specs.Probe(
        specs.TcpSocket(1), 0.0, 1.0, 10.0, 1, 3, ip_family_policy="RequireDualStack"
    )
    bench.add(both, addresses=(ADDRESS, OTHER))
    await asyncio.sleep(15)
    assert bench.listeners.lookups == [(10.0, 2)]
    assert bench.successes == 2


async def test_each_answered_lookup_is_a_check(bench: LookupBench) -> None:
    answered = specs.Probe(specs.TcpSocket(1), 0.0, 1.0, 10.0, 1, 3, answered=True)
    bench.add(liveness=answered)
    await asyncio.sleep(35)
    assert len(bench.pods.started) == 1
    assert [round(check.finished_ns / 1e9) for check in bench.checks] == [0, 10, 20, 30]
    assert {check.key.type for check in bench.checks} == {ProbeType(LIVENESS)}
    assert [check.outcome.is_looked_up for check in bench.checks] == [False, True, True, True]


async def test_without_lookups_all_connect_and_none_is_lost(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    bench.scheduler.lookups.stop()
    assert bench.looked_up == [("a", 1)]
    await asyncio.sleep(20)
    assert bench.pods.times(1) == [0.0, 20.0, 30.0]
    assert bench.successes == 4


async def test_a_stopped_scheduler_looks_nothing_up(bench: LookupBench) -> None:
    bench.add(probe(1))
    await asyncio.sleep(15)
    await bench.scheduler.aclose()
    before = len(bench.listeners.lookups)
    await asyncio.sleep(50)
    assert len(bench.listeners.lookups) == before
