"""Reports of one node, as an agent serves them: for golden screens, schemas and answers."""

import datetime

import msgspec
from google.protobuf import json_format

from agent.admin import finding_kinds as kinds
from agent.admin import findings
from agent.admin.finding import found
from agent.admin.observations import Observations, ObservedFlows, ObservedPod
from agent.admin.report import (
    AgentReport,
    AnswerStatus,
    DropEvents,
    DropEventStatus,
    Drops,
    EgressPolicyStatus,
    EgressSourceStatus,
    GateStatus,
    HookStatus,
    PathStatus,
    PodSourceStatus,
    PodStatus,
    PolicyStatus,
    ProbeStatus,
    RawSocketSourceStatus,
    RawSocketStatus,
    RelayedPortStatus,
    RelayStatus,
    RulesReport,
    RuleStatus,
    SourceProblem,
    SourceProcessStatus,
    SuppressedEvents,
)
from agent.client.podinfo import PodInfoState
from agent.client.v1alpha1 import podinfo_pb2
from agent.operate.doctor.results import Passed, report_of
from agent.operate.pinned import findings as pinned_findings
from agent.operate.pinned.report import Exposure, PinnedGateStatus, PinnedRelayStatus, PinnedStatus
from agent.pods.conditions import Condition
from agent.pods.modes import LIMITED
from agent.pods.pod import Problem
from agent.services.client.services import ServicesState
from agent.services.client.v1alpha1 import endpoints_pb2

NOW = datetime.datetime(2026, 1, 31, 8, tzinfo=datetime.UTC)
BACKUP = "/system.slice/backup.service"
CILIUM = (
    "/kubepods.slice/kubepods-burstable.slice/"
    "kubepods-burstable-pod0c3d1a4e_5f6b_4c7d_8e9f_a0b1c2d3e4f5.slice/"
    "cri-containerd-9f8e7d6c5b4a39281706f5e4d3c2b1a09f8e7d6c5b4a39281706f5e4d3c2b1a0.scope"
)


def before(**time: float) -> datetime.datetime:
    return NOW - datetime.timedelta(**time)


def _conditions(
    isolated: tuple[str, str, str], probes: tuple[str, str, str] | None
) -> list[Condition]:
    made = [Condition("podgate.io/isolation-ready", *isolated, before(hours=26))]
    if probes:
        made.append(Condition("podgate.io/probes-passing", *probes, before(minutes=4)))
    return made


def _with_findings(report: AgentReport) -> AgentReport:
    """With its findings, as an agent makes it."""
    return msgspec.structs.replace(report, findings=findings.find(report))


_ENFORCED = ("True", "Enforced", "Gate on veth7d21 drops new flows of host processes.")
_PASSING = ("True", "ProbesPassing", "All probes pass.")
WEB = PodStatus(
    namespace="shop",
    name="web-7f9c6b5d4f-2xkqp",
    uid="11111111-1111-4111-8111-111111111111",
    mode="strict",
    source="api",
    netns="/run/netns/cni-1",
    addresses=["198.18.1.11", "fd00:18::11"],
    conditions=_conditions(("True", "Strict", "Gate and relay are in force."), _PASSING),
    gates=[GateStatus(interface="veth7d21", ifindex=11, packets={"drop": {"strict": 2}})],
    paths=[PathStatus(address="198.18.1.11", result="confirmed")],
    existing_flows=0,
    probes=[
        ProbeStatus(
            container="web",
            type="Readiness",
            handler="http-get http://:8080/healthz",
            result="success",
            last_message="HTTP 200",
            families=["IPv4", "IPv6"],
            successes=918,
            failures=0,
            answer=AnswerStatus(verdict="healthy", age_seconds=0.21),
        )
    ],
    relayed=[
        RelayedPortStatus(
            container="web",
            handler="liveness",
            port=8080,
            last_outcome="proxied",
            outcomes={"proxied": 455, "timeout": 1},
            open_ms=0.74,
        )
    ],
)
DATABASE = PodStatus(
    namespace="shop",
    name="db-0",
    uid="22222222-2222-4222-8222-222222222222",
    mode="enforce",
    source="api",
    netns="/run/netns/cni-2",
    addresses=["198.18.1.12"],
    conditions=_conditions(
        _ENFORCED,
        (
            "False",
            "ProbeFailing",
            "Readiness probe of container db failed: dial tcp 198.18.1.12:5432: connect: "
            "connection refused",
        ),
    ),
    gates=[
        GateStatus(interface="veth0a3c", ifindex=12, packets={"drop": {"node": 7, "fragment": 1}})
    ],
    paths=[PathStatus(address="198.18.1.12", result="confirmed")],
    existing_flows=3,
    probes=[
        ProbeStatus(
            container="db",
            type="Readiness",
            handler="tcp-socket :5432",
            result="failure",
            last_message="dial tcp 198.18.1.12:5432: connect: connection refused",
            families=[],
            successes=310,
            failures=4,
            answer=AnswerStatus(
                obstacle="not_relayed",
                problem="The kubelet's probe goes to the pod itself: Mode is not strict.",
            ),
        )
    ],
)
DNS = PodStatus(
    namespace="kube-system",
    name="coredns-5d78c9869d-x7k2p",
    uid="33333333-3333-4333-8333-333333333333",
    mode="audit",
    mode_problems=[
        Problem(
            LIMITED,
            "Mode enforce is limited to audit by the node's label podgate.io/max-mode.",
            "node",
        )
    ],
    source="api",
    netns="/run/netns/cni-3",
    addresses=["198.18.1.13"],
    conditions=_conditions(("True", "Audit", "Gate on veth55f0 drops nothing."), _PASSING),
    gates=[GateStatus(interface="veth55f0", ifindex=13, packets={"would-drop": {"node": 5120}})],
    paths=[PathStatus(address="198.18.1.13", result="unreachable")],
    existing_flows=0,
    probes=[],
)
LEGACY = PodStatus(
    namespace="legacy",
    name="ftp",
    uid="44444444-4444-4444-8444-444444444444",
    mode="off",
    source="api",
    netns="/run/netns/cni-4",
    addresses=["198.18.1.14"],
    conditions=_conditions(("True", "Off", "No gate is attached."), None),
    gates=[],
    paths=[],
    existing_flows=0,
    probes=[],
)
STATUS = _with_findings(
    AgentReport(
        version="0.1.0",
        pid=812,
        started=before(hours=26),
        source_hash="0123456789abcdef",
        attachment="tcx",
        programs="pinned",
        load_ms=61.0,
        is_synced=True,
        kubelet="/system.slice/kubelet.service",
        kubelet_problem="",
        http_address="127.0.0.1:9650",
        default_mode="audit",
        max_mode="strict",
        max_mode_from="--max-mode",
        in_force=["gates", "hooks"],
        hooks=[
            HookStatus(name="connect4", problem=None),
            HookStatus(name="connect6", problem=None),
        ],
        pod_source=PodSourceStatus(pods_from="the API server"),
        node_drops={"tunnel": 3},
        raw_sockets=RawSocketStatus(mode="audit", problem="", sources=[]),
        relay=RelayStatus(
            is_up=True,
            problem="",
            restarts=0,
            connections=2,
            held_syns=0,
            is_bypassed=False,
            unknown_address=0,
            gates=[],
        ),
        pods=[DNS, LEGACY, DATABASE, WEB],
    )
)
BYPASSED = msgspec.structs.replace(
    DATABASE,
    conditions=_conditions(
        (
            "False",
            "GateBypassed",
            "The host reaches 198.18.1.12 without passing the gate; check how the CNI routes them.",
        ),
        None,
    ),
    paths=[PathStatus(address="198.18.1.12", result="bypassed")],
    existing_flows=0,
)
_NO_KUBELET = "no process named kubelet runs in a cgroup of its own."
TROUBLE = _with_findings(
    msgspec.structs.replace(
        STATUS,
        is_synced=False,
        kubelet=None,
        kubelet_problem=_NO_KUBELET,
        open_ports=(
            "Kubelet not identified, so host processes outside pods reach declared ports: "
            f"{_NO_KUBELET}"
        ),
        hooks=[
            HookStatus(name="connect4", problem="another program is attached exclusively"),
            HookStatus(name="connect6", problem=None),
        ],
        pod_source=PodSourceStatus(
            pods_from="the API server",
            problems=[
                SourceProblem(
                    part="watch",
                    text="API server, pods: no response for 40 s; using the last known.",
                )
            ],
            pending_conditions=4,
            pending_seconds=40.0,
        ),
        relay=msgspec.structs.replace(STATUS.relay, is_up=False, problem="no relay starts."),
        egress_problems=[
            "HostEgressPolicy loopback: This node has no cgroup of unit nowhere.service."
        ],
        pods=[BYPASSED],
    )
)
# A condition that is not True: the pod is open, or it is closed and not as desired.
_UNREADY = [
    msgspec.structs.replace(
        BYPASSED,
        name=reason.lower(),
        conditions=_conditions(("False", reason, message), None),
        paths=[],
        probes=[],
    )
    for reason, message in (
        ("GateFailed", "Gate on veth0a3c cannot be attached: no space left."),
        ("NetnsMissing", "The manifest names no network namespace."),
        ("NetnsInvalid", "/run/netns/cni-2 is no network namespace."),
        ("NetnsInUse", "Pod shop/web-0 has the same network namespace."),
        ("SandboxMissing", "The runtime has no sandbox of this pod."),
    )
]
SWITCHED_OFF = _with_findings(
    msgspec.structs.replace(
        STATUS,
        kubelet=None,
        kubelet_problem=_NO_KUBELET,
        kubelet_unfollowed="/sys/kernel/btf/vmlinux cannot be read (No such file or directory).",
        max_mode="off",
        max_mode_from="the node's label podgate.io/max-mode",
        raw_sockets=RawSocketStatus(
            mode="enforce", problem="the kernel has no BPF LSM, so nothing is checked.", sources=[]
        ),
        relay=msgspec.structs.replace(
            STATUS.relay, is_up=False, problem="no relay starts.", has_fallback=False
        ),
        pods=_UNREADY,
    )
)
DROPS = Drops(
    sources=[
        SourceProcessStatus(
            namespace="kube-system",
            pod="coredns-5d78c9869d-x7k2p",
            mode="audit",
            verdict="would-drop",
            is_admitted=True,
            protocol="udp",
            port=53,
            cgroup="/system.slice/systemd-resolved.service",
            process="systemd-resolve",
            packets=5120,
            first=before(hours=26),
            last=before(seconds=2),
            labels={"k8s-app": "kube-dns"},
        ),
        SourceProcessStatus(
            namespace="shop",
            pod="web-7f9c6b5d4f-2xkqp",
            mode="strict",
            verdict="drop",
            protocol="tcp",
            port=8080,
            cgroup=CILIUM,
            process="node-scraper",
            packets=240,
            first=before(hours=2),
            last=before(minutes=3),
            source_pod="monitoring/node-scraper-5xq2z",
        ),
        SourceProcessStatus(
            namespace="shop",
            pod="db-0",
            mode="enforce",
            verdict="drop",
            protocol="tcp",
            port=0,
            has_many_ports=True,
            port_count=1000,
            lowest_port=1,
            highest_port=65389,
            cgroup="/",
            process="nmap",
            packets=7,
            first=before(days=3),
            last=before(days=3),
        ),
    ],
    lost_packets=12,
    raw_sockets=[
        RawSocketSourceStatus(
            cgroup=CILIUM,
            process="ping",
            family="raw IPv4",
            verdict="would-drop",
            sockets=2,
            first=before(hours=5),
            last=before(minutes=50),
        )
    ],
)
TOP_DROP = msgspec.structs.replace(DROPS, sources=DROPS.sources[:1])
NOT_ADMITTED = msgspec.structs.replace(
    DROPS, sources=[one for one in DROPS.sources if not one.is_admitted]
)
NO_DROPS = Drops(sources=[], lost_packets=0)
SUPPRESSED = SuppressedEvents(at=before(seconds=1), suppressed=57_891)
_EVENT = DropEventStatus(
    at=before(seconds=1.25),
    namespace="shop",
    pod="db-0",
    verdict="drop",
    reason="node",
    protocol="tcp",
    source_address="198.18.0.1",
    source_port=40112,
    destination_address="198.18.1.12",
    destination_port=5432,
    cgroup=BACKUP,
    process=1454,
    process_name="restic",
)
EVENTS = DropEvents(
    events=[
        _EVENT,
        msgspec.structs.replace(
            _EVENT,
            namespace="kube-system",
            pod="coredns-5d78c9869d-x7k2p",
            verdict="would-drop",
            protocol="udp",
            destination_address="198.18.1.13",
            destination_port=53,
            cgroup=CILIUM,
            source_pod="monitoring/node-scraper-5xq2z",
            process=0,
            process_name="",
        ),
        msgspec.structs.replace(
            _EVENT, namespace="", pod="", reason="tunnel", protocol="udp", destination_port=8472,
            cgroup="/", process_name="vxsend",
        ),
    ],
    newest=3,
    lost=0,
)  # fmt: skip
_POLICIES = [
    PolicyStatus(
        name="backup",
        source="HostAccessPolicy backup of the API server",
        pods=["shop/db-0"],
        rules=[
            RuleStatus(
                source=f"cgroup {BACKUP} and below",
                protocol="TCP",
                ports="5432",
                hits=96,
                problem="",
            )
        ],
        generation=2,
    ),
    PolicyStatus(
        name="monitoring",
        source="HostAccessPolicy monitoring of the API server",
        pods=["shop/web-7f9c6b5d4f-2xkqp", "shop/db-0", "kube-system/coredns-5d78c9869d-x7k2p"],
        rules=[
            RuleStatus(
                source="unit node-scraper.service",
                protocol="TCP",
                ports="9100-9105",
                hits=0,
                problem="Unit node-scraper.service not found; its rule admits nothing.",
            ),
            RuleStatus(source="the kernel", protocol="any", ports="any", hits=3, problem=""),
        ],
    ),
]
RULES = RulesReport(sources=["the API server"], policies=_POLICIES, problems=[])
EGRESS_RULES = RulesReport(
    sources=["the API server"],
    policies=[],
    problems=[],
    egress=[
        EgressPolicyStatus(
            name="host-secrets",
            source="API server",
            action="Enforce",
            subjects=["pods in every namespace"],
            excepted=["pods in kube-system"],
            denied=["169.254.169.254/32", "fd00:ec2::254/128", "the node TCP 10250"],
            would_drop=12,
            drop=3,
            sources=[
                EgressSourceStatus(
                    cgroup="/kubepods/besteffort/pod0c3d1a4e/5f6b",
                    process="curl",
                    protocol="tcp",
                    verdict="drop",
                    attempts=3,
                    first=before(hours=1),
                    last=before(minutes=2),
                )
            ],
            problems=[],
        ),
        EgressPolicyStatus(
            name="loopback",
            source="API server",
            action="Audit",
            subjects=["unit nowhere.service"],
            excepted=[],
            denied=["127.0.0.0/8", "::1/128"],
            would_drop=0,
            drop=0,
            sources=[],
            problems=["This node has no cgroup of unit nowhere.service."],
        ),
    ],
)
OBSERVATIONS = Observations(
    since=before(days=2),
    until=NOW,
    node="worker-1",
    kubelet="/system.slice/kubelet.service",
    flows=[
        ObservedFlows(
            pod=ObservedPod(namespace="shop", name="db-0", labels={"app": "db"}),
            protocol=6,
            port=5432,
            cgroup=BACKUP,
            packets=24,
            first=before(days=1),
            last=before(hours=1),
            process="restic",
        ),
        ObservedFlows(
            pod=ObservedPod(
                namespace="kube-system",
                name="coredns-5d78c9869d-x7k2p",
                labels={"k8s-app": "kube-dns"},
            ),
            protocol=17,
            port=53,
            cgroup="/",
            packets=1,
            first=before(minutes=50),
            last=before(minutes=50),
            process="dig",
        ),
    ],
)
DOCTOR = report_of(
    [
        Passed("privileges", "bpf(2) is allowed and cgroup v2 is mounted."),
        found(
            kinds.PROCESS_NAMES_MISSING,
            "Kernel reports no process names to gates (Linux 6.16): 'podgate drops' shows cgroups, "
            "and processes only for hooks",
        ),
        found(kinds.DECLARED_PORTS_OPEN, TROUBLE.open_ports),
    ]
)


def _with_pinned_findings(status: PinnedStatus) -> PinnedStatus:
    return msgspec.structs.replace(status, findings=pinned_findings.find(status))


PINNED = _with_pinned_findings(
    PinnedStatus(
        agent="no agent responds",
        schema=1,
        heartbeat_age_seconds=40.0,
        stale_after_seconds=15.0,
        dead_man_seconds=86400.0,
        exposures=[
            Exposure(
                what="all",
                pods=1,
                is_open=False,
                at=NOW,
                text="All gates open in 23 h 59 min unless an agent starts (--dead-man-hours).",
            )
        ],
        kubelet="/system.slice/kubelet.service",
        is_kubelet_followed=True,
        hooks=[HookStatus(name="connect4", problem="it has no link")],
        relay=PinnedRelayStatus(is_up=False, beat_age_seconds=40.0, ports=1),
        node_drops={"tunnel": 3},
        gates=[
            PinnedGateStatus(
                interface="veth7d21",
                ifindex=11,
                packets={"drop": {"strict": 2}},
                namespace="shop",
                pod="web-7f9c6b5d4f-2xkqp",
                mode="strict",
                addresses=["198.18.1.11", "fd00:18::11"],
                attachment="tcx",
                declared_ports=True,
                rules=2,
                is_in_grace_period=False,
            ),
            PinnedGateStatus(
                interface="veth55f0",
                ifindex=13,
                packets={"would-drop": {"node": 5120}},
                namespace="",
                pod="",
                mode="audit",
                addresses=["198.18.1.13"],
                attachment="",
                declared_ports=False,
                rules=0,
                is_in_grace_period=False,
            ),
        ],
    )
)
PINNED_OPEN = _with_pinned_findings(
    msgspec.structs.replace(
        PINNED,
        exposures=[
            Exposure(
                what="all",
                pods=1,
                is_open=True,
                at=NOW,
                text="All gates are open: no heartbeat for 25 h, and --dead-man-hours is 24.",
            )
        ],
        kubelet=None,
        hooks=[],
    )
)
_READY = {
    "type": "Ready",
    "status": "CONDITION_STATUS_FALSE",
    "reason": "ContainersNotReady",
    "source": "CONDITION_SOURCE_KUBELET",
    "observeTime": "2026-01-31T07:56:00Z",
}
_PROBES = {
    "type": "podgate.io/probes-passing",
    "status": "CONDITION_STATUS_TRUE",
    "reason": "ProbesPassing",
    "source": "CONDITION_SOURCE_PODGATE",
}
_OWNED = [
    {
        "type": f"gpu.example.com/{name}",
        "status": f"CONDITION_STATUS_{status.upper()}",
        "reason": reason,
        "message": message,
        "source": "CONDITION_SOURCE_OWNER",
        "observeTime": "2026-01-31T07:56:00Z",
    }
    for name, status, reason, message in (
        (
            "healthy",
            "Unknown",
            "OwnerGone",
            "Its owner has been gone since 2026-01-31T07:55:30+00:00; its last report: True "
            "(SelfTestPassed) All eight GPUs pass.",
        ),
        (
            "kept",
            "True",
            "OwnerGone",
            "Its owner has been gone since 2026-01-31T07:55:30+00:00; its last report: True "
            "(Licensed)",
        ),
        (
            "attached",
            "False",
            "SandboxChanged",
            "The last report was about a deleted sandbox; its owner has not reported since.",
        ),
        ("tested", "True", "SelfTestPassed", ""),
    )
]
PODS = PodInfoState(
    instance_id=7,
    rev=12,
    pods=tuple(
        json_format.ParseDict(pod, podinfo_pb2.PodConditions())
        for pod in (
            {
                "podUid": DATABASE.uid,
                "podNamespace": "shop",
                "podName": "db-0",
                "conditions": [_READY, _PROBES, *_OWNED],
            },
            {
                "podUid": LEGACY.uid,
                "podNamespace": "kube-system",
                "podName": "kube-proxy-worker-1",
                "static": True,
            },
        )
    ),
)
SERVICES = ServicesState(
    instance_id=7,
    rev=3,
    services=tuple(
        json_format.ParseDict(service, endpoints_pb2.ServiceEndpoints())
        for service in (
            {
                "namespace": "kube-system",
                "name": "kube-dns",
                "type": "SERVICE_TYPE_CLUSTER_IP",
                "clusterIps": ["198.18.64.10", "fd00:18::a"],
                "ports": [
                    {
                        "name": "dns",
                        "protocol": "PROTOCOL_UDP",
                        "port": 53,
                        "endpoints": [
                            {"address": f"198.18.1.{n}", "port": 53, "isInternal": True,
                             "isLocal": n == 13, "isTerminating": n == 20}
                            for n in range(13, 21)
                        ],
                    }
                ],
            },
            {
                "namespace": "shop",
                "name": "web",
                "type": "SERVICE_TYPE_NODE_PORT",
                "clusterIps": ["198.18.64.20"],
                "ports": [
                    {
                        "name": "http",
                        "protocol": "PROTOCOL_TCP",
                        "port": 80,
                        "nodePort": 30080,
                        "endpoints": [
                            {"address": "fd00:18::11", "port": 8080, "isInternal": True,
                             "isExternal": True, "isLocal": True}
                        ],
                    }
                ],
            },
        )
    ),
    saved_at=before(minutes=9),
)  # fmt: skip
DETAILED_FILTER = endpoints_pb2.NextFilter(
    label_patterns=["*"], annotation_patterns=["*"], all_endpoints=True, endpoint_details=True
)
DETAILED_SERVICES = ServicesState(
    instance_id=7,
    rev=4,
    services=tuple(
        json_format.ParseDict(service, endpoints_pb2.ServiceEndpoints())
        for service in (
            {
                "namespace": "shop",
                "name": "db",
                "type": "SERVICE_TYPE_EXTERNAL_NAME",
                "externalName": "db.example.org",
                "annotations": {"example.org/owner": "storage"},
            },
            {
                "namespace": "shop",
                "name": "web",
                "type": "SERVICE_TYPE_LOAD_BALANCER",
                "clusterIps": ["198.18.64.20"],
                "loadBalancerIngress": [{"hostname": "web.example.org"}],
                "labels": {"app": "web", "team": "shop"},
                "ports": [
                    {
                        "name": "http",
                        "protocol": "PROTOCOL_TCP",
                        "port": 80,
                        "endpoints": [
                            {"address": f"198.18.1.{n}", "port": 8080, "isInternal": n == 1,
                             "isLocal": n == 1, "node": f"node{n}",
                             "pod": {"namespace": "shop", "name": f"web-{n}", "uid": f"u{n}"}}
                            for n in (1, 2)
                        ],
                    }
                ],
            },
        )
    ),
)  # fmt: skip
