"""What was counted since a mark."""

import datetime
import pathlib
from typing import Any

import msgspec
import pytest

from agent.admin.report import Drops, RawSocketSourceStatus, SourceProcessStatus
from agent.errors import PodgateError
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


@pytest.mark.parametrize(
    ("before", "after", "first", "expected"),
    [
        (5, 5, -1, None),
        (5, 6, -1, (1, 0)),
        (5, 6, 0, (6, 0)),
        (5, 6, 1, (6, 1)),
        (5, 4, -1, (4, -1)),
    ],
)
def test_source_starts_at_the_mark_unless_it_is_newer(
    before: int, after: int, first: int, expected: tuple[int, int] | None
) -> None:
    at = MARKED + datetime.timedelta(seconds=first)
    found = [
        (one.packets, (one.first - MARKED).total_seconds())
        for one in since([source(before)], [source(after, first=at)]).sources
    ]
    assert found == ([expected] if expected else [])


def test_raw_sockets_are_those_that_were_seen_since_the_mark() -> None:
    mark = drops_mark.of(Drops(sources=[], lost_packets=3), MARKED)
    times = (MARKED - datetime.timedelta(seconds=1), MARKED, MARKED + datetime.timedelta(hours=1))
    raw = [
        RawSocketSourceStatus(
            cgroup="/x",
            process="nmap",
            family="packet",
            verdict="drop",
            sockets=1,
            first=MARKED,
            last=at,
        )
        for at in times
    ]
    found = drops_mark.since(Drops(sources=[], lost_packets=3, raw_sockets=raw), mark)
    assert (found.raw_sockets, found.lost_packets) == (raw[1:], 0)


def test_mark_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(PodgateError, match="there is no mark on this node"):
        drops_mark.read(tmp_path)
    mark = drops_mark.of(Drops(sources=[source(5), scan(9, 50)], lost_packets=3), MARKED)
    drops_mark.write(mark, tmp_path)
    assert drops_mark.read(tmp_path) == mark
    path = tmp_path / "state" / "drops_mark.json"
    path.write_text("[]", encoding="ascii")
    with pytest.raises(PodgateError, match=r"drops_mark\.json cannot be read"):
        drops_mark.read(tmp_path)


def test_packets_of_sources_without_room_are_subtracted_too() -> None:
    assert since([], []).lost_packets == 7
    mark = drops_mark.of(Drops(sources=[], lost_packets=3), MARKED)
    # After a reboot the kernel counts from zero.
    assert drops_mark.since(Drops(sources=[], lost_packets=2), mark).lost_packets == 2
