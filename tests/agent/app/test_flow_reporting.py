"""Which records of flows an agent sends: of which pods and rules, and from when on."""

import asyncio
import contextlib
import datetime
import ipaddress
import itertools
import math
import pathlib
import threading
import time
import types
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from agent import VERSION
from agent.app import flow_reporting
from agent.app.flow_reporting import FlowReporting
from agent.drops.events import DropEventLog
from agent.drops.source_processes import wall_clock
from agent.flows.records import (
    AdmissionRecord,
    DestinationRecord,
    DropRecord,
    FlowRecord,
    LostRecord,
    Record,
    SourceRecord,
    StartRecord,
)
from agent.policy.rules_report import RuleSample
from agent.settings import FlowFileSettings, FlowSettings
from bpf.counters import Counts
from bpf.drop_events import DropEvent
from bpf.verdicts import Mode, Reason, Verdict
from tests.agent.drops.test_history import SERVICE, WEB, Node
from tests.polling import PATIENCE_SECONDS, until

pytestmark = pytest.mark.looptime


class Ring:
    """The kernel's drop events: those of the test, and how many it suppressed."""

    def __init__(self) -> None:
        self.events: list[DropEvent] = []
        self.suppressed = 0

    def read(self) -> list[DropEvent]:
        events, self.events = self.events, []
        return events

    def lost(self) -> int:
        return self.suppressed


class Flows:
    """A node whose kernel and rules the test writes, and the records of its agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        # As long as the thread needs.
        monkeypatch.setattr(flow_reporting, "_CLOSE_SECONDS", PATIENCE_SECONDS)
        self.node = Node(monkeypatch, folder)
        self.node.store.synced.set()
        self.counts: dict[int, Counts] = {}
        self.hits: dict[str, int] = {}
        self.ring = Ring()
        ring: Any = self.ring
        self.events = DropEventLog(ring, sources=self.node.processes, store=self.node.store)
        self._path = folder / "flows.json"
        self._is_saved = folder / "history.json"
        self._reports = 0
        self.reported_at: list[float] = []
        """By the loop's clock."""
        self.reporting = FlowReporting(
            FlowSettings(output=FlowFileSettings(path=self._path), drops_per_second=2),
            node="n1",
            counts=lambda: self.counts,
            history=self.node.history,
            events=self.events,
            processes=self.node.processes,
            admissions=self._samples,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until all has been read once."""
        await self.node.run(0)
        self._task = asyncio.create_task(self.reporting.run())
        await until("a reading", lambda: self._is_saved.exists() and self._reports > 0)

    async def pass_reports(self, count: int) -> None:
        """Until this number of reports has ended. Fake time may pass while a thread reads."""
        last = self._reports + count
        await until("reports", lambda: self._reports > last)

    async def records(self) -> list[Record]:
        """All of them, after the agent's end."""
        await self.node.stop()
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            names = {one.name for one in threading.enumerate()}
            assert f"flows to {self._path}" not in names, "the output is closed"
        decoder = msgspec.json.Decoder(Record)
        return [decoder.decode(line) for line in self._path.read_bytes().splitlines()]

    async def _samples(self) -> list[RuleSample]:
        # A report begins with it.
        self._reports += 1
        self.reported_at.append(asyncio.get_running_loop().time())
        return [RuleSample(name, "any", "tcp", "80", hits) for name, hits in self.hits.items()]


@pytest.fixture
async def flows(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> AsyncIterator[Flows]:
    made = Flows(monkeypatch, tmp_path)
    yield made
    with contextlib.suppress(FileNotFoundError):
        await made.records()


def is_near(time: datetime.datetime, monotonic_ns: int) -> bool:
    """Whether it is the time of an instant of CLOCK_MONOTONIC; the two clocks differ a little."""
    return abs((time - wall_clock(monotonic_ns)).total_seconds()) < 1


async def test_records_name_source_pod_and_verdict(flows: Flows) -> None:
    flows.node.gate()
    await flows.start()
    flows.node.aggregate.add(5, at=50)
    flows.node.aggregate.add(0, port=81, mode=Mode.ENFORCE)
    # Its pod is not known.
    flows.node.aggregate.add(5, ifindex=8, port=82)
    await flows.pass_reports(1)
    start, *found = await flows.records()
    assert isinstance(start, StartRecord)
    assert (start.node, start.version) == ("n1", VERSION)
    records = [one for one in found if isinstance(one, FlowRecord)]
    assert len(records) == len(found) == 3
    audit, enforce, unknown = sorted(records, key=lambda one: one.port)
    assert audit == FlowRecord(
        time=audit.time,
        node="n1",
        verdict="AUDIT",
        source=SourceRecord(cgroup=SERVICE, process="curl"),
        destination=DestinationRecord(namespace="shop", pod=WEB.name),
        protocol=6,
        port=80,
        has_many_ports=False,
        mode="audit",
        packets=1,
        first=audit.first,
        last=audit.last,
    )
    assert enforce == msgspec.structs.replace(
        audit,
        verdict="DROPPED",
        source=SourceRecord(cgroup="(no socket: the kernel)", process="curl"),
        port=81,
        mode="enforce",
        first=enforce.first,
        last=enforce.last,
    )
    assert unknown.destination == DestinationRecord(namespace="", pod="")
    assert is_near(audit.time, time.monotonic_ns())
    assert is_near(audit.first, 50 * 10**9)
    assert is_near(audit.last, 50 * 10**9)
    assert audit.time == enforce.time


async def test_packets_to_a_pod_that_ends_at_once_have_a_record(flows: Flows) -> None:
    """The kernel's entries are deleted with it, before the next records."""
    flows.node.gate()
    await flows.start()
    flows.node.aggregate.add(5)
    flows.node.end()
    await until("the end of the pod", lambda: not flows.node.aggregate.sources)
    found = [one for one in await flows.records() if isinstance(one, FlowRecord)]
    assert [(one.destination.pod, one.packets) for one in found] == [(WEB.name, 1)]


async def test_what_was_counted_before_the_start_has_no_record(flows: Flows) -> None:
    flows.node.gate()
    flows.node.aggregate.add(5)
    flows.hits = {"dns": 4}
    flows.counts = {7: {(Verdict.WOULD_DROP, Reason.NODE): 100}}
    await flows.start()
    await flows.pass_reports(4)
    assert [type(one) for one in await flows.records()] == [StartRecord]


@pytest.mark.parametrize(("read_seconds", "period"), [(0.001, 10), (0.2, 20)])
async def test_table_that_takes_long_to_read_is_read_more_rarely(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, read_seconds: float, period: int
) -> None:
    clock = itertools.count(0.0, read_seconds)
    monkeypatch.setattr(
        flow_reporting,
        "time",
        types.SimpleNamespace(monotonic=lambda: next(clock), monotonic_ns=time.monotonic_ns),
    )
    await flows.start()
    await flows.pass_reports(3)
    # The first reading has no duration yet.
    times = [round(at) for at in flows.reported_at[2:]]
    assert math.gcd(*times) == period


async def test_admissions_are_counted_by_rule_since_the_last_record(flows: Flows) -> None:
    flows.hits = {"dns": 4, "quiet": 7}
    await flows.start()
    flows.hits |= {"dns": 9, "new": 2}
    await flows.pass_reports(1)
    # The counters of a policy that was applied again.
    flows.hits |= {"dns": 1}
    await flows.pass_reports(1)
    found = [one for one in await flows.records() if isinstance(one, AdmissionRecord)]
    assert found == [
        AdmissionRecord(
            time=one.time,
            node="n1",
            policy=policy,
            source="any",
            protocol="tcp",
            ports="80",
            flows=count,
        )
        for one, (policy, count) in zip(found, [("dns", 5), ("new", 2), ("dns", 1)], strict=True)
    ]
    assert {one.verdict for one in found} == {"FORWARDED"}


async def test_what_gates_counted_and_the_table_does_not_have_is_lost(flows: Flows) -> None:
    flows.node.gate()
    await flows.start()
    flows.node.aggregate.add(5)
    flows.counts = {
        7: {(Verdict.WOULD_DROP, Reason.NODE): 6, (Verdict.DROP, Reason.STRAY): 3},
    }
    await flows.pass_reports(4)
    found = await flows.records()
    assert sum(one.packets for one in found if isinstance(one, FlowRecord)) == 1
    (lost,) = (one for one in found if isinstance(one, LostRecord))
    assert (lost.place, lost.records, lost.packets) == ("kernel", 0, 5)
    assert lost.node == "n1"


async def test_single_drops_have_a_record_up_to_the_limit(flows: Flows) -> None:
    """Two a second; the rest, and what the kernel suppressed, is counted."""
    flows.node.gate()
    await flows.start()
    source, destination = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("198.18.0.2")
    flows.ring.events = [
        DropEvent(
            *(at, Verdict.DROP, Reason.NODE, 7, 6, source, 4000),
            *(destination, 80, 5, 17, "curl"),
        )
        for at in range(5)
    ]
    flows.ring.suppressed = 10
    await flows.events.after(0)
    found = await flows.records()
    drops = [one for one in found if isinstance(one, DropRecord)]
    (lost,) = (one for one in found if isinstance(one, LostRecord))
    assert len(drops) == 2
    assert (lost.place, lost.records, lost.packets) == ("samples", 13, 0)
    one = drops[0]
    assert is_near(one.time, 0)
    assert one == DropRecord(
        time=one.time,
        node="n1",
        verdict="DROPPED",
        reason="node",
        source=SourceRecord(cgroup=SERVICE, process="curl"),
        destination=DestinationRecord(namespace="shop", pod=WEB.name),
        protocol=6,
        source_address="198.18.0.1",
        source_port=4000,
        destination_address="198.18.0.2",
        destination_port=80,
        pid=17,
    )


async def test_drop_of_an_unknown_pod_before_any_address_is_chosen_has_a_record(
    flows: Flows,
) -> None:
    await flows.start()
    flows.ring.events = [
        DropEvent(0, Verdict.WOULD_DROP, Reason.NODE, 9, 6, None, 0, None, 0, 5, 17, "curl")
    ]
    await flows.events.after(0)
    (one,) = (one for one in await flows.records() if isinstance(one, DropRecord))
    assert one == DropRecord(
        time=one.time,
        node="n1",
        verdict="AUDIT",
        reason="node",
        source=SourceRecord(cgroup=SERVICE, process="curl"),
        destination=DestinationRecord(namespace="", pod=""),
        protocol=6,
        pid=17,
    )
