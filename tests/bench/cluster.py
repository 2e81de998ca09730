"""podgate in a real cluster of one node: bench `cluster`, with BIN as for `make test-cluster`.

PODGATE_BENCH_PARTS="restart rest" runs some of its parts alone.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from agent.lab import lab as labs
from tests.bench import figures, resting
from tests.cluster import cni, control_plane, one_node, workloads
from tests.cluster.api import Json
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.watching import Watch, watch
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    MODE,
    PORT,
    PROBED,
    PROBES_PASSING,
    WEB,
    Workloads,
)
from tests.image import building

# In this order.
_PARTS = (os.environ.get("PODGATE_BENCH_PARTS") or "burst single restart rest cni").split()
_SINGLE_PODS = 20
_BURST_PODS = 60
_BURSTS = 3
_RESTING_PODS = 100
_RESTING_SECONDS = 30
_RESTS = 3
_KUBELET_RESTARTS = 5
_PATIENT: Json = {**PROBED, "startupProbe": {**HTTP_PROBE, "failureThreshold": 300}}
_USUAL: Json = {
    **WEB,
    # Every ten seconds, the API's default.
    "readinessProbe": {"httpGet": HTTP_PROBE["httpGet"]},
    "livenessProbe": {"httpGet": HTTP_PROBE["httpGet"]},
}
# Prints when it could connect, by the clock that all processes share.
_CONNECT = """
import socket, sys, time
sys.stdin.readline()
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.01).close()
        break
    except OSError:
        pass
print(time.monotonic())
"""


def main() -> None:
    given = os.environ.get("PODGATE_TEST_BIN", "")
    binaries = pathlib.Path(given).absolute()
    problem = control_plane.missing(binaries) if given else "BIN is not set; name a directory."
    if problem:
        sys.exit(f"bench cluster: {problem}")
    with tempfile.TemporaryDirectory() as directory:
        image = pathlib.Path(directory, "podgate.tar")
        building.build(image, one_node.IMAGE)
        labs.isolate()
        with one_node.running(binaries, image) as node:
            _note(f"Kubernetes {node.api.get('/version')['gitVersion']}")
            _run(node)


def _run(node: OneNode) -> None:
    without = []
    if "burst" in _PARTS:
        _note(f"{_BURST_PODS} pods at once, without podgate")
        without = [burst_seconds(node, "", ()) for _ in range(_BURSTS)]
    podgate = Deployment(node.api)
    podgate.apply()
    podgate.wait_until_ready()
    if "burst" in _PARTS:
        _note(f"{_BURST_PODS} pods at once, strict and with both gates")
        gates = (ISOLATION_READY, PROBES_PASSING)
        bursts = [burst_seconds(node, "strict", gates) for _ in range(_BURSTS)]
        figures.emit("cluster", "burst_60_pods_seconds", bursts, "s", baseline=without)
    if "single" in _PARTS:
        _note(f"{_SINGLE_PODS} pods one by one")
        _emit_delays(node, "ready_minus_containers_ready")
    if "restart" in _PARTS:
        _note("the kubelet restarts")
        figures.emit("cluster", "kubelet_restart_followed_ms", list(_followed_ms(node)), "ms")
    if "rest" in _PARTS:
        _note(f"{_RESTING_PODS} pods at rest")
        _rest(node, podgate)
    if "cni" in _PARTS:
        _note(f"{_SINGLE_PODS} pods one by one, with podgate-cni")
        with cni.installed(node, podgate):
            _emit_delays(node, "ready_minus_containers_ready_with_cni")


@contextlib.contextmanager
def _namespace(node: OneNode, mode: str) -> Iterator[tuple[Workloads, Watch]]:
    """A namespace with this mode, and a watch of its pods."""
    labels = {MODE: mode} if mode else {}
    name = f"bench-{time.monotonic_ns()}"
    with workloads.namespace(node.api, name, labels) as users, watch(users) as seen:
        yield users, seen


def burst_seconds(node: OneNode, mode: str, gates: tuple[str, ...]) -> float:
    """From the first pod's creation until all are Ready."""
    names = [f"web{number}" for number in range(_BURST_PODS)]
    with _namespace(node, mode) as (users, seen):
        start = time.monotonic()
        for name in names:
            users.run(name, _PATIENT, gates=gates)
        return max(seen.when(name, "Ready") for name in names) - start


def _emit_delays(node: OneNode, name: str) -> None:
    delays = sorted(_delays_ms(node))
    figures.emit("cluster", f"{name}_p50_ms", delays, "ms")
    # Of 20 samples the 19th.
    p95 = delays[round(0.95 * len(delays)) - 1]
    figures.emit("cluster", f"{name}_p95_ms", [p95], "ms")


def _delays_ms(node: OneNode) -> Iterator[float]:
    """Of pods without probes, whose gate is all that readiness waits for beside the containers."""
    with _namespace(node, "enforce") as (users, seen):
        for number in range(_SINGLE_PODS):
            name = f"web{number}"
            users.run(name, gates=(ISOLATION_READY,))
            ready = seen.when(name, "Ready")
            yield (ready - seen.when(name, "ContainersReady")) * 1000
            users.delete(name)
            users.until_gone(name)


def _followed_ms(node: OneNode) -> Iterator[float]:
    """From the start of a kubelet in a new cgroup until a socket of it reaches a declared port."""
    with _namespace(node, "enforce") as (users, _):
        users.run("web", PROBED, gates=(ISOLATION_READY,))
        (pod,) = users.until_ready("web")
        for _ in range(_KUBELET_RESTARTS):
            node.kubelet.stop()
            with subprocess.Popen(
                [sys.executable, "-c", _CONNECT, pod["status"]["podIP"], str(PORT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                start = time.monotonic()
                node.kubelet.start()
                members = node.kubelet.daemon.cgroup / "cgroup.procs"
                members.write_text(str(process.pid))
                answer, _ = process.communicate("\n", timeout=60)
            yield (float(answer) - start) * 1000
            node.kubelet.wait_until_ready()


def _rest(node: OneNode, podgate: Deployment) -> None:
    """CPU time of the agent and its relay beside the kubelet's, and their memory, with most pods
    in strict."""
    names = [f"web{number}" for number in range(_RESTING_PODS)]
    with _namespace(node, "strict") as (users, seen):
        for name in names:
            users.run(name, _USUAL, gates=(ISOLATION_READY, PROBES_PASSING))
        for name in names:
            seen.when(name, "Ready")
        agent = podgate.until("the agent responds", lambda report: report.pid).pid
        relays = resting.children(agent)
        kubelet = node.kubelet.daemon.pid
        time.sleep(_RESTING_SECONDS)
        windows = [
            resting.samples([agent, *relays, kubelet], _RESTING_SECONDS) for _ in range(_RESTS)
        ]
    of_agent = [window[agent] for window in windows]
    of_relays = [[window[pid] for pid in relays] for window in windows]
    of_kubelet = [window[kubelet].cpu_percent for window in windows]
    relay_cpu = [sum(relay.cpu_percent for relay in each) for each in of_relays]
    relay_pss = [sum(relay.pss_mb for relay in each) for each in of_relays]
    agent_cpu = [sample.cpu_percent for sample in of_agent]
    agent_pss = [sample.pss_mb for sample in of_agent]
    figures.emit("cluster", "agent_cpu_over_kubelet_at_rest", agent_cpu, "%", baseline=of_kubelet)
    figures.emit("cluster", "relay_cpu_over_kubelet_at_rest", relay_cpu, "%", baseline=of_kubelet)
    wakeups = [sample.all_wakeups_per_second for sample in of_agent]
    figures.emit("cluster", "agent_wakeups_per_second_at_rest", wakeups, "1/s")
    both_cpu = [one + other for one, other in zip(agent_cpu, relay_cpu, strict=True)]
    figures.emit("cluster", "agent_and_relay_cpu_percent_at_rest", both_cpu, "%")
    both_pss = [one + other for one, other in zip(agent_pss, relay_pss, strict=True)]
    figures.emit("cluster", "agent_pss_mb", agent_pss, "MB")
    figures.emit("cluster", "agent_and_relay_pss_mb", both_pss, "MB")


def _note(text: str) -> None:
    sys.stderr.write(f"bench cluster: {text}\n")


if __name__ == "__main__":
    main()
