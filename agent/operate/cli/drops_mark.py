"""The mark of `podgate drops --mark`: counts of that time, which `--since mark` subtracts."""

import collections
import datetime
import pathlib

import msgspec

from agent import state_files
from agent.admin.report import Drops, SourceProcessStatus
from agent.errors import PodgateError

_FILE = pathlib.Path("state", "drops_mark.json")
"""Below the run directory."""

_Source = tuple[int, int, str, str]
"""Cgroup, interface, protocol and mode."""


class MarkedSource(msgspec.Struct, frozen=True, rename="camel"):
    """Packets of one source to one port, or of a scan to all of its ports (0)."""

    cgroup_id: int
    ifindex: int
    protocol: str
    mode: str
    port: int
    has_many_ports: bool
    packets: int


class Mark(msgspec.Struct, frozen=True, rename="camel"):
    """All sources at this time."""

    at: datetime.datetime
    lost_packets: int
    sources: list[MarkedSource]


def of(drops: Drops, at: datetime.datetime) -> Mark:
    return Mark(
        at=at,
        lost_packets=drops.lost_packets,
        sources=[
            MarkedSource(*_source(one), one.port, one.has_many_ports, one.packets)
            for one in drops.sources
        ],
    )


def write(mark: Mark, run_directory: pathlib.Path) -> None:
    """Raises `OSError`."""
    state_files.replace(run_directory / _FILE, msgspec.json.encode(mark))


def read(run_directory: pathlib.Path) -> Mark:
    """Raises `PodgateError`."""
    path = run_directory / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Mark)
    except FileNotFoundError:
        raise PodgateError(
            "there is no mark on this node; 'podgate drops --mark' sets one"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise PodgateError(
            f"{path} cannot be read ({error}); 'podgate drops --mark' writes it again"
        ) from error


def since(drops: Drops, mark: Mark) -> Drops:
    """What was counted since the mark; sources without a packet since are left out."""
    ports: dict[tuple[_Source, int, bool], int] = {}
    totals: collections.Counter[_Source] = collections.Counter()
    for one in mark.sources:
        source = one.cgroup_id, one.ifindex, one.protocol, one.mode
        ports[source, one.port, one.has_many_ports] = one.packets
        totals[source] += one.packets
    found = []
    for each in drops.sources:
        source = _source(each)
        before = ports.get((source, each.port, each.has_many_ports), 0)
        if each.highest_port:
            before = totals[source]  # its ports were single lines, as long as they were few
        if left := _left(each, before, mark.at):
            found.append(left)
    lost = drops.lost_packets - mark.lost_packets
    return msgspec.structs.replace(
        drops,
        sources=sorted(found, key=lambda one: -one.packets),
        # The kernel's counters start again after a reboot.
        lost_packets=lost if lost >= 0 else drops.lost_packets,
        raw_sockets=[one for one in drops.raw_sockets if one.last >= mark.at],
    )


def _left(
    source: SourceProcessStatus, before: int, at: datetime.datetime
) -> SourceProcessStatus | None:
    if source.first >= at or before > source.packets:
        return source  # it is newer than the mark, or the kernel counts it from zero again
    if before == source.packets:
        return None
    return msgspec.structs.replace(source, packets=source.packets - before, first=at)


def _source(source: SourceProcessStatus) -> _Source:
    return source.cgroup_id, source.ifindex, source.protocol, source.mode
