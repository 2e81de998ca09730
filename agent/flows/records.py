"""Records of flows, one JSON document each. docs/reference/flows.md describes them."""

import datetime
from collections.abc import Iterable
from typing import Literal

import msgspec


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The process that sent. cgroup: its path, or a text in parentheses without one; process: name
    of the first packet's, if the kernel reports it; pod: the hostNetwork pod that it belongs to, as
    "namespace/name"."""

    cgroup: str
    process: str = ""
    pod: str = ""


class DestinationRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The pod that was called; both empty if its interface is no pod's any more."""

    namespace: str
    pod: str


class FlowRecord(msgspec.Struct, frozen=True, kw_only=True, tag="flow", rename="camel"):
    """Packets of one source to one port of one pod since the last record of it.

    verdict: AUDIT for those that passed and that enforce would drop; mode: the gate's; protocol: IP
    protocol number; port: 0 for protocols without, and for many ports (hasManyPorts); first, last:
    of these packets; in later records of a source, first is the last packet of the record before.
    """

    time: datetime.datetime
    node: str
    verdict: Literal["DROPPED", "AUDIT"]
    source: SourceRecord
    destination: DestinationRecord
    protocol: int
    port: int
    has_many_ports: bool
    mode: str
    packets: int
    first: datetime.datetime
    last: datetime.datetime


class DropRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drop", rename="camel"
):
    """One packet that was dropped (AUDIT: that enforce would drop), or one system call that was
    rejected. A sample: flow records count it as well.

    reason: docs/reference/reasons.md has them; sourceAddress: absent if none was chosen yet; ports:
    absent for protocols without; pid: of the process, in the node's namespace, if the kernel
    reports it.
    """

    time: datetime.datetime
    node: str
    verdict: Literal["DROPPED", "AUDIT"]
    reason: str
    source: SourceRecord
    destination: DestinationRecord
    protocol: int
    source_address: str = ""
    source_port: int = 0
    destination_address: str = ""
    destination_port: int = 0
    pid: int = 0


class AdmissionRecord(msgspec.Struct, frozen=True, kw_only=True, tag="admission", rename="camel"):
    """New flows that one rule of a policy admitted since its last record, over all pods of the
    node. source, protocol, ports: of the rule, as `podgate rules` shows them."""

    time: datetime.datetime
    node: str
    policy: str
    source: str
    protocol: str
    ports: str
    flows: int
    verdict: Literal["FORWARDED"] = "FORWARDED"


Place = Literal["kernel", "samples", "queue", "rejected"]


class LostRecord(msgspec.Struct, frozen=True, kw_only=True, tag="lost", rename="camel"):
    """What has no record. place: `kernel`, packets whose source the kernel's table had no room for;
    `samples`, single drops beyond the limits; `queue`, records that came while the queue was full;
    `rejected`, records that the output did not accept. packets: those that flow records of these
    counted; since: the first of them."""

    time: datetime.datetime
    node: str
    place: Place
    records: int
    packets: int
    since: datetime.datetime


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, tag="start", rename="camel"):
    """An agent starts to record: what happened between the last record and this has none."""

    time: datetime.datetime
    node: str
    version: str


Record = FlowRecord | DropRecord | AdmissionRecord | LostRecord | StartRecord
"""The field `type` names the kind."""


def packets_of(records: Iterable[Record]) -> int:
    """The packets that flow records count."""
    return sum(one.packets for one in records if isinstance(one, FlowRecord))
