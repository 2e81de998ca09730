"""The report of drop sources: verdicts of their time, and scans."""

import datetime

import msgspec
import pytest

from agent.admin.observations import ObservedPod
from agent.admin.report import SourceProcessStatus
from agent.drops.source_processes import CgroupName
from agent.drops.source_report import SCANNED_PORTS, source_status, with_scans
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode

NMAP = CgroupName(5, "/user.slice/session-3.scope")
UDP = 17


def row(
    port: int = 80,
    packets: int = 1,
    *,
    mode: Mode = Mode.AUDIT,
    cgroup: CgroupName = NMAP,
    ifindex: int = 7,
    is_admitted: bool = False,
) -> SourceProcessStatus:
    at_ns = port * 10**9
    seen = DropSource(cgroup.cgroup, ifindex, UDP, port, at_ns, at_ns, packets, "nmap", mode)
    return source_status(
        seen, cgroup, namespace="shop", pod="web", labels={}, is_admitted=is_admitted
    )


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [(Mode.AUDIT, "would-drop"), (Mode.ENFORCE, "drop"), (Mode.STRICT, "drop")],
)
def test_only_packets_of_audit_have_passed(mode: Mode, verdict: str) -> None:
    assert (row(mode=mode).mode, row(mode=mode).verdict) == (mode.label, verdict)


def test_source_has_the_name_of_its_pod() -> None:
    pod = ObservedPod(namespace="mon", name="scraper-x7", host_network=True)
    assert row(cgroup=CgroupName(5, "/kubepods/x", pod)).source_pod == "mon/scraper-x7"


def test_ports_that_a_source_scans_are_one_line() -> None:
    scan = [row(port, packets=2) for port in range(1, 1025)]
    other = row(53, packets=9, cgroup=CgroupName(6, "/system.slice/dns.service"))
    found, rest = with_scans([*scan, other])
    assert rest == other
    assert (found.port, found.has_many_ports, found.packets) == (0, True, 2048)
    assert (found.port_count, found.lowest_port, found.highest_port) == (1024, 1, 1024)
    assert found.last - found.first > datetime.timedelta(seconds=1022)


def test_scan_is_its_first_packet_s_row_with_the_sums() -> None:
    scan = [row(port, packets=port) for port in (*range(9, 30), *range(2, 9))]
    expected = msgspec.structs.replace(
        scan[-7],
        port=0,
        has_many_ports=True,
        port_count=28,
        lowest_port=2,
        highest_port=29,
        packets=sum(range(2, 30)),
        last=scan[20].last,
    )
    assert with_scans(scan) == [expected]
    assert len(with_scans(scan[:SCANNED_PORTS])) == 1


def test_row_has_all_of_the_source() -> None:
    made = row(53, packets=4, ifindex=9, is_admitted=True)
    assert msgspec.structs.replace(made, last=made.first) == SourceProcessStatus(
        namespace="shop",
        pod="web",
        mode="audit",
        verdict="would-drop",
        protocol="udp",
        port=53,
        has_many_ports=False,
        cgroup="/user.slice/session-3.scope",
        cgroup_id=5,
        ifindex=9,
        source_pod="",
        process="nmap",
        packets=4,
        first=made.first,
        last=made.first,
        labels={},
        is_admitted=True,
    )


def test_few_ports_are_no_scan() -> None:
    few = [row(port) for port in range(SCANNED_PORTS - 1)]
    elsewhere = [row(99, ifindex=8), row(99, mode=Mode.ENFORCE)]
    found = with_scans([*few, *elsewhere])
    assert sorted(one.port for one in found) == sorted(one.port for one in [*few, *elsewhere])


def test_further_ports_of_a_scan_are_part_of_it() -> None:
    further = msgspec.structs.replace(row(0, packets=500), has_many_ports=True)
    (found,) = with_scans([*(row(port) for port in range(100, 120)), further])
    assert (found.port_count, found.highest_port, found.packets) == (0, 119, 520)


def test_scan_is_admitted_if_all_of_its_ports_are() -> None:
    ports = range(SCANNED_PORTS)
    (found,) = with_scans(row(port, is_admitted=True) for port in ports)
    assert found.is_admitted
    (found,) = with_scans(row(port, is_admitted=port > 0) for port in ports)
    assert not found.is_admitted


def test_busiest_source_is_the_first_and_of_equal_ones_the_newest() -> None:
    assert [one.port for one in with_scans([row(1, 3), row(2, 9), row(3, 3)])] == [2, 3, 1]
