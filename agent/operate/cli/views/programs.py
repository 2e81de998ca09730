"""Output of `podgate programs`."""

from typing import Any

from agent.operate.cli.output import Column, Screen, Signal
from agent.operate.pinned.programs import (
    ENABLE_STATISTICS,
    CgroupProgram,
    ChainEntry,
    ProgramsReport,
    ProgramStatus,
)


def _mean_ns(program: ProgramStatus) -> int | None:
    if not program.run_count or program.run_time_ns is None:
        return None
    return program.run_time_ns // program.run_count


_OWNER: Column[Any] = Column(
    "OWNER",
    lambda one: "podgate" if one.is_ours else "other",
    signal=lambda one: None if one.is_ours else Signal.CAUTION,
)
_PROGRAMS: tuple[Column[ProgramStatus], ...] = (
    Column("ID", lambda one: one.id),
    Column("PROGRAM", lambda one: one.name),
    Column("RUNS", lambda one: one.run_count),
    Column("NS/RUN", _mean_ns),
    Column("KIB", lambda one: -(-one.memory_bytes // 1024)),
    Column("SIZE", lambda one: one.instructions),
    Column("VERIFIED", lambda one: one.verified_instructions),
    Column("LINKS", lambda one: len(one.links)),
    Column("TYPE", lambda one: one.type, is_wide=True),
    Column("TO", lambda one: [f"{link.type} {link.target}" for link in one.links], is_wide=True),
    Column("PATH", lambda one: one.path, is_wide=True),
)
_CHAINS: tuple[Column[ChainEntry], ...] = (
    Column("INTERFACE", lambda one: one.interface),
    Column("DIRECTION", lambda one: one.direction),
    Column("ORDER", lambda one: one.position),
    Column("BY", lambda one: one.kind),
    Column("ID", lambda one: one.program),
    Column("PROGRAM", lambda one: one.name),
    _OWNER,
)
_CGROUPS: tuple[Column[CgroupProgram], ...] = (
    Column("CGROUP", lambda one: one.cgroup),
    Column("HOOK", lambda one: one.hook),
    Column("ID", lambda one: one.program),
    Column("PROGRAM", lambda one: one.name),
    _OWNER,
    Column("FLAGS", lambda one: one.flags, is_wide=True),
)


def show(report: ProgramsReport, screen: Screen) -> None:
    """Print programs, chains and cgroups as tables."""
    screen.table(_PROGRAMS, report.programs)
    if not report.are_runs_counted:
        screen.line(f"runs are not counted; '{ENABLE_STATISTICS}' counts them")
    if report.chains:
        screen.line()
        screen.table(_CHAINS, report.chains)
    if report.cgroups:
        screen.line()
        screen.table(_CGROUPS, report.cgroups)
    screen.line()
    screen.line(f"from: {'; '.join(report.commands)}")
