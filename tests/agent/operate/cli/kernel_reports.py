"""Fixed answers of `podgate explain`, `maps` and `programs`, in the form of real ones."""

import msgspec

from agent.operate.explain import model
from agent.operate.explain.model import (
    AgentFacts,
    Change,
    Check,
    EgressAnswer,
    Explanation,
    NearMiss,
    PodExplanation,
    RuleAnswer,
    SourceFacts,
    Step,
    TargetFacts,
)
from agent.operate.pinned.maps import MapContent, MapEntry, MapStatus
from agent.operate.pinned.programs import (
    CgroupProgram,
    ChainEntry,
    LinkStatus,
    ProgramsReport,
    ProgramStatus,
)

_PINS = "/sys/fs/bpf/podgate/v4"
_POLICY = """\
apiVersion: policy.podgate.io/v1alpha1
kind: HostAccessPolicy
metadata:
  name: backup-service-to-shop-6d1f0a3c
spec:
  pods:
    namespaces:
    - shop
    podSelector:
      matchLabels:
        app: web
  from:
  - systemdUnit: backup.service
  ports:
  - protocol: TCP
    port: 8080
"""
_NO_RULE = "connect(2) fails with EPERM: no rule of the pod's gate admits the source"
DROPPED = Explanation(
    verdict=model.DROP,
    decided_by=model.CONNECT_HOOK,
    reason="node",
    text=_NO_RULE,
    source=SourceFacts(
        origin="host",
        text="restic (pid 1454) in unit backup.service",
        cgroup="/system.slice/backup.service",
        cgroup_id=4711,
    ),
    target=TargetFacts(
        address="198.18.1.7",
        port=8080,
        protocol="tcp",
        namespace="shop",
        pod="web-7f9c6b5d4f-2xkqp",
        interface="veth7d21",
        mode="enforce",
    ),
    agent=AgentFacts(
        state="dead",
        heartbeat_age_seconds=40,
        consequence="without an agent gates and rules stay in force, and all gates open in 23 h "
        "59 min",
    ),
    steps=[
        Step(
            name="origin",
            answer="from restic (pid 1454) in unit backup.service: a host packet",
            source="bpf/src/origin.h: is_host_sent",
        ),
        Step(name="rules", answer="2 rules, none matches", source="bpf/src/rules.h: find_rule"),
        Step(
            name="connect hook",
            answer=_NO_RULE,
            source="bpf/src/hooks.c: check_connect",
            is_deciding=True,
        ),
    ],
    rules=[
        RuleAnswer(source="the kubelet", protocol="tcp", ports="8080", mismatch="another source"),
        RuleAnswer(
            source="cgroup /system.slice/metrics.service",
            protocol="tcp",
            ports="8081",
            policy="metrics-to-shop",
            mismatch="another source",
        ),
    ],
    near_misses=[
        NearMiss(
            policy="backup-to-db",
            mismatch="pod",
            text="admits this source to TCP 8080 of other pods: the pod has the label app=web, "
            "not app=db",
        ),
        NearMiss(
            policy="backup-to-shop",
            mismatch="port",
            text="admits this source to TCP 5432, not to TCP 8080",
        ),
    ],
    changes=[
        Change(
            text="This HostAccessPolicy admits it ('kubectl apply -f -').",
            policy=_POLICY,
        )
    ],
    notes=["The pod also has fd00:18:0:1::7; name one in --to to explain it."],
    confirmation=model.SAME,
)
POD = PodExplanation(
    namespace="shop",
    name="db-0",
    uid="0c3d1a4e-5f6b-4c7d-8e9f-a0b1c2d3e4f5",
    is_well=False,
    from_agent=True,
    checks=[
        Check(name="agent", state="ok", text="alive, version 0.1.0"),
        Check(name="mode", state="ok", text="enforce, by the namespace's label podgate.io/mode"),
        Check(
            name="network namespace",
            state="ok",
            text="/run/netns/cni-6b1c, 198.18.1.12, fd00:18:0:1::c",
        ),
        Check(name="gate", state="ok", text="attached to veth55f0 (3 rules)"),
        Check(name="path test", state="unknown", text="198.18.1.12: not done yet"),
        Check(
            name="probe",
            state="problem",
            text="db Readiness tcp :5432: failure (0 successes, 9 failures), last: dial tcp "
            "198.18.1.12:5432: connect: connection refused",
            next="podgate probe --pod shop/db-0 KIND PORT shows each step of the probe",
        ),
    ],
)
ADMITTED = msgspec.structs.replace(
    DROPPED,
    verdict=model.PASS,
    reason="rule",
    text="a rule of the pod's gate admits the source",
    agent=AgentFacts(
        state="alive", heartbeat_age_seconds=1, consequence="gates and rules are kept current"
    ),
    steps=DROPPED.steps[:1],
    rules=[],
    near_misses=[],
    changes=[],
    notes=[],
)
WOULD_DROP = msgspec.structs.replace(
    ADMITTED,
    verdict=model.WOULD_DROP,
    decided_by=model.GATE,
    reason="node",
    text="no rule of the pod's gate admits the source",
    confirmation="the gate's program decides otherwise than the steps show; please report this",
)
_EGRESS_RULES = [
    EgressAnswer(
        policy="host-secrets",
        action="Enforce",
        destination="169.254.169.254/32",
    ),
    EgressAnswer(
        policy="host-secrets",
        action="Enforce",
        destination="the node TCP 10250",
        mismatch="another destination",
    ),
    EgressAnswer(
        policy="loopback",
        action="Audit",
        destination="127.0.0.0/8",
        mismatch="the source is excepted",
    ),
]
_DENIED = "HostEgressPolicy host-secrets denies 169.254.169.254/32: connect(2) fails with EPERM"
EGRESS = msgspec.structs.replace(
    ADMITTED,
    verdict=model.DROP,
    decided_by=model.HOST_EGRESS,
    reason="host-egress",
    text=_DENIED,
    source=SourceFacts(
        origin="host",
        text="hostNetwork pod monitoring/node-exporter-4xkqp",
        cgroup="/kubepods/besteffort/pod0c3d1a4e",
        cgroup_id=4712,
    ),
    target=TargetFacts(address="169.254.169.254", port=80, protocol="tcp"),
    steps=[
        Step(
            name="origin",
            answer="from hostNetwork pod monitoring/node-exporter-4xkqp: a host packet",
            source="bpf/src/origin.h: is_host_sent",
        ),
        Step(
            name="host egress",
            answer=_DENIED,
            source="bpf/src/host_egress.c: find_policy",
            is_deciding=True,
        ),
    ],
    changes=[
        Change(
            text="HostEgressPolicy host-secrets denies it; name the source in its `except`, or "
            "narrow what it denies.",
            command="kubectl get hostegresspolicy host-secrets -o yaml",
        )
    ],
    confirmation="",
    egress_rule=_EGRESS_RULES[0],
    egress_rules=_EGRESS_RULES,
)
POD_IN_ORDER = msgspec.structs.replace(POD, is_well=True, from_agent=False, checks=POD.checks[:4])


def _map(name: str, kind: str, used: int | None, capacity: int, memory: int) -> MapStatus:
    return MapStatus(
        name=name,
        path=f"{_PINS}/maps/{name}",
        type=kind,
        used=used,
        capacity=capacity,
        memory_bytes=memory,
        has_types=kind != "ringbuf",
    )


MAPS = [
    _map("config", "array", 1, 1, 392),
    _map("drop_events", "ringbuf", None, 65536, 78408),
    _map("drop_sources", "lru_hash", 16384, 16384, 1966976),
    _map("gate_slots", "hash", 4000, 4096, 66504),
    _map("rule_hits", "percpu_hash", 12, 65536, 1049472),
]
CONTENT = MapContent(
    name="addresses",
    entries=[
        MapEntry(key={"address": "198.18.1.7"}, value=7),
        MapEntry(key={"address": "fd00:18:0:1::7"}, value=7),
    ],
)


def _program(number: int, name: str, kind: str, runs: int | None) -> ProgramStatus:
    return ProgramStatus(
        id=number,
        name=name,
        type=kind,
        path=f"{_PINS}/progs/5787dfefd9b9f196/{name}",
        run_time_ns=None if runs is None else runs * 140,
        run_count=runs,
        memory_bytes=28672,
        instructions=3390,
        verified_instructions=208666,
        links=[] if runs is None else [LinkStatus(id=number, type="tcx", target="veth7d21")],
    )


def _in_chain(position: int, number: int, name: str, *, is_ours: bool) -> ChainEntry:
    return ChainEntry(
        interface="veth7d21",
        direction="egress",
        position=position,
        kind="tcx",
        program=number,
        name=name,
        is_ours=is_ours,
    )


PROGRAMS = ProgramsReport(
    are_runs_counted=True,
    programs=[
        _program(61, "gate_egress", "sched_cls", 120_000),
        _program(66, "relay_connect4", "cgroup_sock_addr", None),
    ],
    chains=[
        _in_chain(1, 61, "gate_egress", is_ours=True),
        _in_chain(2, 40, "cil_to_container", is_ours=False),
    ],
    cgroups=[
        CgroupProgram(
            cgroup="/",
            hook="connect4",
            program=64,
            name="hook_connect4",
            flags="multi",
            is_ours=True,
        )
    ],
    commands=["bpftool --json prog show", "bpftool --json cgroup tree"],
)
