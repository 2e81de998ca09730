"""Simulated agents at one API server: bench `fleet`, with BIN as for `make test-cluster`.

NODES (1000) nodes, their agents' pods and reports are objects. On AGENTS (all) of them agents run
the product's own watches and reporter, each with a connection of its own. Figures: the time of
`kubectl podgate status`, requests of the agents by node and hour at rest (SECONDS_AT_REST, more
than the ten minutes that a watch lasts), and what a change of a policy costs.
"""

import asyncio
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from agent.app.node_reporter import NodeReporter
from agent.kube import node_report
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.node_report import NodePolicies, NodeStatus, NodeSummary, revision
from agent.lab import lab as labs
from agent.pods.pod_modes import PodModes
from agent.policy.api_source import ApiPolicies
from bpf.verdicts import Mode
from tests.bench import figures
from tests.cluster import api_only, control_plane
from tests.cluster.api import Json
from tests.cluster.api_only import ApiOnly
from tests.cluster.users import CLUSTER_WIDE, IN_PODGATE
from tests.image import manifests

_PODS_OF_NODE = 3
_AT_ONCE = 16
_STATUS_RUNS = 5
_MOST_SECONDS = 1200
_POLICIES = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_REPORTS = node_report.PATH
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POLICY: Json = {
    "apiVersion": "policy.podgate.io/v1alpha1",
    "kind": "HostAccessPolicy",
    "metadata": {"name": "metrics"},
    "spec": {
        "pods": {"namespaces": ["shop"]},
        "from": [{"systemdUnit": {"name": "telegraf.service"}}],
        "ports": [{"port": 8080}],
    },
}


def main() -> None:
    given = os.environ.get("PODGATE_TEST_BIN", "")
    binaries = pathlib.Path(given).absolute()
    problem = control_plane.missing(binaries) if given else "BIN is not set; name a directory."
    if problem:
        sys.exit(f"bench fleet: {problem}")
    count = int(os.environ.get("NODES", "1000"))
    agents = int(os.environ.get("AGENTS", count))
    rest_seconds = float(os.environ.get("SECONDS_AT_REST", "1200"))
    labs.isolate()
    with (
        tempfile.TemporaryDirectory() as directory,
        api_only.running(binaries, pathlib.Path(directory)) as server,
    ):
        names = [f"node-{number:04}" for number in range(count)]
        _note(f"{count} nodes, their agents' pods, and {_PODS_OF_NODE} pods of each")
        _create_all(server, names)
        _measure_status(server)
        if agents:
            kubeconfig = str(server.kubeconfig("podgate"))
            asyncio.run(_run(server, names[:agents], kubeconfig, rest_seconds))


def _create_all(server: ApiOnly, names: list[str]) -> None:
    for thing in manifests.applied():
        kind, metadata = thing["kind"], thing["metadata"]
        if kind in CLUSTER_WIDE:
            server.api.create(CLUSTER_WIDE[kind], thing)
        elif kind in IN_PODGATE and metadata.get("namespace") == "podgate":
            server.api.create(IN_PODGATE[kind], thing)
    server.api.create(CLUSTER_WIDE["Namespace"], {"metadata": {"name": "shop"}})
    for namespace in ("shop", "podgate"):
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        server.api.create(accounts, {"metadata": {"name": "default"}})
    daemonset = server.api.get(f"{IN_PODGATE['DaemonSet']}/podgate")
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda name: _create(server, daemonset, name), names))


def _create(server: ApiOnly, daemonset: Json, name: str) -> None:
    """A Ready node, its agent's pod as the DaemonSet's controller makes it, and other pods."""
    labels = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    node = {"metadata": {"name": name, "labels": labels}}
    server.api.create("/api/v1/nodes", node)
    ready = [{"type": "Ready", "status": "True"}]
    # As the kubelet's: of 50 images a node names 4 KB.
    images = [{"names": [f"registry.example.com/team/app-{n}:1.{n}.0"]} for n in range(50)]
    server.api.patch(
        f"/api/v1/nodes/{name}/status", {"status": {"conditions": ready, "images": images}}
    )
    owner = {
        **{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "podgate", "controller": True},
        "uid": daemonset["metadata"]["uid"],
    }
    spec = {**daemonset["spec"]["template"]["spec"], "nodeName": name}
    spec.pop("priorityClassName", None)
    agent = {
        "metadata": {
            "name": f"podgate-{name}",
            "labels": daemonset["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [owner],
        },
        "spec": spec,
    }
    pods = [("podgate", agent)]
    containers = [{"name": "web", "image": "web"}]
    for number in range(_PODS_OF_NODE):
        metadata = {"name": f"web-{name}-{number}"}
        pods.append(
            ("shop", {"metadata": metadata, "spec": {"nodeName": name, "containers": containers}})
        )
    for namespace, pod in pods:
        path = f"/api/v1/namespaces/{namespace}/pods"
        server.api.create(path, pod)
        status = {"phase": "Running", "conditions": ready}
        server.api.patch(f"{path}/{pod['metadata']['name']}/status", {"status": status})
    server.api.apply(f"{_REPORTS}/{name}", _report(name))


def _report(name: str) -> Json:
    """As its agent writes it."""
    pods = {"audit": _PODS_OF_NODE}
    summary = NodeSummary("audit", "strict", has_kubelet=True, desired=pods, in_force=pods)
    status = NodeStatus("0.1.0", NodePolicies(revision(())), summary)
    return {
        "apiVersion": node_report.API_VERSION,
        "kind": node_report.KIND,
        "metadata": {"name": name},
        "status": msgspec.to_builtins(status),
    }


class _Agent:
    """What an agent has of the API server: four watches, and its node's report."""

    def __init__(self, api: ApiClient, name: str, directory: pathlib.Path) -> None:
        self.pods = ApiPods(
            api,
            node_name=name,
            modes=PodModes(Mode.AUDIT, is_complete=False, own_namespace="podgate"),
        )
        self.policies = ApiPolicies(api, state=directory / "policies.json")
        self._reporter = NodeReporter(api, name, status=self._status, node_uid=self._uid)
        self._api = api

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.pods.run())
                group.create_task(self.policies.watcher.run())
                group.create_task(self._reporter.run())
        finally:
            await self._api.aclose()

    @property
    def is_synced(self) -> bool:
        return self.pods.is_synced and self.policies.watcher.synced.is_set()

    def _uid(self) -> str:
        found = list(self.pods.nodes.objects.values())
        return found[0].metadata.uid if found else ""

    def _status(self) -> NodeStatus | None:
        if not self.is_synced:
            return None
        policies = [one.metadata for one in self.policies.watcher.objects.values()]
        pods = {"audit": len(self.pods.pods.objects) - 1}
        summary = NodeSummary("audit", "strict", has_kubelet=True, desired=pods, in_force=pods)
        return NodeStatus("0.1.0", NodePolicies(revision(policies), len(policies)), summary)


async def _run(server: ApiOnly, names: list[str], kubeconfig: str, rest_seconds: float) -> None:
    api_server = server.control_plane.api_server
    _note("agents start")
    tasks: list[asyncio.Task[None]] = []
    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        agents = [
            _Agent(await ApiClient.open(kubeconfig), name, pathlib.Path(directory))
            for name in names
        ]
        # A roll-out starts agents one after the other as well.
        for agent in agents:
            tasks.append(asyncio.create_task(agent.run()))
            await asyncio.sleep(0.01)
        await _until(lambda: all(agent.is_synced for agent in agents))
        figures.emit("fleet", "agents_synced_seconds", [time.monotonic() - started], "s")

        _note(f"{rest_seconds:.0f} s at rest")
        before, began = await asyncio.to_thread(_requests, server), time.monotonic()
        await asyncio.sleep(rest_seconds)
        after, seconds = await asyncio.to_thread(_requests, server), time.monotonic() - began
        scale = 3600 / seconds / len(names)
        parts = {f"{verb} {what}": n * scale for (verb, what), n in (after - before).items()}
        figures.emit(
            *("fleet", "requests_per_node_and_hour", [sum(parts.values())], "requests"),
            parts=parts,
        )
        figures.emit("fleet", "api_server_mb", [_rss_mb(api_server.pid)], "MB")

        _note("a policy changes")
        before, began = after, time.monotonic()
        await asyncio.to_thread(server.api.create, _POLICIES, _POLICY)
        await _until(lambda: all(agent.policies.watcher.objects for agent in agents))
        figures.emit("fleet", "policy_received_seconds", [time.monotonic() - began], "s")
        await _until(lambda: _count_reports(server) == len(names))
        figures.emit("fleet", "policy_reported_seconds", [time.monotonic() - began], "s")
        after = await asyncio.to_thread(_requests, server)
        writes = sum(
            n
            for (verb, what), n in (after - before).items()
            if what == "nodereports" and verb == "APPLY"
        )
        figures.emit("fleet", "writes_of_a_policy_change", [float(writes)], "requests")

        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _measure_status(server: ApiOnly) -> None:
    _note("kubectl podgate status")
    times = [_status(server) for _ in range(_STATUS_RUNS)]
    walls, cpus = zip(*times, strict=True)
    figures.emit("fleet", "status_seconds", walls, "s")
    figures.emit("fleet", "status_cpu_seconds", cpus, "s")
    text = server.api.text(_REPORTS)
    count = len(server.api.items(_REPORTS))
    figures.emit("fleet", "bytes_of_a_report", [len(text) / count], "bytes")


async def _until(holds: Callable[[], bool]) -> None:
    """Checked once a second, in a thread."""
    for _ in range(_MOST_SECONDS):
        if await asyncio.to_thread(holds):
            return
        await asyncio.sleep(1)
    sys.exit(f"bench fleet: not within {_MOST_SECONDS} s")


def _status(server: ApiOnly) -> tuple[float, float]:
    """Seconds, and CPU seconds with those of kubectl."""
    kubectl = shutil.which("kubectl")
    assert kubectl, "kubectl is not installed; put it into PATH"
    kubeconfig = server.control_plane.kubeconfig("admin")
    command = [
        *(sys.executable, "-m", "agent.operate.kubectl.main"),
        *("--kubectl", kubectl, "--kubeconfig", str(kubeconfig), "--timeout", "60", "status"),
    ]
    before, began = os.times(), time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "HOME": str(kubeconfig.parent)},
        check=False,
        capture_output=True,
        text=True,
    )
    seconds, after = time.monotonic() - began, os.times()
    assert "by their NodeReports" in done.stderr, done
    assert " nodes: " in done.stdout, done
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return seconds, cpu


def _count_reports(server: ApiOnly) -> int:
    """Of nodes that have a policy."""
    return sum(
        one["status"].get("policies", {}).get("count", 0) == 1 for one in server.api.items(_REPORTS)
    )


def _requests(server: ApiOnly) -> Counter[tuple[str, str]]:
    """Of agents by verb and resource, as the API server has counted them; a watch counts when it
    ends."""
    found: Counter[tuple[str, str]] = Counter()
    for name, labels, value in _SAMPLE.findall(server.api.text("/metrics")):
        if name == "apiserver_request_total":
            fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            resource = fields.get("resource", "")
            if resource in ("pods", "namespaces", "nodes", "hostaccesspolicies", "nodereports"):
                found[fields["verb"], resource] += int(float(value))
    return found


def _rss_mb(pid: int) -> float:
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _note(text: str) -> None:
    sys.stderr.write(f"  {text}\n")


if __name__ == "__main__":
    main()
