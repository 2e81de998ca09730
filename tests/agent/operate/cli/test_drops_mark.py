"""What was counted since a mark."""

import datetime
from typing import Any

import msgspec

from agent.admin.report import Drops, SourceProcessStatus
from agent.operate.cli import drops_mark

MARKED = datetime.datetime(2026, 1, 31, 8, tzinfo=datetime.UTC)


def source(packets: int, port: int = 80, **fields: Any) -> SourceProcessStatus:
    defaults: dict[str, Any] = {
        "namespace": "shop",
        "pod": "web",
        "mode": "audit",
        "protocol": "tcp",
        "cgroup": "/system.slice/backup.service",
        "process": "curl",
        "first": MARKED - datetime.timedelta(hours=1),
        "last": MARKED,
        "cgroup_id": 5,
        "ifindex": 7,
    }
    return SourceProcessStatus(packets=packets, port=port, **defaults | fields)


def scan(packets: int, ports: int) -> SourceProcessStatus:
    found = source(packets, 0)
    return msgspec.structs.replace(
        found, has_many_ports=True, port_count=ports, lowest_port=1, highest_port=ports
    )


def since(before: list[SourceProcessStatus], after: list[SourceProcessStatus]) -> Drops:
    mark = drops_mark.of(Drops(sources=before, lost_packets=3), MARKED)
    return drops_mark.since(Drops(sources=after, lost_packets=10), mark)


def packets(before: list[SourceProcessStatus], after: list[SourceProcessStatus]) -> list[int]:
    return [one.packets for one in since(before, after).sources]


def test_packets_before_the_mark_do_not_count() -> None:
    (found,) = since([source(5), source(9, 81)], [source(7), source(9, 81)]).sources
    assert (found.port, found.packets, found.first) == (80, 2, MARKED)


def test_busiest_since_the_mark_is_the_first() -> None:
    assert packets([source(900), source(1, 81)], [source(901), source(50, 81)]) == [49, 1]


def test_modes_are_apart() -> None:
    """A mark in audit, and the pod is enforced then."""
    assert packets([source(5)], [source(5), source(1, mode="enforce")]) == [1]


def test_same_name_of_a_new_pod_or_process_starts_from_zero() -> None:
    assert packets([source(5)], [source(3, ifindex=8), source(2, cgroup_id=6)]) == [3, 2]
    newer = source(8, first=MARKED + datetime.timedelta(seconds=1))
    assert packets([source(5)], [newer]) == [8]


def test_source_that_the_kernel_counts_again_keeps_its_count() -> None:
    assert packets([source(500)], [source(3)]) == [3]


def test_ports_of_a_scan_were_single_lines_when_they_were_few() -> None:
    few = [source(2, port) for port in range(1, 6)]
    assert packets(few, [scan(110, 50)]) == [100]
    assert packets([scan(110, 50)], [scan(115, 51)]) == [5]
    assert packets([scan(110, 50)], [scan(110, 50)]) == []


def test_packets_of_sources_without_room_are_subtracted_too() -> None:
    assert since([], []).lost_packets == 7
    mark = drops_mark.of(Drops(sources=[], lost_packets=3), MARKED)
    # After a reboot the kernel counts from zero.
    assert drops_mark.since(Drops(sources=[], lost_packets=2), mark).lost_packets == 2
