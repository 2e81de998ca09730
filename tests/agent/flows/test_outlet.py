"""The way to an output: nothing blocks, and what is sent and what is lost is all there was."""

import datetime
import threading
from collections.abc import Iterator, Sequence

import prometheus_client
import pytest
import structlog.testing

from agent.admin import finding_kinds as kinds
from agent.admin import findings
from agent.backoff import Backoff
from agent.flows.outlet import Outlet, RecordsRejectedError
from agent.flows.records import (
    DestinationRecord,
    FlowRecord,
    LostRecord,
    Record,
    SourceRecord,
    StartRecord,
)
from agent.logs import Event
from tests.agent.operate.page.reports import report
from tests.polling import wait_until

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def flow(packets: int) -> FlowRecord:
    return FlowRecord(
        time=NOW,
        node="n",
        verdict="AUDIT",
        source=SourceRecord(cgroup="/x"),
        destination=DestinationRecord(namespace="shop", pod="web"),
        protocol=6,
        port=80,
        has_many_ports=False,
        mode="audit",
        packets=packets,
        first=NOW,
        last=NOW,
    )


class Sink:
    """An output that the test opens and closes."""

    def __init__(self) -> None:
        self.got: list[Record] = []
        self.error: OSError | None = None
        self.attempts = 0
        self.is_closed = False
        self.passes = threading.Event()
        self.passes.set()

    def send(self, records: Sequence[Record]) -> None:
        self.attempts += 1
        self.passes.wait()
        if error := self.error:
            raise error
        self.got += records

    def close(self) -> None:
        self.is_closed = True

    @property
    def packets(self) -> int:
        return sum(one.packets for one in self.got if isinstance(one, FlowRecord | LostRecord))

    @property
    def lost(self) -> list[tuple[str, int, int]]:
        return [
            (one.place, one.records, one.packets) for one in self.got if isinstance(one, LostRecord)
        ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.passes.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outlet(sink: Sink, clock: Clock) -> Iterator[Outlet]:
    at_once = Backoff(base_seconds=0, cap_seconds=0)
    made = Outlet(sink, name="the sink", node="n", max_queued=10, backoff=at_once, clock=clock)
    made.start()
    yield made
    sink.passes.set()
    made.close(10)
    assert sink.is_closed


def values(outlet: Outlet) -> dict[tuple[str, str], float]:
    """All samples with a value, by name and place."""
    return {
        (sample.name.removeprefix("podgate_flow_"), sample.labels.get("place", "")): sample.value
        for family in outlet.collect()
        for sample in family.samples
        if sample.value
    }


def metric(outlet: Outlet, name: str, **labels: str) -> float | None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(outlet)
    return registry.get_sample_value(name, labels)


def test_records_arrive_in_order(outlet: Outlet, sink: Sink) -> None:
    outlet.put([StartRecord(time=NOW, node="n", version="1"), flow(1)])
    outlet.put([flow(2)])
    outlet.start()
    outlet.close(10)
    assert [getattr(one, "packets", 0) for one in sink.got] == [0, 1, 2]
    assert values(outlet) == {("records_total", ""): 3}
    assert sink.is_closed


def test_output_that_hangs_does_not_block_and_overflow_is_counted(
    outlet: Outlet, sink: Sink
) -> None:
    sink.passes.clear()
    outlet.put([flow(1)])
    wait_until("the attempt", lambda: sink.attempts == 1)
    outlet.put([flow(2)] * 8)
    outlet.put([flow(3)] * 5)
    assert values(outlet) == {
        ("records_lost_total", "queue"): 3,
        ("packets_lost_total", "queue"): 9,
    }
    sink.passes.set()
    wait_until("all of it", lambda: sink.packets == 1 + 16 + 15)
    assert sink.lost == [("queue", 3, 9)]
    assert isinstance(sink.got[1], LostRecord), "the next batch starts with it"


def test_batch_that_is_rejected_for_long_is_lost_and_counted(outlet: Outlet, sink: Sink) -> None:
    sink.error = OSError("No room")
    with structlog.testing.capture_logs() as lines:
        outlet.put([flow(4), flow(5)])
        wait_until(
            "the loss",
            lambda: metric(outlet, "podgate_flow_packets_lost_total", place="rejected") == 9,
        )
        sink.error = None
        outlet.put([flow(1)])
        wait_until("the next", lambda: sink.packets == 10)
        outlet.put([flow(1)])
        outlet.close(10)
    assert sink.lost == [("rejected", 2, 9)]
    assert [line["event"] for line in lines] == [Event.FLOWS_NOT_WRITTEN, Event.FLOWS_WRITTEN]


def test_outage_that_passes_loses_nothing(outlet: Outlet, sink: Sink) -> None:
    sink.passes.clear()
    sink.error = OSError("No room")
    outlet.put([flow(4)])
    wait_until("the attempt", lambda: sink.attempts == 1)

    def recover(records: Sequence[Record]) -> None:
        sink.got += records

    sink.send = recover  # type: ignore[method-assign]
    sink.passes.set()
    wait_until("the record", lambda: sink.packets == 4)
    assert sink.lost == []


def test_packets_that_the_kernel_lost_are_a_record_of_their_own(outlet: Outlet, sink: Sink) -> None:
    outlet.lose_packets(7)
    wait_until("the record", lambda: sink.lost == [("kernel", 0, 7)])
    outlet.lose_packets(1)
    wait_until("the next", lambda: sink.lost == [("kernel", 0, 7), ("kernel", 0, 1)])
    assert metric(outlet, "podgate_flow_packets_lost_total", place="kernel") == 8


def test_samples_that_are_lost_are_no_packets(outlet: Outlet, sink: Sink) -> None:
    outlet.lose_samples(7)
    wait_until("the record", lambda: sink.lost == [("samples", 7, 0)])
    outlet.lose_samples(2)
    wait_until("the next", lambda: sink.lost == [("samples", 7, 0), ("samples", 2, 0)])
    assert values(outlet) == {("records_lost_total", "samples"): 9}


def test_record_of_a_loss_has_its_place_and_the_time_of_the_first(
    outlet: Outlet, sink: Sink
) -> None:
    before = datetime.datetime.now(datetime.UTC)
    sink.passes.clear()
    outlet.put([flow(1)])
    wait_until("the attempt", lambda: sink.attempts == 1)
    outlet.lose_packets(3)
    between = datetime.datetime.now(datetime.UTC)
    outlet.lose_packets(4)
    sink.passes.set()
    wait_until("the loss", lambda: sink.lost == [("kernel", 0, 7)])
    lost = sink.got[1]
    assert isinstance(lost, LostRecord)
    assert before <= lost.since <= between <= lost.time
    assert lost.node == "n"


def test_batches_are_bounded(outlet: Outlet, sink: Sink) -> None:
    large = Outlet(sink, name="the sink", node="n")
    large.put([flow(1)] * 1201)
    large.start()
    large.close(10)
    assert (sink.attempts, len(sink.got)) == (3, 1201)
    assert values(large) == {("records_total", ""): 1201}


def test_rejected_part_of_a_batch_is_lost_and_the_rest_is_sent(outlet: Outlet, sink: Sink) -> None:
    """All packets may be those of the rejected records."""
    sink.error = RecordsRejectedError(1, "It rejects one.")
    outlet.put([flow(4), flow(5)])
    wait_until("the loss", lambda: values(outlet).get(("packets_lost_total", "rejected")) == 9)
    sink.error = None
    outlet.put([flow(1)])
    # It is counted after the sink has it.
    wait_until("the next", lambda: values(outlet).get(("records_total", "")) == 2)
    assert sink.lost == [("rejected", 1, 9)]
    assert values(outlet) == {
        ("records_total", ""): 2,
        ("records_lost_total", "rejected"): 1,
        ("packets_lost_total", "rejected"): 9,
    }


def test_rejected_batch_is_not_sent_again(outlet: Outlet, sink: Sink) -> None:
    sink.error = RecordsRejectedError(2, "It rejects all.")
    outlet.put([flow(4), flow(5)])
    wait_until("the loss", lambda: values(outlet).get(("packets_lost_total", "rejected")) == 9)
    sink.error = None
    wait_until("its record", lambda: sink.lost == [("rejected", 2, 9)])
    assert values(outlet) == {
        ("records_lost_total", "rejected"): 2,
        ("packets_lost_total", "rejected"): 9,
    }


def test_pauses_start_again_after_a_success(sink: Sink) -> None:
    pauses = Pauses(base_seconds=0, cap_seconds=0)
    made = Outlet(sink, name="the sink", node="n", backoff=pauses)
    made.start()
    sink.error = OSError("No room")
    made.put([flow(1)])
    wait_until("attempts", lambda: sink.attempts >= 2)
    sink.error = None
    made.put([flow(1)])
    wait_until("success", lambda: sink.packets > 0)
    made.close(10)
    assert pauses.resets >= 1


class Pauses(Backoff):
    """A back-off that counts its new starts."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1
        super().reset()


@pytest.mark.parametrize("hangs", [True, False])
def test_output_that_rejects_for_a_minute_is_a_finding(
    outlet: Outlet, sink: Sink, clock: Clock, hangs: bool
) -> None:
    if hangs:
        sink.passes.clear()
    else:
        sink.error = OSError("No room")
    clock.now = 100.0
    outlet.put([flow(1)])
    wait_until("attempts", lambda: sink.attempts >= (1 if hangs else 2))
    clock.now = 159.0
    assert not outlet.problem()
    clock.now = 161.0
    (found,) = findings.find(report(flow_problems=[outlet.problem()]))
    assert found.kind == kinds.FLOWS_NOT_WRITTEN.name
    assert found.sentence == (
        "Records of flows cannot be written to the sink: "
        + ("it does not respond." if hangs else "No room.")
    )
    sink.error = None
    sink.passes.set()
    outlet.put([flow(1)])
    wait_until("success", lambda: not outlet.problem())


def test_end_with_an_output_that_rejects_comes_and_counts_the_rest(
    outlet: Outlet, sink: Sink
) -> None:
    sink.passes.clear()
    sink.error = OSError("No room")
    outlet.put([flow(1)])
    wait_until("the attempt", lambda: sink.attempts == 1)
    outlet.put([flow(2)] * 3)
    closing = threading.Thread(target=outlet.close, args=(10,))
    closing.start()
    sink.passes.set()
    closing.join(10)
    assert sink.is_closed
    assert values(outlet) == {
        ("records_lost_total", "rejected"): 4,
        ("packets_lost_total", "rejected"): 7,
    }
