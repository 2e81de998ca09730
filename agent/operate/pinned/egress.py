"""HostEgressPolicies in force, from the pinned tables."""

import contextlib

from agent.admin.report import EgressPolicyStatus, EgressSourceStatus
from agent.drops.source_processes import protocol_word, wall_clock
from agent.operate.pinned.names import Names
from bpf import host_egress, pins
from bpf.errors import KernelSideError
from bpf.host_egress import EgressTables
from bpf.host_egress_tables import EgressRule, EgressSource
from bpf.rules import MAX_PORT
from bpf.verdicts import Verdict


def read(installation: pins.Pins, names: Names) -> list[EgressPolicyStatus]:
    """Of each policy of this node; none without programs, or if the tables are of another version.
    Blocks for milliseconds."""
    with contextlib.suppress(KernelSideError, OSError):
        if host_egress.is_installed(installation):
            with EgressTables(installation) as tables:
                return _read(tables, names)
    return []


def _read(tables: EgressTables, names: Names) -> list[EgressPolicyStatus]:
    table, counts, sources = tables.table(), tables.counts(), tables.sources()
    names.learn({one.cgroup for one in sources} | table.subjects.keys())
    return [
        EgressPolicyStatus(
            name=name,
            source="pins",
            action="Enforce" if table.enforced >> number & 1 else "Audit",
            subjects=[
                f"cgroup {names.cgroup(cgroup)}"
                for cgroup, subject in table.subjects.items()
                if subject.denied >> number & 1
            ],
            excepted=[
                f"cgroup {names.cgroup(cgroup)}"
                for cgroup, subject in table.subjects.items()
                if subject.excepted >> number & 1
            ],
            denied=[destination_text(rule) for rule in table.rules if rule.policy == number],
            would_drop=counts.get((name, Verdict.WOULD_DROP), 0),
            drop=counts.get((name, Verdict.DROP), 0),
            sources=[_source(one, names) for one in sources if one.policy == name],
            problems=[],
        )
        for number, name in sorted(tables.names().items(), key=lambda item: item[1])
    ]


def destination_text(rule: EgressRule) -> str:
    """As of a policy's destination."""
    where = "the node" if rule.is_nodes else str(rule.network)
    if not rule.protocol:
        return where
    protocol = protocol_word(rule.protocol).upper()
    if (rule.first_port, rule.last_port) == (0, MAX_PORT):
        return f"{where} {protocol}"
    is_one = rule.first_port == rule.last_port
    ports = rule.first_port if is_one else f"{rule.first_port}-{rule.last_port}"
    return f"{where} {protocol} {ports}"


def _source(one: EgressSource, names: Names) -> EgressSourceStatus:
    return EgressSourceStatus(
        cgroup=names.cgroup(one.cgroup),
        process=one.process_name,
        protocol=protocol_word(one.protocol),
        verdict=one.verdict.label,
        attempts=one.count,
        first=wall_clock(one.first_ns),
        last=wall_clock(one.last_ns),
    )
