"""Output of `podgate drops`."""

from collections.abc import Sequence

from agent.admin.report import (
    DropEventStatus,
    Drops,
    RawSocketSourceStatus,
    SourceProcessStatus,
    SuppressedEvents,
)
from agent.listing import full_name
from agent.operate import flow_text
from agent.operate.cli.output import Column, Screen, Signal, signal_of_mode
from agent.operate.cli.views.sources import source_text, target_text
from agent.operate.flow_text import in_text
from bpf.verdicts import Verdict


def _source(source: SourceProcessStatus) -> str:
    return in_text(source.process, source_text(source.cgroup, source.source_pod))


_NOW = "NOW"


def _now(source: SourceProcessStatus) -> str:
    return "admitted by a rule" if source.is_admitted else ""


SOURCES: tuple[Column[SourceProcessStatus], ...] = (
    Column("POD", lambda source: full_name(source.namespace, source.pod)),
    Column("MODE", lambda source: source.mode, signal=lambda source: signal_of_mode(source.mode)),
    Column("VERDICT", lambda source: source.verdict),
    Column("TO", target_text),
    Column("SOURCE", _source, is_below=True),
    Column("PACKETS", lambda source: source.packets),
    Column("FIRST", lambda source: source.first, is_wide=True),
    Column("LAST", lambda source: source.last),
    Column(_NOW, _now, is_below=True, signal=lambda _: Signal.SAFE),
    Column("CGROUP", lambda source: source.cgroup, is_wide=True, is_below=True),
)
RAW_SOCKETS: tuple[Column[RawSocketSourceStatus], ...] = (
    Column("RAW SOCKETS", lambda source: source.family),
    Column("VERDICT", lambda source: source.verdict),
    Column("SOURCE", lambda one: in_text(one.process, source_text(one.cgroup)), is_below=True),
    Column("SOCKETS", lambda source: source.sockets),
    Column("FIRST", lambda source: source.first, is_wide=True),
    Column("LAST", lambda source: source.last),
    Column("CGROUP", lambda source: source.cgroup, is_wide=True, is_below=True),
)


def show(screen: Screen, drops: Drops, omitted: Sequence[SourceProcessStatus] = ()) -> None:
    """Print the sources of dropped traffic. omitted: those that --top leaves out."""
    if drops.sources:
        has_admitted = any(one.is_admitted for one in drops.sources)
        columns = [column for column in SOURCES if has_admitted or column.header != _NOW]
        screen.table(columns, drops.sources)
    else:
        screen.line("No host process has opened a flow to a gated pod without a rule.")
    if omitted:
        packets = sum(one.packets for one in omitted)
        screen.line(f"{len(omitted)} further sources with {packets} packets are left out (--top).")
    if drops.lost_packets:
        screen.line(
            f"{drops.lost_packets} packets of further sources are not listed: the kernel had no "
            "memory for them.",
            Signal.CAUTION,
        )
    if drops.raw_sockets:
        screen.line()
        screen.table(RAW_SOCKETS, drops.raw_sockets)


def show_suppressed(screen: Screen, suppressed: SuppressedEvents) -> None:
    """Print how many events are missing, in one line."""
    at = f"{suppressed.at:%H:%M:%S}"
    screen.line(f"{at} {flow_text.suppressed_text(suppressed.suppressed)}", Signal.CAUTION)


def show_event(screen: Screen, event: DropEventStatus) -> None:
    """Print one event in one line."""
    is_dropped = event.verdict == Verdict.DROP.label
    text = event_text(event, is_wide=screen.is_wide)
    screen.line(text, Signal.SAFE if is_dropped else Signal.CAUTION)


def event_text(event: DropEventStatus, *, is_wide: bool) -> str:
    """As "08:00:01 drop (node) curl[1454] in unit curl.service -> shop/web tcp 80".

    A packet that is dropped before an interface is chosen has no pod but its address; is_wide: all
    addresses, and the time in milliseconds.
    """
    process = f"{event.process_name}[{event.process}]" if event.process else ""
    source = in_text(process, source_text(event.cgroup, event.source_pod))
    pod = full_name(event.namespace, event.pod)
    at = f"{event.at:%H:%M:%S.%f}"[: -3 if is_wide else -7]
    address = event.destination_address if is_wide or not pod else ""
    if is_wide and event.source_address:
        source = f"{source} {event.source_address}"
    port = flow_text.target_text(event.protocol, event.destination_port)
    target = " ".join(filter(None, (pod, address, port))) or "unknown"
    return f"{at} {event.verdict} ({event.reason}) {source} -> {target}"
