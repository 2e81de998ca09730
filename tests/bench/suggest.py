"""What suggestions cost, as a part of bench `policy`.

suggest_100_nodes_ms: `podgate suggest --from` of what 100 nodes have observed in a day, from the
start of the process to the end of its output.
"""

import datetime
import pathlib
import subprocess
import sys
import tempfile
import time

import msgspec

from agent.admin.observations import Observations, ObservedFlows, ObservedPod
from tests.bench import figures

NODES = 100
SAMPLES = 5
_SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_DAY = datetime.timedelta(days=1)
# A node of 110 pods: workloads that a dozen services and hostNetwork pods of each node call on one
# or two ports, a few one-offs, and one scan that has used up its share.
_WORKLOADS = 40
_SERVICES = 6
_HOST_PODS = 6
_ONE_OFFS = 20
_SCANNED = 1024


def measure() -> None:
    with tempfile.TemporaryDirectory() as made:
        path = pathlib.Path(made) / "observed.json"
        nodes = [{"nodes": [_node(number)]} for number in range(NODES)]
        path.write_bytes(msgspec.json.encode(nodes))
        flows = sum(len(node["nodes"][0].flows) for node in nodes)
        sys.stderr.write(f"{flows} flows, {path.stat().st_size >> 20} MiB\n")
        samples = [_milliseconds(path) for _ in range(SAMPLES)]
    figures.emit("policy", "suggest_100_nodes_ms", samples, "ms")


def _milliseconds(path: pathlib.Path) -> float:
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "agent", "suggest", "--from", str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (time.monotonic() - started) * 1000


def _node(number: int) -> Observations:
    flows = [
        _flows(number, workload, f"/system.slice/agent-{service}.service", port)
        for workload in range(_WORKLOADS)
        for service in range(_SERVICES)
        for port in (8080, 9090)
    ]
    for workload in range(_WORKLOADS):
        for host_pod in range(_HOST_PODS):
            uid = f"{number:08x}-0000-4000-8000-{host_pod:012x}"
            pod = ObservedPod(
                namespace="kube-system",
                name=f"daemon-{host_pod}-{number}",
                labels={"app": f"daemon-{host_pod}", "controller-revision-hash": "1"},
                host_network=True,
            )
            path = f"/kubepods/burstable/pod{uid}/{'ab' * 32}"
            flows.append(_flows(number, workload, path, 8080, source_pod=pod))
    flows += [
        _flows(number, one % _WORKLOADS, f"/user.slice/session-{number}-{one}.scope", 8080)
        for one in range(_ONE_OFFS)
    ]
    flows += [_flows(number, 0, "/opt/scanner", port) for port in range(1, _SCANNED)]
    return Observations(since=_SINCE, until=_SINCE + _DAY, node=f"node-{number}", flows=flows)


def _flows(
    node: int, workload: int, cgroup: str, port: int, *, source_pod: ObservedPod | None = None
) -> ObservedFlows:
    pod = ObservedPod(
        namespace=f"team-{workload % 10}",
        name=f"app-{workload}-{node}",
        labels={"app": f"app-{workload}", "tier": "backend", "pod-template-hash": str(node)},
        namespace_labels={"kubernetes.io/metadata.name": f"team-{workload % 10}"},
    )
    return ObservedFlows(
        pod=pod,
        protocol=6,
        port=port,
        cgroup=cgroup,
        source_pod=source_pod,
        process="agent",
        packets=1000,
        first=_SINCE + datetime.timedelta(hours=1),
        last=_SINCE + datetime.timedelta(hours=20),
    )
