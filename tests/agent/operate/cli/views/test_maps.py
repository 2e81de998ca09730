"""Screens of `podgate maps` and `podgate programs`."""

import io

import rich.console

from agent.operate.cli.output import Screen
from agent.operate.cli.views import maps as maps_view
from agent.operate.cli.views import programs as programs_view
from agent.operate.pinned.maps import MapContent, MapEntry, MapStatus
from agent.operate.pinned.programs import (
    CgroupProgram,
    ChainEntry,
    LinkStatus,
    ProgramsReport,
    ProgramStatus,
)


def screen(stream: io.StringIO) -> Screen:
    return Screen(console=rich.console.Console(file=stream, width=80))


def status(name: str, used: int | None, *, kind: str = "hash", capacity: int = 100) -> MapStatus:
    return MapStatus(
        name=name,
        path=f"/sys/fs/bpf/podgate/v4/maps/{name}",
        type=kind,
        used=used,
        capacity=capacity,
        memory_bytes=2049,
        has_types=True,
    )


def test_maps_are_listed_with_what_they_use() -> None:
    stream = io.StringIO()
    listed = [status("gates", 3), status("drop_events", None, kind="ringbuf", capacity=65536)]
    maps_view.show(listed, screen(stream))
    assert stream.getvalue().splitlines() == [
        "MAP          TYPE     USED  CAPACITY  FILL  KIB",
        "gates        hash        3       100  3%      3",
        "drop_events  ringbuf     -     65536  -       3",
        "2 maps, 0.0 MiB; 'podgate maps NAME' shows entries",
    ]


def test_entries_are_one_line_each_without_zeros_at_the_end() -> None:
    stream = io.StringIO()
    content = MapContent(
        name="gates",
        entries=[
            MapEntry(key=4, value={"mode": 2, "addresses": ["198.18.1.1", "::"], "rules": [0, 0]}),
            MapEntry(key=5, values=[{"count": 0}, {"count": 7}]),
        ],
        empty=4096,
    )
    maps_view.show_entries(content, screen(stream))
    assert stream.getvalue().splitlines() == [
        "KEY  VALUE",
        "4    mode=2 addresses=[198.18.1.1] rules=[]",
        "5    cpu1: count=7",
        "4096 empty entries are left out",
    ]


def program(**changes: object) -> ProgramStatus:
    fields = {
        "id": 7,
        "name": "gate_egress",
        "type": "sched_cls",
        "path": "/sys/fs/bpf/podgate/v4/progs/0/gate_egress",
        "run_time_ns": None,
        "run_count": None,
        "memory_bytes": 28672,
        "instructions": 3390,
        "verified_instructions": 80000,
        "links": [LinkStatus(id=1, type="tcx", target="interface veth1")],
    }
    return ProgramStatus(**{**fields, **changes})  # type: ignore[arg-type]


def test_programs_are_listed_with_chains_and_owners() -> None:
    stream = io.StringIO()
    report = ProgramsReport(
        are_runs_counted=False,
        programs=[program()],
        chains=[
            ChainEntry(
                interface="veth1",
                direction="egress",
                position=position,
                kind="tcx",
                program=number,
                name=name,
                is_ours=number == 7,
            )
            for position, (number, name) in enumerate([(9, "other"), (7, "gate_egress")], 1)
        ],
        cgroups=[
            CgroupProgram(
                cgroup="/", hook="connect4", program=8, name="x", flags="multi", is_ours=False
            )
        ],
        commands=["bpftool -j prog show"],
    )
    programs_view.show(report, screen(stream))
    assert stream.getvalue().splitlines() == [
        "ID  PROGRAM      RUNS  NS/RUN  KIB  SIZE  VERIFIED  LINKS",
        " 7  gate_egress  -     -        28  3390     80000      1",
        "runs are not counted; 'sysctl kernel.bpf_stats_enabled=1' counts them",
        "",
        "INTERFACE  DIRECTION  ORDER  BY   ID  PROGRAM      OWNER",
        "veth1      egress         1  tcx   9  other        other",
        "veth1      egress         2  tcx   7  gate_egress  podgate",
        "",
        "CGROUP  HOOK      ID  PROGRAM  OWNER",
        "/       connect4   8  x        other",
        "",
        "from: bpftool -j prog show",
    ]


def test_counted_runs_have_a_mean_time() -> None:
    stream = io.StringIO()
    report = ProgramsReport(
        are_runs_counted=True,
        programs=[program(run_time_ns=1000, run_count=4)],
        chains=[],
        cgroups=[],
        commands=[],
    )
    programs_view.show(report, screen(stream))
    assert stream.getvalue().splitlines()[1].split()[:4] == ["7", "gate_egress", "4", "250"]
